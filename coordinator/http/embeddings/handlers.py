"""The routes of embeddings: each input is a prompt that the stages read and do not continue."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import secrets
from collections.abc import Callable, Sequence

import msgspec
from aiohttp import web

from relayline.coordinator.http.edge.middleware import json_response
from relayline.coordinator.http.edge.record import RECORD
from relayline.coordinator.http.embeddings.asking import AnswerOptions
from relayline.coordinator.http.embeddings.vectors import llama_reply, openai_reply
from relayline.coordinator.http.handlers import Handlers
from relayline.coordinator.http.replies.job import unpacked_prompts
from relayline.coordinator.http.replies.observe import note_embeddings, note_prompts
from relayline.coordinator.http.replies.spending import Spending
from relayline.coordinator.http.workers.prepared import Prepared
from relayline.coordinator.observe.usage import Spent
from relayline.coordinator.sessions.generation import GenerationRequest, SamplingParams, TokenStream
from relayline.wire.common.errors import ContextLengthError, InternalError, NotServedError, OverloadedError
from relayline.wire.common.sampler_fields import POOLINGS

OPEN_MAX = 16  # inputs of one body that are read at once: others get lanes too
_DEFAULT = "last"  # where neither a flag nor the model says more; of a causal model only its last row has seen all


class EmbeddingHandlers(Handlers):
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

    async def rerank(self, _request: web.Request) -> web.StreamResponse:
        """POST /v1/rerank: refused, for rerankers are not split."""
        text = "models with a head that ranks (cls tensors) cannot be split, so none is served; compare /v1/embeddings"
        raise NotServedError(f"reranking is not served: {text}")

    async def _rows(self, request: web.Request) -> tuple[Prepared, list[bytes], AnswerOptions]:
        self._check_taken(request)
        service = self._service
        prepared = await service.read_in("embeddings", request, await request.read())
        self._check_may_use(request, prepared.model)
        options = msgspec.msgpack.decode(prepared.answer_options, type=AnswerOptions)
        prompts = [prompt.tokens for prompt in await unpacked_prompts(prepared)]
        name = f"embd-{secrets.token_hex(16)}"
        note_embeddings(service.observer, request, prepared.model, name)
        note_prompts(request, prepared.start_ns, prepared.end_ns, list(map(len, prompts)))
        service.generator.check_ready()
        ctx_tokens = service.generator.ctx_tokens
        longest = max(map(len, prompts))
        if longest >= ctx_tokens:
            raise ContextLengthError.of_prompt(ctx_tokens - 1, f"{longest} tokens", "input")
        pooling = self._pooling()
        sampling = SamplingParams(0.0, numbers=(("pooling", float(pooling)),))
        may_copy = pooling == POOLINGS["last"]  # else rows that are copied would be missing in the pool
        adapter, tenant = self._service.limits.adapter_of(prepared.model), request[RECORD].tenant
        wanted = [
            GenerationRequest(
                f"{name}-{at}",
                tokens,
                1,
                sampling,
                ignore_eos=True,
                cache_prompt=may_copy,
                adapter=adapter,
                tenant=tenant,
            )
            for at, tokens in enumerate(prompts)
        ]
        spending, n_tokens = Spending(request, service.observer), prepared.n_tokens
        spending.check(n_tokens)
        rows: list[bytes] = []
        try:
            rows = await self._read_all(wanted, request, lambda: spending.begun(n_tokens))
        finally:
            spending.ended(Spent(n_tokens if rows else 0, 0, 0))
        return prepared, rows, options

    def _pooling(self) -> int:
        """Return how rows are pooled: as the flag says, else as the model does."""
        asked, own = self._service.limits.pooling, self._service.tokenizer.pooling
        if asked != "auto":
            return POOLINGS[asked]
        return own if own is not None and own in POOLINGS.values() else POOLINGS[_DEFAULT]

    async def _read_all(
        self, wanted: Sequence[GenerationRequest], request: web.Request, begun: Callable[[], None]
    ) -> list[bytes]:
        """Return the pooled row of each prompt, with a few of them under way at once. Raises what any meets.

        `begun` is called once, when the first of them has been admitted.
        """
        rows: list[bytes] = []
        left = collections.deque(wanted)
        streams: collections.deque[TokenStream] = collections.deque()
        try:
            while left or streams:
                while left and len(streams) < OPEN_MAX:
                    try:
                        streams.append(self._service.generator.open(left[0], request[RECORD]))
                    except OverloadedError:
                        if not streams:
                            raise
                        break  # one of ours ends first
                    if len(left) == len(wanted):
                        begun()
                    left.popleft()
                rows.append(await _row(streams[0]))
                await streams.popleft().aclose()
        finally:
            for stream in streams:
                with contextlib.suppress(asyncio.CancelledError):
                    await stream.aclose()
        return rows


async def _row(stream: TokenStream) -> bytes:
    async for event in stream:
        if event.embedding:
            return event.embedding
    raise InternalError("a prompt gave no embedding; this is a bug of the server")
