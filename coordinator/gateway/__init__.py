"""One address in front of several pipelines: replicas of a model, and several models."""
