"""Embeddings, /v1/embeddings and llama-server's /embedding: bodies as prompts, hidden rows as vectors."""
