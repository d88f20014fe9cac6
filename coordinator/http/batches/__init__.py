"""OpenAI's /v1/files and /v1/batches: what is kept on disk, the processes that work on it, and the routes."""
