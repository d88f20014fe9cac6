"""A model's files on this machine: found or downloaded, split into the cache, tried, repaired."""
