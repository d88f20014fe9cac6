"""The output of `relayline trace` and `relayline top`, from recorded answers and from a real pipeline."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import pty
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import click
import pytest
from rich.console import Console

from relayline.deploy.cli import top
from relayline.deploy.cli.top import frame, rates
from relayline.deploy.cli.trace import show
from relayline.deploy.cli.trace_times import show_token
from relayline.deploy.tables import hung
from relayline.deploy.testing.paths import DEMO_MODEL as DEMO
from relayline.deploy.testing.processes import Running, relayline, running
from relayline.wire.common.errors import UsageError

MATES = [f"cmpl-{letter * 32}-0" for letter in "bcd"]


def batch(step: int, mates: list[str], **more: Any) -> dict[str, Any]:
    return {
        "id": f"0:{step}", "at_ms": 12.5, "phase": "decode", "position": 6 + step, "own_rows": 1,
        "rows": 1 + len(mates), "padded_rows": 2, "frames": 1 + len(mates), "wait_ms": 0.25, "upstream_wait_ms": 0.0,
        "close_reason": "queue_drained", "queued_rows_before": 0, "queued_rows_after": 0, "predicted_ms": 3.5,
        "decode_ms": 4.5, "encode_ms": 0.1, "bytes_out": 10, "trace_id": None, "mates": mates,
    } | more  # fmt: skip


def lived(**stream: Any) -> dict[str, Any]:
    summary = {"prefill_steps": 1, "decode_steps": 40, "prefill_wait_ms": 1.0, "decode_wait_ms": 2.0,
               "wait_max_ms": 0.9, "batch_rows_mean": 3.5, "batch_rows_max": 8, "decode_ms": 100.0}  # fmt: skip
    stages = [
        {"stage": 0, "up": True, "instance_id": "i", "forgotten_batches": 0, "summary": summary,
         "batches": [batch(step, MATES[: step % 3]) for step in range(41)]},
        {"stage": 1, "up": False},
    ]  # fmt: skip
    return {
        "request_id": "req", "id": "cmpl-a", "trace_id": "ab" * 16, "route": "POST /v1/completions", "model": "m",
        "status": 200, "error": None, "is_running": False, "received_unix_ms": 1, "duration_ms": 512.0,
        "tokenize_ms": 0.4, "prompt_tokens": 7,
        "streams": [{
            "id": "cmpl-a-0", "session_id": "0" * 16, "shared_with": None, "finish_reason": "length", "error": None,
            "prompt_tokens": 7, "tokens": 40, "admitted_at_ms": 1.0, "queue_ms": 3.0, "prefill_ms": 20.0,
            "decode_ms": 12345.0, "ttft_ms": 23.0, "itl_ms": {"mean": 5.0, "p50": 5.0, "p95": 9.0, "max": 11.0},
            "chunks": [{"at_ms": 1.0, "position": 0, "rows": 7, "took_ms": 19.0}], "chunks_forgotten": 0,
            "events": [{"at_ms": 90.0, "name": "paused", "detail": "stage 1 is gone [lost]"}], "stages": stages,
        } | stream],
    }  # fmt: skip


def shown(found: dict[str, Any], rows_max: int | None = 24, width: int = 120) -> str:
    out = io.StringIO()
    show(Console(file=out, width=width, highlight=False), found, rows_max)
    return out.getvalue()


def test_an_embedding_has_no_tokens_to_speak_of() -> None:
    text = shown(lived(tokens=0, decode_ms=None, ttft_ms=None, itl_ms=None))
    assert "cmpl-a-0  no tokens\n" in text
    assert "first token" not in text
    assert "prefill 20.0 ms\n" in text
    assert "cmpl-a-0  0 tokens, abort (cancelled)\n" in shown(
        lived(tokens=0, decode_ms=None, ttft_ms=None, finish_reason="abort", error="cancelled")
    )


def test_a_trace_answers_where_when_with_whom_and_why() -> None:
    text = shown(lived())
    assert "cmpl-a  POST /v1/completions  200" in text
    assert "7 prompt tokens  took 512 ms" in text
    assert "queue 3.0 ms  prefill 20.0 ms  decode 12.3 s" in text
    assert "first token after 23.0 ms  between tokens mean 5.0 ms, p95 9.0 ms, max 11.0 ms" in text
    assert "drafted" not in text
    assert "\n  9 draft tokens, 4 of them accepted\n" in shown(lived(drafted_tokens=9, accepted_tokens=4))
    assert "paused at 90.0 ms: stage 1 is gone [lost]" in text  # brackets are no markup
    assert "1 prefill and 40 decode steps of 3.5 rows (max 8), waited 3.0 ms (max 0.90 ms)" in text
    assert "stage 1 does not answer" in text
    (row,) = (line for line in text.splitlines() if line.strip().startswith("0:2 "))
    assert row.split() == ["0:2", "12.5", "ms", "decode", "8", "3", "2", "3", "0.25", "ms", "4.5", "ms", "3.5", "ms",
                           "queue_drained", "A", "B"]  # fmt: skip
    assert f"A  {MATES[0]}" in text
    assert f"B  {MATES[1]}" in text
    assert all(len(line) <= 120 for line in text.splitlines())


def test_images_and_audio_have_a_line_each() -> None:
    steps = [{"step": "fetch", "at_ms": 1.0, "took_ms": 20.0}, {"step": "encode", "at_ms": 21.0, "took_ms": 812.0}]
    files = [
        {"kind": "image", "bytes": 83_000, "rows": 256, "kept": False, "wait_ms": 2.5, "steps": steps},
        {"kind": "audio", "bytes": 0, "rows": 0, "kept": False, "wait_ms": 0.0, "steps": []},
        {"kind": "image", "bytes": 5_000, "rows": 1, "kept": True, "wait_ms": 0.0, "steps": []},
    ]
    text = shown(lived() | {"media_ms": 840.0, "media": files})
    assert "\n  image  81.1 KiB, 256 rows  fetch 20.0 ms  encode 812 ms  waited 2.5 ms\n" in text
    assert "\n  audio\n" in text, "the request was refused before"
    assert "\n  image  4.9 KiB, 1 row  its rows were there from an earlier request\n" in text
    assert "tokenise 0.40 ms  media 840 ms  queue" in text
    assert "media" not in shown(lived()), "of a server that does not say"
    many = shown(lived() | {"media_ms": 840.0, "media": files[2:] * 30}, rows_max=4)
    assert (many.count("image  4.9"), many.count("  ...\n")) == (4, 2), "and its batches"


def test_long_lists_show_their_ends_unless_all_is_asked_for() -> None:
    assert [("0:5 " in text, "0:20 " in text, "0:40 " in text) for text in (shown(lived()), shown(lived(), None))] == [
        (True, False, True),
        (True, True, True),
    ]


def test_running_shared_and_failed_requests_can_be_shown() -> None:
    nothing = {"finish_reason": None, "prefill_ms": None, "decode_ms": None, "ttft_ms": None, "itl_ms": None,
               "chunks": [], "events": [], "stages": []}  # fmt: skip
    assert "cmpl-a-0  40 tokens, running" in shown(lived(**nothing))
    assert "shares the session of cmpl-z-0" in shown(lived(shared_with="cmpl-z-0"))
    assert "error (stage_lost)" in shown(lived(finish_reason="error", error="stage_lost"))


@pytest.mark.parametrize("width", [40, 50, 60, 79])
def test_a_narrow_terminal_cuts_no_figure_of_a_trace(width: int) -> None:
    text = shown(lived(**TIMES), None, width)
    assert "…" not in text
    head = next(line for line in text.splitlines() if line.strip().startswith("batch")).split()
    assert {"batch", "at", "wait", "step", "with"} <= set(head)
    (row,) = (line.split() for line in text.splitlines() if line.strip().startswith("0:20 "))
    assert row[:3] == ["0:20", "12.5", "ms"]
    assert ("3.5" in row) is ("predicted" in head)
    assert all(part in text for part in ("20.0 ms", "585 ms"))
    assert all(len(line.rstrip()) <= width for line in text.splitlines() if not line.endswith(tuple(MATES)))
    out = io.StringIO()
    time = {"token": 7, "position": 13, "at_ms": 90.0, "batches": ["0:9", None]} | spent(9.5, handle_ms=[0, 1.0])
    show_token(Console(file=out, width=width, highlight=False), [{"id": "cmpl-a-0", "token_times": [time]}], 7)
    assert all(len(line) <= width for line in out.getvalue().splitlines())


def test_a_line_breaks_where_a_part_of_it_ends() -> None:
    text = "  first [bold]token[/bold] after 12.2 ms  between tokens mean 5.5 ms, p95 13.3 ms, max 14.6 ms"
    broken = ["  first [bold]token[/bold] after 12.2 ms  between tokens mean 5.5 ms,", "    p95 13.3 ms, max 14.6 ms"]
    assert hung(text, 60, "    ").splitlines() == broken
    assert hung(text, 200, "    ") == text
    assert hung("", 60, "    ") == ""


@pytest.mark.parametrize("width", [40, 60, 80])
def test_a_line_may_break_within_a_red_error(width: int) -> None:
    error = "stage 1 (laptop) is lost, it has not come back, so the request ended"
    out = io.StringIO()
    show(Console(file=out, width=width, highlight=False), lived() | {"error": error, "streams": []}, None)
    assert " ".join(out.getvalue().split()).count(error) == 1
    assert all(len(line.rstrip()) <= width for line in out.getvalue().splitlines())


@pytest.mark.parametrize(("width", "is_whole"), [(80, False), (100, True), (120, True)])
def test_a_trace_is_whole_at_every_usual_width(width: int, is_whole: bool) -> None:
    text = shown(lived(), None, width)
    assert "…" not in text, "a figure or a head is cut"
    head = next(line for line in text.splitlines() if line.strip().startswith("batch")).split()
    assert {"at", "pos", "rows", "pad", "wait", "step", "predicted", "with"} <= set(head)
    assert ({"phase", "frames"} <= set(head)) is is_whole
    assert all(len(line.rstrip()) <= width for line in text.splitlines())


def test_a_trace_says_what_its_sums_cover_after_a_recovery() -> None:
    assert "last resumption" not in shown(lived())
    assert "last resumption" in shown(lived(events=[{"at_ms": 99.0, "name": "resumed", "detail": None}]))


def spent(took_ms: float, **parts: float | list[float]) -> dict[str, Any]:
    return {"took_ms": took_ms, "paused_ms": 0, "earlier_ms": 0, "group_ms": 0, "deciding_ms": 0, "taking_ms": 0,
            "hop_ms": [0, 0], "queue_ms": [0, 0], "compute_ms": [0, 0], "handle_ms": [0, 0], "back_ms": 0,
            "rest_ms": 0} | parts  # fmt: skip


DECODE = spent(780.0, group_ms=156.0, compute_ms=[390.0, 195.0], rest_ms=39.0)
TIMES = {"time": {"prefill": spent(20.0, compute_ms=[12.0, 8.0]), "decode": DECODE}}


@pytest.mark.parametrize(("width", "n_stages"), [(50, 0), (57, 1), (70, 2), (120, 2)])
def test_the_time_of_a_request_is_a_table(width: int, n_stages: int) -> None:
    lines = shown(lived(**TIMES), width=width).splitlines()
    at = next(at for at, line in enumerate(lines) if "where the time went" in line)
    assert lines[at].split() == ["where", "the", "time", "went", "prefill", "decode", "a", "token",
                                 *(word for stage in range(n_stages) for word in ("stage", str(stage)))]  # fmt: skip
    table = [" ".join(line.split()) for line in lines[at + 1 : at + 5]]
    stages = ["390 ms", "195 ms"][:n_stages]
    assert table == [
        "waiting for its group 156 ms 4.0 ms",
        " ".join(["stages computing 20.0 ms 585 ms 15.0 ms", *stages]),
        "not known 39.0 ms 1.0 ms",
        "in all 20.0 ms 780 ms 20.0 ms",
    ]


def test_a_prompt_alone_and_an_older_server_are_shown_too() -> None:
    alone = {"time": {"prefill": TIMES["time"]["prefill"], "decode": None}}
    assert "stages computing 20.0 ms" in " ".join(shown(lived(**alone)).split())
    assert "where the time went" not in shown(lived())
    assert "where the time went" not in shown(lived(time={"prefill": None, "decode": None}))


def test_the_way_of_one_token_is_told_in_its_order() -> None:
    parts = spent(9.5, deciding_ms=0.5, compute_ms=[4.0, 2.0], handle_ms=[0, 1.0], back_ms=2.0)
    stream = {"id": "cmpl-a-0", "token_times": [{"token": 7, "position": 13, "at_ms": 90.0, "batches": ["0:9", None]}]}
    stream["token_times"][0] |= parts  # type: ignore[index]
    out = io.StringIO()
    shorter = {"id": "cmpl-a-1", "token_times": [{"token": 2}]}
    show_token(Console(file=out, width=100, highlight=False), [shorter, stream], 7)
    first, *lines = out.getvalue().splitlines()
    assert first == "cmpl-a-0  token 7, from the row at position 13: 9.5 ms"
    assert [line.split("  ")[-1] for line in lines] == [
        "the coordinator deciding", "stage 0 computing, batch 0:9", "stage 1 computing",
        "stage 1 placing rows and sampling", "on the way back",
    ]  # fmt: skip
    assert lines[1].split() == ["at", "90.5", "ms", "4.0", "ms", "stage", "0", "computing,", "batch", "0:9"]
    with pytest.raises(
        UsageError, match="token 8 is not remembered; known: tokens 2 to 2 of cmpl-a-1, tokens 7 to 7 of cmpl-a-0"
    ):
        show_token(Console(file=out), [shorter, stream], 8)


def described(now_ns: int, steps: int, *, tokens: int = 0, instance: str = "i", up: bool = True) -> dict[str, Any]:
    stage = {
        "index": 0, "address": "h:1", "layers": [0, 4], "artifact_bytes": 1, "up": up, "instance_id": instance,
        "steps": steps, "rows": 4 * steps, "padded_rows": steps, "busy_ns": steps * 10_000_000,
        "wait_p50_ns": 1_500_000, "wait_p95_ns": 2_500_000, "queued_rows": 3, "lanes_used": 2, "lanes_total": 8,
        "close_reasons": {"row_cap": steps},
    }  # fmt: skip
    if not up:
        stage = {key: stage[key] for key in ("index", "address", "layers", "artifact_bytes", "up")}
    return {
        "model": "m", "phase": "ready", "epoch": 1, "now_ns": now_ns, "generated_tokens": tokens, "running": 2,
        "waiting": 1, "lanes": 8, "ctx_tokens": 100, "kv_tokens": 40, "plan": {"n_groups": 2, "group_rows": 3},
        "overlap": {"1": 0.4, "2+": 0.6}, "stages": [stage],
    }  # fmt: skip


def test_rates_are_differences_over_time() -> None:
    found = rates(described(10**9, 100, tokens=50), described(3 * 10**9, 140, tokens=110))
    assert (found["tokens_per_s"], found["kv_share"]) == (30.0, 0.05)
    (stage,) = found["stages"]
    assert (stage["steps_per_s"], stage["rows_per_step"], stage["padding_share"], stage["busy_share"]) == (
        20.0, 4.0, 0.2, 0.2,
    )  # fmt: skip
    assert stage["close_reasons"] == {"row_cap": 40}


def test_a_restarted_stage_counts_from_its_start_and_a_silent_one_is_said() -> None:
    found = rates(described(0, 1_000), described(10**9, 7, instance="another"))
    assert found["stages"][0]["steps_per_s"] == 7.0
    after = described(10**9, 0, up=False)
    out = io.StringIO()
    Console(file=out, width=120).print(frame("http://h", after, rates(described(0, 5), after)))
    assert "no answer" in out.getvalue()


def test_a_stage_that_is_seen_again_does_not_count_what_it_did_before() -> None:
    """Between two looks during a move it answered nothing: 1,000 steps of 10 ms are not those of one second."""
    found = rates(described(0, 900, up=False), described(10**9, 1_000))
    (stage,) = found["stages"]
    assert (stage["steps_per_s"], stage["busy_share"], stage["close_reasons"]) == (0.0, 0.0, {})


def test_a_coordinator_that_counts_from_zero_again_shows_no_nonsense() -> None:
    found = rates(described(9 * 10**9, 1_000, tokens=500), described(10**9, 3, tokens=2))
    assert (found["tokens_per_s"], found["stages"][0]["steps_per_s"]) == (0.0, 0.0)


def test_a_cut_that_would_be_faster_is_a_line() -> None:
    after = described(10**9, 30) | {"imbalance": {"slowest": 0, "layers": [[0, 2], [2, 4]], "gain": 0.314, "for_s": 75}}
    out = io.StringIO()
    Console(file=out, width=100).print(frame("http://h", after, rates(described(0, 0), after)))
    assert "stage 0 has slowed the pipeline down for 75 s: layers 0-1, 2-3 would give 31% more" in out.getvalue()


def test_grants_are_a_line_where_they_are_given() -> None:
    off = {"steps": 0, "given": 0, "extended": 0, "repeated": 0, "rows": 0, "vain_rows": 0}
    before = off | {"steps": 8, "given": 10, "extended": 4, "repeated": 3, "rows": 100, "vain_rows": 9}
    after = off | {"steps": 8, "given": 12, "extended": 5, "repeated": 3, "rows": 130, "vain_rows": 11}
    for grants, line in (
        ((before, after), "grants: 2 given, 1 extended, 0 ended by other rows; 30 rows, and 2 in vain"),
        ((off, off), None),
        ((None, None), None),
    ):
        old, new = (
            (described(at, 0) | ({"grants": each} if each else {})) for at, each in zip((0, 10**9), grants, strict=True)
        )
        out = io.StringIO()
        Console(file=out, width=100).print(frame("http://h", new, rates(old, new)))
        assert (line in out.getvalue()) if line else ("grants" not in out.getvalue())


@pytest.mark.parametrize("width", [40, 60, 80, 100, 120])
def test_one_frame_fits_a_terminal(width: int) -> None:
    after = described(10**9, 30, tokens=90)
    busy = {"index": 1, "address": "192.168.100.200:50051", "queued_rows": 12_345, "lanes_used": 128,
            "lanes_total": 256, "wait_p50_ns": 12_340_000, "wait_p95_ns": 123_450_000}  # fmt: skip
    after["stages"].append(after["stages"][0] | busy)
    out = io.StringIO()
    figures = rates(described(0, 0), after)
    Console(file=out, width=width, highlight=False).print(frame("http://h", after, figures, width))
    text = out.getvalue()
    unseen = {"pad", "p95", "123.45 ms"} if width <= 60 else set[str]()
    unseen |= {"wait p50", "12.34 ms", "lanes", "128/256"} if width == 40 else set()
    (heads,) = (line for line in text.splitlines() if line.startswith("stage  "))
    for head in ("stage", "steps/s", "rows/step", "pad", "busy", "wait p50", "p95", "queued", "lanes"):
        assert (head in heads) is (head not in unseen), f"{head} is cut"
    for figure in ("12.34 ms", "123.45 ms", "12345", "128/256"):
        assert (figure in text) is (figure not in unseen), f"{figure} is cut"
    assert "90 tok/s" in text
    assert "60% of busy time with two or more stages at work" in " ".join(text.split())
    assert "steps/s" in text
    assert "closed by" in text
    assert "row_cap 30" in text
    assert all(len(line.rstrip()) <= width for line in text.splitlines())


def test_why_a_stage_is_silent_is_whole_at_40_columns() -> None:
    after, out = described(10**9, 0, up=False), io.StringIO()
    after["stages"][0] |= {"silent": True, "last_heard_s": 12.3}
    Console(file=out, width=40, highlight=False).print(frame("http://h", after, rates(described(0, 5), after), 40))
    assert "stage 0: no heartbeat for 12 s" in out.getvalue().splitlines()


def test_a_stage_that_waits_for_others_is_not_said_to_give_no_answer() -> None:
    after, out = described(10**9, 0, up=False) | {"phase": "recovering"}, io.StringIO()
    after["stages"][0]["state"] = "ready"
    Console(file=out, width=80, highlight=False).print(frame("http://h", after, rates(described(0, 5), after), 80))
    assert "waits" in out.getvalue()
    assert "no answer" not in out.getvalue()


def test_an_interrupt_ends_once_without_figures_of_a_shorter_time(monkeypatch: pytest.MonkeyPatch) -> None:
    class Answering:
        url = "http://h"

        def __init__(self, *_: object) -> None:
            pass

        async def __aenter__(self) -> Answering:
            return self

        async def __aexit__(self, *_: object) -> None:
            pass

        async def get(self, *_: object) -> dict[str, Any]:
            return described(0, 5)

    async def interrupted(stopping: asyncio.Event, _: float) -> bool:
        stopping.set()
        return True

    monkeypatch.setattr(top, "Coordinator", Answering)
    monkeypatch.setattr(top, "set_within", interrupted)
    with pytest.raises(click.Abort):
        top.top_command.main(["--once", "--url", "http://h"], standalone_mode=False)


def test_the_live_view_refuses_a_terminal_that_shows_escape_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setattr(top.os, "isatty", lambda _: True)
    with pytest.raises(click.UsageError, match="needs a terminal; print one frame with --once"):
        top.top_command.main(["--url", "http://h"], standalone_mode=False)


# --- a real pipeline --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    directory = tmp_path_factory.mktemp("split")
    with running("up", "--model", DEMO, "--stages", "2", "--split-dir", directory, "--http", "127.0.0.1:0", "--json",
                 "--ctx", "256", "--lanes", "4", "--threads", "1", "--no-calibrate",
                 "--trace-level", "batches") as process:  # fmt: skip
        yield process


def ask(url: str, request_id: str) -> str:
    body = {"prompt": "def main(", "temperature": 0, "ignore_eos": True, "max_tokens": 8}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), {"x-request-id": request_id})
    with urllib.request.urlopen(request, timeout=60) as reply:
        found: str = json.load(reply)["id"]
    return found


def test_top_shows_who_uses_the_pipeline_at_60_columns() -> None:
    counts = {
        "waiting": 243,
        "requests": 1_200,
        "prompt_tokens": 123_456_789,
        "cached_tokens": 7,
        "completion_tokens": 9,
    }
    after = described(0, 5)
    after["keys"] = [{"name": f"key {at} of a team", "running": at, **counts} for at in range(14)]
    out = io.StringIO()
    figures = rates(after, after)
    Console(file=out, width=60, highlight=False).print(frame("http://h", after, figures, 60))
    narrow = io.StringIO()
    Console(file=narrow, width=40, highlight=False).print(frame("http://h", after, figures, 40))
    assert "API key      running prompt answers" in narrow.getvalue()
    assert "key 13 of a…      13   123M       9" in narrow.getvalue()
    text = out.getvalue()
    assert "API key      running waiting requests prompt cached answers" in text
    assert "key 13 of a…      13     243     1200   123M      7       9" in text
    assert "and 2 more keys: GET /v1/usage" in text
    assert "key 1 of" not in text, "those with most streams are shown"
    assert [key["running"] for key in figures["keys"]] == list(range(13, -1, -1))


def test_trace_and_top_of_a_served_pipeline(served: Running) -> None:
    url = served.event["url"]
    answer_id = ask(url, "from-a-test")
    for arguments in (("from-a-test",), (answer_id,), ("--last",)):
        seen = relayline("trace", *arguments, "--url", url)
        assert seen.returncode == 0, seen.stderr
        assert answer_id in seen.stdout
        for stage in (0, 1):
            assert f"stage {stage}  1 prefill and 7 decode steps" in seen.stdout
    found = json.loads(relayline("trace", "--last", "--json", "--url", url).stdout)
    (stream,) = found["streams"]
    assert [len(stage["batches"]) for stage in stream["stages"]] == [8, 8]
    for phase, times in (("prefill", stream["token_times"][:1]), ("decode", stream["token_times"][1:])):
        spent_ms = stream["time"][phase]
        assert spent_ms["took_ms"] == pytest.approx(stream[f"{phase}_ms"], abs=0.1)
        assert spent_ms["rest_ms"] == 0, "every moment is somebody's"
        assert sum(spent_ms["compute_ms"]) > 0
        whole = [ms for name, ms in spent_ms.items() if name != "took_ms"]
        assert sum(sum(ms) if isinstance(ms, list) else ms for ms in whole) == pytest.approx(
            spent_ms["took_ms"], abs=0.1
        )
        assert sum(each["took_ms"] for each in times) == pytest.approx(spent_ms["took_ms"], abs=0.1)
    assert "where the time went" in seen.stdout
    seen = relayline("trace", "--last", "--token", "3", "--url", url)
    assert seen.returncode == 0, seen.stderr
    assert "token 3, from the row at position" in seen.stdout
    assert "stage 1 placing rows and sampling" in seen.stdout
    seen = relayline("trace", "--last", "--token", "8", "--url", url)
    assert (seen.returncode, "known: tokens 0 to 7" in seen.stderr) == (2, True)
    seen = relayline("top", "--once", "--interval", "0.2", "--url", url)
    assert seen.returncode == 0, seen.stderr
    assert "relayline-demo" in seen.stdout
    while levels(url) != ["batches", "batches"]:  # a stage of a busy host may answer too late, as below
        pass
    ups: list[bool] = []
    while ups != [True, True]:
        figures = json.loads(relayline("top", "--once", "--json", "--interval", "0.2", "--url", url).stdout)
        ups = [stage["up"] for stage in figures["stages"]]


def levels(url: str) -> list[str | None]:
    """The level of each stage; None of one that has not answered."""
    with urllib.request.urlopen(f"{url}/v1/telemetry", timeout=60) as reply:
        found: list[str | None] = json.load(reply)["stages"]
    return found


def test_top_is_live_until_it_is_interrupted(served: Running) -> None:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "relayline.deploy.cli", "top", "--interval", "0.2", "--url", served.event["url"]]
    environment = os.environ | {"TERM": "xterm"}
    with subprocess.Popen(
        command, cwd=DEMO.parents[2], stdin=theirs, stdout=theirs, stderr=theirs, env=environment
    ) as process:
        os.close(theirs)
        seen = b""
        while seen.count(b"tok/s") < 3:
            seen += os.read(ours, 65_536)
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(OSError):  # how Linux says that the other end has gone
            while os.read(ours, 65_536):
                pass
        assert process.wait(60) == 0
    os.close(ours)
    assert b"Traceback" not in seen


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("trace",), 2, "either a REQUEST_ID or --last"),
        (("trace", "x", "--last"), 2, "either a REQUEST_ID or --last"),
        (("trace", "--last", "--url", "127.0.0.1:1"), 2, "not a URL"),
        (("trace", "--last", "--url", "http://127.0.0.1:1"), 1, "does not answer"),
        (("top", "--once", "--url", "http://127.0.0.1:1"), 1, "does not answer"),
        (("top", "--json"), 2, "--once"),
        (("top",), 2, "needs a terminal"),
    ],
)
def test_mistakes_get_one_line(arguments: tuple[str, ...], code: int, message: str) -> None:
    seen = relayline(*arguments)
    assert seen.returncode == code
    assert message in seen.stderr
    assert "Traceback" not in seen.stderr


@contextlib.contextmanager
def answering(status: int, body: str) -> Iterator[str]:
    """Answer every GET with the same; yields the URL."""

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *_: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Answer) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


LOOKERS = {"trace": ("trace", "--last", "--url"), "top": ("top", "--once", "--url"), "bench": ("bench",)}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("body", ["[]", "null", '"ready"', "{}", "<html>"])
@pytest.mark.parametrize("command", LOOKERS)
def test_another_server_is_one_line(command: str, body: str) -> None:
    with answering(200, body) as url:
        seen = relayline(*LOOKERS[command], url)
    assert seen.returncode == 1
    (line,) = seen.stderr.splitlines()
    assert (
        "is not served by a relayline coordinator" in line or "does not answer as an OpenAI-compatible server" in line
    )


@pytest.mark.sampled(3)
@pytest.mark.parametrize("status", [401, 403])
@pytest.mark.parametrize("command", LOOKERS)
def test_a_server_that_demands_a_key_is_one_line(command: str, status: int) -> None:
    with answering(status, '{"error": {"message": "no\\nentry"}}') as url:
        seen = relayline(*LOOKERS[command], url)
    assert seen.returncode == 1
    (line,) = seen.stderr.splitlines()
    remedy = "give it the right API key with --api-key or in RELAYLINE_API_KEY"
    assert line.endswith(f"answered {status} (no\\nentry); {remedy}")


@pytest.mark.parametrize("command", LOOKERS)
def test_a_key_that_can_be_none_is_one_line(command: str) -> None:
    seen = relayline(*LOOKERS[command], "http://127.0.0.1:1", "--api-key", "two\nlines")
    assert (seen.returncode, "cannot be printed" in seen.stderr, "lines" in seen.stderr) == (2, True, False)
    seen = relayline(*LOOKERS[command], "http://127.0.0.1:1", "--api-key", "ké")
    assert (seen.returncode, "printable ASCII" in seen.stderr) == (2, True)
    assert "Traceback" not in seen.stderr


def test_an_unknown_request_is_one_line(served: Running) -> None:
    seen = relayline("trace", "none-such", "--url", served.event["url"])
    assert (seen.returncode, "none-such" in seen.stderr) == (1, True)
