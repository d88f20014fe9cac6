"""Reranking, /v1/rerank and /v1/score: bodies as prompts, chances of labels as scores."""
