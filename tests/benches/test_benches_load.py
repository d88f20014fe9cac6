"""The load generator: its figures and its requests."""

from __future__ import annotations

import asyncio
import json

import numpy as np
import pytest
from aiohttp import web
from click.testing import CliRunner

from relayline.deploy.cli import bench, load
from relayline.deploy.cli.load import Request, Target


def answered(due_ms: float, *token_ms: float, wanted: int | None = None) -> Request:
    n_tokens = len(token_ms) if wanted is None else wanted
    times = [int(ms * 1e6) for ms in token_ms]
    return Request(0, n_tokens, int(due_ms * 1e6), list(range(len(token_ms))), times)


def test_percentiles_interpolate_between_neighbours() -> None:
    assert load.percentile([3.0], 0.99) == 3.0
    assert load.percentile([4.0, 1.0, 3.0, 2.0], 0.5) == 2.5
    assert load.percentile(list(map(float, range(101))), 0.95) == 95.0
    assert np.isnan(load.percentile([], 0.5))


def test_summary_counts_tokens_times_and_intervals() -> None:
    summary = load.summarise([answered(0, 100, 200, 400), answered(50, 300, 500, 600)])
    assert (summary.n_requests, summary.n_complete, summary.n_tokens) == (2, 2, 6)
    assert summary.wall_s == pytest.approx(0.6)
    assert summary.tok_s == pytest.approx(10.0)
    assert summary.decode_tok_s == pytest.approx(4 / 0.5)
    assert summary.ttft_ms["p50"] == pytest.approx(175)  # 100 and 250
    assert summary.itl_ms["p50"] == pytest.approx(150)  # 100, 200, 200, 100


def test_summary_of_nothing_and_of_failures_names_the_error() -> None:
    failed = Request(3, 5, 0, error="HTTP 500: no")
    short = answered(0, 10, 20, wanted=3)
    summary = load.summarise([failed, short])
    assert (summary.n_complete, summary.error) == (0, "HTTP 500: no")
    assert not short.is_complete
    assert load.summarise([]).tok_s == 0.0


def test_arrivals_are_seeded_and_have_the_asked_rate() -> None:
    times_s = load.arrivals_s(5.0, 2_000, seed=3)
    assert times_s == load.arrivals_s(5.0, 2_000, seed=3) != load.arrivals_s(5.0, 2_000, seed=4)
    assert times_s[0] == 0.0
    assert times_s == sorted(times_s)
    assert 2_000 / times_s[-1] == pytest.approx(5.0, rel=0.1)


class FakeServer:
    """Answers both dialects with the tokens 1000 + prompt[0] + n; cuts the answer short or refuses on request."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, object]] = []
        self.drop_last = False
        self.status = 200

    async def answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        if self.status != 200:
            return web.Response(status=self.status, text="not now")
        n_tokens = body.get("max_tokens") or body["n_predict"]
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for index in range(n_tokens - self.drop_last):
            token = 1000 + body["prompt"][0] + index
            event = {"tokens": [token], "stop": False} if "n_predict" in body else {"choices": [{"token_ids": [token]}]}
            await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        last = b'{"tokens": [7], "stop": true}' if "n_predict" in body else b"[DONE]"
        await response.write(b"data: " + last + b"\n\n")
        return response


@pytest.fixture
async def fake_server():
    server = FakeServer()
    app = web.Application()
    app.router.add_post("/v1/completions", server.answer)
    app.router.add_post("/completion", server.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    yield server, f"http://127.0.0.1:{port}"
    await runner.cleanup()


@pytest.mark.parametrize("dialect", ["openai", "llama"])
async def test_closed_loop_asks_every_prompt_in_its_stream_and_reads_token_ids(fake_server, dialect: str) -> None:
    server, url = fake_server
    prompts = [(10 * index, 1) for index in range(4)]
    async with load.client() as session:
        found = await load.closed_loop(
            session, Target(url, dialect, "m"), prompts, n_streams=2, n_tokens=3, requests_per_stream=2
        )
    assert sorted(request.prompt_index for request in found) == [0, 1, 2, 3]
    for request in found:
        first = 1000 + 10 * request.prompt_index
        assert request.tokens == [first, first + 1, first + 2]
        assert len(request.token_ns) == 3
        assert request.is_complete
    assert {tuple(body["prompt"]) for body in server.bodies} == set(prompts)


async def test_open_loop_counts_from_the_intended_arrival(fake_server) -> None:
    _, url = fake_server
    async with load.client() as session:
        found = await load.open_loop(
            session, Target(url, "openai", "m"), [(1,), (2,), (3,)], rate_per_s=200.0, n_tokens=2, seed=1
        )
    gaps_s = [(request.due_ns - found[0].due_ns) / 1e9 for request in found]
    assert gaps_s == pytest.approx(load.arrivals_s(200.0, 3, seed=1), abs=1e-6)
    assert all(request.token_ns[0] >= request.due_ns for request in found)


async def test_fields_of_drawn_answers_stand_before_the_greedy_ones(fake_server) -> None:
    server, url = fake_server
    fields = {"temperature": 0.7, "top_p": 0.9}
    async with load.client() as session:
        target = Target(url, "openai", "m")
        await load.closed_loop(session, target, [(1,)], n_streams=1, n_tokens=2)
        await load.closed_loop(session, target, [(1,)], n_streams=1, n_tokens=2, fields=fields)
        await load.open_loop(session, target, [(1,)], rate_per_s=200.0, n_tokens=2, fields=fields)
    asked = [(body["temperature"], body.get("top_p")) for body in server.bodies]
    assert asked == [(0, None), (0.7, 0.9), (0.7, 0.9)]


@pytest.mark.parametrize(
    ("flags", "asked"),
    [((), (0, None)), (("--temperature", ".7"), (0.7, None)), (("--temperature", "1", "--top-p", ".5"), (1.0, 0.5))],
)
async def test_the_bench_command_asks_for_what_its_flags_say(
    fake_server, monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...], asked: tuple[float, float | None]
) -> None:
    server, url = fake_server

    async def named(*_: object) -> str:
        return "m"

    monkeypatch.setattr(bench, "_model", named)
    command = [url, "--streams", "1", "--tokens", "2", "--json", *flags]
    ran = await asyncio.to_thread(CliRunner().invoke, bench.bench_command, command)
    assert ran.exit_code == 0, ran.output
    assert [(body["temperature"], body.get("top_p")) for body in server.bodies] == [asked]


async def test_short_answers_refusals_and_lost_servers_are_not_complete(fake_server) -> None:
    server, url = fake_server
    async with load.client() as session:
        server.drop_last = True
        short = await load.complete(session, Target(url, "llama"), (1,), Request(0, 3, 0))
        server.status = 503
        refused = await load.complete(session, Target(url, "openai", "m"), (1,), Request(0, 3, 0))
        lost = await load.complete(session, Target("http://127.0.0.1:1", "openai"), (1,), Request(0, 3, 0))
    assert (len(short.tokens), short.is_complete) == (2, False)
    assert refused.error == "HTTP 503: not now"
    assert "Connect" in lost.error
