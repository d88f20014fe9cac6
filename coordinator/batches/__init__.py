"""OpenAI's batches: files of requests, one JSON object per line, and files of their answers."""
