"""Prompts that the stages read and do not continue: one pooled row comes of each, as for embeddings and reranking."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from aiohttp import web

from relayline.coordinator.http.edge.record import RECORD
from relayline.coordinator.http.handlers import Handlers
from relayline.coordinator.http.replies.job import unpacked_prompts
from relayline.coordinator.http.replies.observe import note_pooled, note_prompts
from relayline.coordinator.http.replies.spending import Spending
from relayline.coordinator.http.workers.prepared import Prepared
from relayline.coordinator.observe.usage import Spent
from relayline.coordinator.sessions.generation import GenerationRequest, SamplingParams, TokenStream
from relayline.coordinator.sessions.tenants import circle_of
from relayline.wire.common.errors import ContextLengthError, InternalError, OverloadedError

OPEN_MAX = 16  # prompts of one body that are read at once: others get lanes too


class PooledHandlers(Handlers):
    """The handlers of one application whose routes are answered with pooled rows."""

    async def _pooled(
        self,
        request: web.Request,
        route: Literal["embeddings", "rerank", "score"],
        numbers: Mapping[str, int],
        param: str,
        *,
        may_copy: bool,
    ) -> tuple[Prepared, list[bytes]]:
        """Return a body and the pooled row of each of its prompts (f32 values).

        `numbers` say how rows are pooled; `param` is the field that holds the prompts. `may_copy`: what streams have
        read alike need not be read again. Raises the body's error, ContextLengthError, and the refusal of the pipeline.
        """
        self._check_taken(request)
        service = self._service
        prepared = await service.prepared(route, request)
        self._check_may_use(request, prepared.model)
        prompts = [prompt.tokens for prompt in await unpacked_prompts(prepared)]
        name = f"embd-{secrets.token_hex(16)}"
        note_pooled(service.observer, request, prepared.model, name)
        note_prompts(request, prepared.start_ns, prepared.end_ns, list(map(len, prompts)))
        service.generator.check_ready()
        ctx_tokens, longest = service.generator.ctx_tokens, max(map(len, prompts))
        if longest >= ctx_tokens:
            raise ContextLengthError.of_prompt(ctx_tokens - 1, f"{longest} tokens", param)
        tenant = request[RECORD].tenant
        wanted = [
            GenerationRequest(
                f"{name}-{at}",
                tokens,
                max_tokens=1,
                sampling=SamplingParams(0.0, numbers=tuple((key, float(value)) for key, value in numbers.items())),
                ignore_eos=True,
                cache_prompt=may_copy,
                adapter=service.limits.adapter_of(prepared.model),
                tenant=tenant,
                circle=circle_of(tenant, ""),
            )
            for at, tokens in enumerate(prompts)
        ]
        return prepared, await self._spend(request, wanted, prepared.n_tokens)

    async def _spend(self, request: web.Request, wanted: Sequence[GenerationRequest], n_tokens: int) -> list[bytes]:
        """Read all prompts, and count their `n_tokens` for the key that was shown. Raises what any of them meets."""
        spending = Spending(request, self._service.observer)
        spending.check(n_tokens)
        rows: list[bytes] = []
        try:
            rows = await self._read_all(wanted, request, lambda: spending.begun(n_tokens))
        finally:
            spending.ended(Spent(n_tokens if rows else 0, 0, 0))
        return rows

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
    raise InternalError("a prompt gave no pooled row; this is a bug of the server")
