"""The routes of rerankers: each pair of texts is a prompt, and the last stage's head makes a score of its last row."""

from __future__ import annotations

import asyncio
import secrets
import time
from typing import Literal

import msgspec
from aiohttp import web

from relayline.coordinator.http.edge.middleware import json_response
from relayline.coordinator.http.pooled import PooledHandlers
from relayline.coordinator.http.rerank.asking import RankOptions
from relayline.coordinator.http.rerank.scores import rerank_reply, score_reply
from relayline.coordinator.http.workers.prepared import Prepared
from relayline.wire.common.errors import NotServedError
from relayline.wire.common.sampler_fields import POOLINGS


class RerankHandlers(PooledHandlers):
    """The handlers of one application."""

    async def rerank(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/rerank: documents by how well they answer a query."""
        prepared, rows = await self._scored(request, "rerank", "documents")
        options = msgspec.msgpack.decode(prepared.answer_options, type=RankOptions)
        return json_response(await asyncio.to_thread(rerank_reply, prepared.model, rows, options, prepared.n_tokens))

    async def score(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/score: the scores of pairs of texts, in their order."""
        prepared, rows = await self._scored(request, "score", "text_2")
        name, created = f"score-{secrets.token_hex(16)}", int(time.time())
        return json_response(
            await asyncio.to_thread(score_reply, name, created, prepared.model, rows, prepared.n_tokens)
        )

    async def _scored(
        self, request: web.Request, route: Literal["rerank", "score"], param: str
    ) -> tuple[Prepared, list[bytes]]:
        """Return a body and the chances of the labels for each of its pairs. Raises NotServedError."""
        if not self._service.tokenizer.n_labels:
            text = "this model's file has no head that ranks (cls.output.weight); llama.cpp's converter writes one"
            raise NotServedError(f"reranking is not served: {text}")
        numbers = {"pooling": POOLINGS["last"], "ranked": 1}
        return await self._pooled(request, route, numbers, param, may_copy=True)
