"""Embeddings, /v1/embeddings and llama-server's /embedding: bodies as prompts, pooled rows as vectors."""
