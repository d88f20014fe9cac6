"""The routes of embeddings: each input is a prompt, and its pooled row is the vector."""

from __future__ import annotations

import asyncio

import msgspec
from aiohttp import web

from relayline.coordinator.http.edge.middleware import json_response
from relayline.coordinator.http.embeddings.asking import AnswerOptions
from relayline.coordinator.http.embeddings.vectors import llama_reply, openai_reply
from relayline.coordinator.http.pooled import PooledHandlers
from relayline.coordinator.http.workers.prepared import Prepared
from relayline.wire.common.sampler_fields import POOLINGS

_DEFAULT = "last"  # where neither a flag nor the model says more; of a causal model only its last row has seen all


class EmbeddingHandlers(PooledHandlers):
    """The handlers of one application."""

    async def create(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/embeddings: the pooled hidden rows of each input, normed."""
        prepared, rows, options = await self._rows(request)
        n_tokens = prepared.n_tokens
        return json_response(await asyncio.to_thread(openai_reply, prepared.model, rows, options, n_tokens))

    async def create_plain(self, request: web.Request) -> web.StreamResponse:
        """POST /embedding: the same in llama-server's own form."""
        _, rows, options = await self._rows(request)
        return json_response(await asyncio.to_thread(llama_reply, rows, options))

    async def _rows(self, request: web.Request) -> tuple[Prepared, list[bytes], AnswerOptions]:
        pooling = self._pooling()
        may_copy = pooling == POOLINGS["last"]  # else rows that are copied would be missing in the pool
        prepared, rows = await self._pooled(request, "embeddings", {"pooling": pooling}, "input", may_copy=may_copy)
        return prepared, rows, msgspec.msgpack.decode(prepared.answer_options, type=AnswerOptions)

    def _pooling(self) -> int:
        """Return how rows are pooled: as the flag says, else as the model does."""
        asked, own = self._service.limits.pooling, self._service.tokenizer.pooling
        if asked != "auto":
            return POOLINGS[asked]
        return own if own is not None and own in POOLINGS.values() else POOLINGS[_DEFAULT]
