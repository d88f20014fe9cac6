"""From the chances of a reranker's labels to answers. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from relayline.coordinator.http.replies import shapes
from relayline.coordinator.http.rerank.asking import RankOptions


def score_of(row: bytes) -> float:
    """Return a prompt's score from the chances of its labels (f32): the chance of the first, which means yes."""
    return float(np.frombuffer(row, np.float32)[0])


def rerank_reply(model: str, rows: Sequence[bytes], options: RankOptions, n_prompt_tokens: int) -> bytes:
    """Return the documents by falling score: Jina's body, or that of text-embeddings-inference."""
    scores = list(map(score_of, rows))
    order = sorted(range(len(scores)), key=lambda index: (-scores[index], index))[: options.top_n or None]
    if options.is_bare_list:
        shown = [{"index": index, "score": scores[index]} | _text(options, index) for index in order]
        return shapes.encode(shown)
    results = [shapes.RankedDocument(index, scores[index], _document(options, index)) for index in order]
    usage = shapes.EmbeddingsUsage(n_prompt_tokens, n_prompt_tokens)
    return shapes.encode(shapes.Reranked(model, usage, results))


def _text(options: RankOptions, index: int) -> dict[str, str]:
    return {"text": options.documents[index]} if options.documents else {}


def _document(options: RankOptions, index: int) -> shapes.RankedText | msgspec.UnsetType:
    return shapes.RankedText(options.documents[index]) if options.documents else msgspec.UNSET


def score_reply(name: str, created: int, model: str, rows: Sequence[bytes], n_prompt_tokens: int) -> bytes:
    """Return vLLM's body of scores, in the order of the pairs."""
    data = [shapes.Score(index, score_of(row)) for index, row in enumerate(rows)]
    usage = shapes.EmbeddingsUsage(n_prompt_tokens, n_prompt_tokens)
    return shapes.encode(shapes.Scores(name, created, model, data, usage))
