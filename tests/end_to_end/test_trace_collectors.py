"""Misbehaving collectors, and batches with more members than the SDK links by default: clients notice neither."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from relayline.deploy.testing.otlp_receiver import Mode, Receiver, StoredSpan, dead_endpoint, receiving
from relayline.deploy.testing.trace_rebuild import is_batch, rebuild
from relayline.deploy.testing.traced_pipeline import PROMPTS, Traced, ask, ask_all, text_of, traced_pipeline
from relayline.wire.telemetry import names
from relayline.wire.telemetry.export import COMPLAIN_EVERY_S
from tests.support.polling import pause

pytestmark = pytest.mark.slow  # real processes, started many times

N_TOKENS = 24
TRIES_MAX = 3_000  # looks at the counters, each a round trip to every process
SDK_LINKS_DEFAULT = 128
# Small and hasty, so that spans are lost while the test looks on rather than at the end.
HASTY = {"OTEL_BSP_MAX_QUEUE_SIZE": "8", "OTEL_BSP_MAX_EXPORT_BATCH_SIZE": "4", "OTEL_EXPORTER_OTLP_TIMEOUT": "1"}


async def dropped(traced: Traced) -> list[int]:
    """Spans that each process says it lost: the coordinator, then the stages."""
    found = []
    for url in (f"{traced.url}/metrics", *traced.stage_metrics):
        families = {family.name: family for family in text_string_to_metric_families(await text_of(url))}
        found.append(int(families[names.METRIC_SPANS_DROPPED].samples[0].value))
    return found


@contextlib.contextmanager
def misbehaving(kind: str) -> Iterator[tuple[str, Receiver | None]]:
    """Yield the address of a collector of this kind, and the collector unless there is none."""
    if kind == "dead":
        with dead_endpoint() as endpoint:
            yield endpoint, None
        return
    with receiving(Mode(kind)) as receiver:
        yield receiver.grpc_endpoint, receiver


@pytest.mark.parametrize(
    "kind",
    [
        "dead",
        "slow",
        pytest.param("refusing", marks=pytest.mark.nightly),
        pytest.param("unavailable", marks=pytest.mark.nightly),
    ],
)
def test_a_bad_collector_changes_nothing_but_a_counter(kind: str, tmp_path: Path) -> None:
    begun_s = time.monotonic()
    with misbehaving(kind) as (endpoint, receiver):
        environment = {"OTEL_EXPORTER_OTLP_ENDPOINT": endpoint} | HASTY
        with traced_pipeline(tmp_path / "split", environment, n_stages=2, level="frames") as traced:

            async def use() -> None:
                for _ in range(2):
                    for answer in await ask_all(traced, PROMPTS, N_TOKENS):
                        assert len(answer["tokens"]) == N_TOKENS
                for _ in range(TRIES_MAX):
                    if all(await dropped(traced)):
                        return
                    await pause()
                raise AssertionError(f"not every process counted lost spans: {await dropped(traced)}")

            asyncio.run(use())
            assert [process.stop() for process in reversed(traced.processes)] == [0] * len(traced.processes)
        if receiver is not None:
            assert receiver.n_calls > 0
            assert receiver.spans == []
        for process in traced.processes:
            complaints = [line for line in process.lines if "telemetry:" in line]
            n_max = 2 + (time.monotonic() - begun_s) // COMPLAIN_EVERY_S
            assert len(complaints) <= n_max, complaints  # a line now and then, not one per attempt
            assert "Traceback" not in process.stderr


def test_a_collector_that_comes_back_gets_the_spans_from_then_on(tmp_path: Path) -> None:
    with receiving(Mode.REFUSING) as receiver:
        environment = {"OTEL_EXPORTER_OTLP_ENDPOINT": receiver.grpc_endpoint}
        with traced_pipeline(tmp_path / "split", environment, n_stages=2) as traced:
            asyncio.run(ask_all(traced, PROMPTS[:2], N_TOKENS))
            receiver.wait_for_call(3)
            receiver.mode = Mode.OK
            (answer,) = asyncio.run(ask_all(traced, PROMPTS[:1], N_TOKENS))
            receiver.wait_for(lambda spans: any(s.attributes.get(names.ATTR_REQUEST_ID) == answer["id"] for s in spans))


@pytest.mark.slow
def test_links_survive_beyond_the_sdks_default(tmp_path: Path) -> None:
    n_streams = 150
    flags = ["--groups", "1", "--group-rows", "512"]  # one flight of all streams
    with receiving() as receiver:
        environment = {"OTEL_EXPORTER_OTLP_ENDPOINT": receiver.grpc_endpoint}
        with traced_pipeline(tmp_path / "split", environment, n_stages=2, ctx=256, lanes=160, more=flags) as traced:

            async def use() -> None:
                """Ask again and again until a wide batch is stored: how soon streams meet is the machine's affair."""
                async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

                    async def keep_asking(prompt: str) -> None:
                        while True:
                            assert len((await ask(session, traced, prompt, 240))["tokens"]) == 240

                    seen = asyncio.create_task(asyncio.to_thread(receiver.wait_for, holds_a_wide_batch))
                    asking = [asyncio.create_task(keep_asking(f"x{index}")) for index in range(n_streams)]
                    done, _ = await asyncio.wait([seen, *asking], return_when=asyncio.FIRST_COMPLETED)
                    for task in asking:
                        task.cancel()
                    await asyncio.gather(*asking, return_exceptions=True)
                    for task in done:
                        task.result()  # raises the exceptions of clients or the receiver

            asyncio.run(use())
            receiver.wait_for(has_many_sessions)  # a busy process has no time for them at its end
            assert all(count == 0 for count in asyncio.run(dropped(traced)))
        found = rebuild(receiver.spans)  # whole: processes hand over their last spans when they stop
        assert len(found.sessions) > SDK_LINKS_DEFAULT
        for batch in found.batches.values():
            assert len(batch.requests) == len(batch.members)
            assert batch.span.n_dropped_links == 0
        assert max(len(batch.requests) for batch in found.batches.values()) > SDK_LINKS_DEFAULT


def has_many_sessions(spans: Sequence[StoredSpan]) -> bool:
    return sum(span.name == names.SPAN_DECODE for span in spans) > SDK_LINKS_DEFAULT


def holds_a_wide_batch(spans: Sequence[StoredSpan]) -> bool:
    """Whether some batch decoded more members than the SDK links by default."""
    return any(len(span.attributes[names.ATTR_MEMBER_SESSIONS]) > SDK_LINKS_DEFAULT for span in spans if is_batch(span))
