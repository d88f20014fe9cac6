"""The load generator: streams of completions over HTTP, greedy unless asked otherwise, timed token by token.

It speaks to relayline (`/v1/completions` with `return_token_ids`) and to llama-server (`/completion` with
`return_tokens`); prompts are token ids, so no tokenizer is involved. Closed loop: N streams, each sending its next
request as soon as it is answered. Open loop: arrivals at random times. Waits count from the intended arrival, so that a
slow server cannot hide behind a client that waits for it. Times are the client's: the moment a token's event was read
from the socket.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import math
import random
import ssl
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import aiohttp

REQUEST_TIMEOUT_S = 900.0


@dataclasses.dataclass(frozen=True, slots=True)
class Target:
    """One server under load."""

    url: str
    dialect: str  # "openai" for relayline, "llama" for llama-server
    model: str = ""
    cache_prompt: bool = False  # let it reuse its computation of earlier prompts


@dataclasses.dataclass(slots=True)
class Request:
    """One completion as the client saw it. All times are monotonic nanoseconds."""

    prompt_index: int
    n_tokens: int  # asked for
    due_ns: int  # when it should have been sent: the intended arrival in an open loop, else when it was sent
    tokens: list[int] = dataclasses.field(default_factory=list)
    token_ns: list[int] = dataclasses.field(default_factory=list)  # one entry per token
    error: str = ""
    prediction: Sequence[int] = ()  # the expected answer; only relayline reads it
    fields: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # of the body, before a greedy completion's own

    @property
    def is_complete(self) -> bool:
        """Whether the answer has as many tokens as were asked for."""
        return not self.error and len(self.tokens) == self.n_tokens


@dataclasses.dataclass(frozen=True, slots=True)
class Summary:
    """The results of one run of the load generator."""

    n_requests: int
    n_complete: int
    n_tokens: int
    wall_s: float  # from the first request to the last token
    tok_s: float  # tokens / wall_s, prompts included in the time
    decode_tok_s: float  # tokens after each answer's first / time from the first token of all to the last
    ttft_ms: dict[str, float]  # p50, p95
    itl_ms: dict[str, float]  # mean, p50, p95, p99; 0 between tokens that came together
    error: str  # of the first request that failed


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value at `share` (0..1), interpolated between neighbours; nan of nothing."""
    if not values:
        return float("nan")
    ordered = sorted(values)
    at = share * (len(ordered) - 1)
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def intervals_ms(request: Request) -> list[float]:
    """Return the times between neighbouring tokens of one answer."""
    return [(later - earlier) / 1e6 for earlier, later in zip(request.token_ns, request.token_ns[1:], strict=False)]


def summarise(requests: Sequence[Request]) -> Summary:
    """Reduce the requests of one run to its figures."""
    answered = [request for request in requests if request.token_ns]
    n_tokens = sum(len(request.tokens) for request in answered)
    first_ns = min((request.due_ns for request in requests), default=0)
    first_token_ns = min((request.token_ns[0] for request in answered), default=0)
    last_ns = max((request.token_ns[-1] for request in answered), default=first_ns)
    wall_s, decode_s = (last_ns - first_ns) / 1e9, (last_ns - first_token_ns) / 1e9
    ttft_ms = [(request.token_ns[0] - request.due_ns) / 1e6 for request in answered]
    itl_ms = [interval for request in answered for interval in intervals_ms(request)]
    return Summary(
        n_requests=len(requests),
        n_complete=sum(request.is_complete for request in requests),
        n_tokens=n_tokens,
        wall_s=wall_s,
        tok_s=n_tokens / wall_s if wall_s > 0 else 0.0,
        decode_tok_s=(n_tokens - len(answered)) / decode_s if decode_s > 0 else 0.0,
        ttft_ms={f"p{share}": percentile(ttft_ms, share / 100) for share in (50, 95)},
        itl_ms={"mean": sum(itl_ms) / len(itl_ms) if itl_ms else float("nan")}
        | {f"p{share}": percentile(itl_ms, share / 100) for share in (50, 95, 99)},
        error=next((request.error for request in requests if request.error), ""),
    )


def json_ready(value: Any) -> Any:
    """Return dicts and lists of figures for JSON: nan and infinity become None."""
    if isinstance(value, dict):
        return {key: json_ready(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [json_ready(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def body_of(
    target: Target, prompt: Sequence[int], n_tokens: int, prediction: Sequence[int] = ()
) -> tuple[str, dict[str, Any]]:
    """Return (path, JSON body) of one streamed greedy completion."""
    if target.dialect == "openai":
        return "/v1/completions", {
            "model": target.model,
            "prompt": list(prompt),
            "max_tokens": n_tokens,
            "temperature": 0,
            "stream": True,
            "ignore_eos": True,
            "return_token_ids": True,
            "cache_prompt": target.cache_prompt,
            **({"prediction": {"type": "content", "content": list(prediction)}} if prediction else {}),
        }
    return "/completion", {
        "prompt": list(prompt),
        "n_predict": n_tokens,
        "temperature": 0,
        "top_k": 1,
        "samplers": ["top_k"],  # greedy without the other samplers' passes over the vocabulary
        "stream": True,
        "ignore_eos": True,
        "return_tokens": True,
        "cache_prompt": target.cache_prompt,
    }


def tokens_of(target: Target, event: dict[str, Any]) -> list[int]:
    """Return the token ids that one event carries. Raises RuntimeError for an event that reports an error."""
    if event.get("error"):
        raise RuntimeError(json.dumps(event["error"])[:200])
    if target.dialect == "openai":
        return [token for choice in event["choices"] for token in choice.get("token_ids") or ()]
    return [] if event.get("stop") else list(event.get("tokens", ()))


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[tuple[int, dict[str, Any]]]:
    """Yield (time read, event) of a stream of server-sent events."""
    async for raw in response.content:
        line = raw.strip()
        if line.startswith(b"data:") and (payload := line[5:].strip()) != b"[DONE]":
            yield time.monotonic_ns(), json.loads(payload)


async def complete(
    session: aiohttp.ClientSession,
    target: Target,
    prompt: Sequence[int],
    request: Request,
    on_token: Callable[[Request], None] = lambda _: None,
) -> Request:
    """Run one completion and fill in `request`. The server's faults raise nothing: see `error`."""
    path, body = body_of(target, prompt, request.n_tokens, request.prediction)
    try:
        async with session.post(target.url + path, json=body | dict(request.fields)) as response:
            if response.status != 200:
                request.error = f"HTTP {response.status}: {(await response.text())[:200]}"
                return request
            async for read_ns, event in _events(response):
                fresh = tokens_of(target, event)
                request.tokens += fresh
                request.token_ns += [read_ns] * len(fresh)
                if fresh:
                    on_token(request)
    except (aiohttp.ClientError, RuntimeError, TimeoutError, ValueError, KeyError) as error:
        request.error = f"{type(error).__name__}: {error}"[:300]
    return request


def client(
    headers: Mapping[str, str] = MappingProxyType({}), tls: ssl.SSLContext | bool = True
) -> aiohttp.ClientSession:
    """Return an HTTP session without a limit on connections; `headers` go with every request, `tls` as aiohttp's `ssl`.

    Each request has its own connection: a server that closes an idle one would otherwise fail the next request.
    """
    timeout = aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_S)
    connector = aiohttp.TCPConnector(limit=0, force_close=True, ssl=tls)
    return aiohttp.ClientSession(connector=connector, timeout=timeout, headers=headers)


async def closed_loop(
    session: aiohttp.ClientSession,
    target: Target,
    prompts: Sequence[Sequence[int]],
    *,
    n_streams: int,
    n_tokens: int,
    requests_per_stream: int = 1,
    fields: Mapping[str, Any] = MappingProxyType({}),
) -> list[Request]:
    """Run N streams at once; stream i asks prompts i, i + N, i + 2N ... one after the other.

    `fields` of each body stand before a greedy completion's own.
    """

    async def stream(index: int) -> list[Request]:
        done: list[Request] = []
        for turn in range(requests_per_stream):
            at = index + turn * n_streams
            request = Request(at, n_tokens, time.monotonic_ns(), fields=fields)
            done.append(await complete(session, target, prompts[at], request))
        return done

    return [request for done in await asyncio.gather(*map(stream, range(n_streams))) for request in done]


def arrivals_s(rate_per_s: float, n_requests: int, seed: int) -> list[float]:
    """Return Poisson arrival times from 0 on: the same for the same seed."""
    draw = random.Random(seed)
    at_s, found = 0.0, []
    for _ in range(n_requests):
        found.append(at_s)
        at_s += draw.expovariate(rate_per_s)
    return found


async def open_loop(
    session: aiohttp.ClientSession,
    target: Target,
    prompts: Sequence[Sequence[int]],
    *,
    rate_per_s: float,
    n_tokens: int,
    seed: int = 1,
    fields: Mapping[str, Any] = MappingProxyType({}),
) -> list[Request]:
    """Ask every prompt once, at Poisson times, however slow the server is. `fields` as in `closed_loop`."""
    began_ns = time.monotonic_ns()

    async def one(index: int, at_s: float) -> Request:
        request = Request(index, n_tokens, began_ns + int(at_s * 1e9), fields=fields)
        await asyncio.sleep(max(0.0, (request.due_ns - time.monotonic_ns()) / 1e9))
        return await complete(session, target, prompts[index], request)

    times_s = arrivals_s(rate_per_s, len(prompts), seed)
    return list(await asyncio.gather(*(one(index, at_s) for index, at_s in enumerate(times_s))))
