"""Routes that other servers' clients know under other names: every path of each, ours first."""

from __future__ import annotations

RERANK_PATHS = ("/v1/rerank", "/v2/rerank", "/rerank", "/v1/reranking", "/reranking")  # Jina, Cohere, llama-server
SCORE_PATHS = ("/v1/score", "/score")
TRANSCRIPTION_PATHS = ("/v1/audio/transcriptions", "/audio/transcriptions")
