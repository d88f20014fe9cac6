"""Goal: a stage's /metrics reports in Prometheus' format what the stage really did, under the documented names.

Method: the text is read back with prometheus_client's own parser and compared with the counters, once over HTTP from a
real stage of a tiny model.
"""

from __future__ import annotations

import dataclasses
import re
import ssl
from pathlib import Path

import aiohttp
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as openmetrics_text
from prometheus_client.parser import text_string_to_metric_families

from relayline.coordinator.engine.stage_client import StageClient
from relayline.deploy.launch.certificates import revoke
from relayline.deploy.manifest.pages import metrics_text
from relayline.deploy.testing.engines import stage_config
from relayline.deploy.testing.processes import relayline, running
from relayline.deploy.testing.tiny_slices import TinyShape, write_pipeline
from relayline.stage.config import StageConfig
from relayline.stage.observe import figures
from relayline.stage.observe.metrics import Gauges, StageCollector, serve_metrics
from relayline.stage.observe.stats import WAIT_BUCKETS_NS, StageStats
from relayline.stage.process import serve
from relayline.wire.common.errors import StartError, UsageError
from relayline.wire.envelopes import trace_context
from relayline.wire.envelopes.frames import Flag
from relayline.wire.links.roles import Role
from relayline.wire.links.security import PLAINTEXT
from relayline.wire.links.tls_material import read_certificate
from relayline.wire.telemetry import names
from relayline.wire.telemetry.telemetry import Level, Telemetry, TelemetryConfig
from tests.support.fakes import FakeEngine, control, new_executor, rows_frame, step_of
from tests.support.identities import NOW, make_identities, security_of

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def samples(text: str) -> Samples:
    """Every sample by name and labels, the stage's own label left out."""
    return {
        (sample.name, tuple(sorted((k, v) for k, v in sample.labels.items() if k != "stage"))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def plain(found: Samples, name: str, **labels: str) -> float:
    return found[name, tuple(sorted(labels.items()))]


def scrape(stats: StageStats, telemetry: Telemetry | None = None, gauges: Gauges | None = None) -> Samples:
    registry = CollectorRegistry()
    now = gauges or Gauges(0, 0, 0, 0, 4, 0, 0)
    info = {"stage": "2", "layers": "0-3", "policy": "auto"}
    registry.register(StageCollector(info, stats, telemetry or Telemetry(), lambda: now))
    return samples(generate_latest(registry).decode())


@pytest.fixture
def worked() -> StageStats:
    """Counters after three steps of 3, 1 and 2 rows whose frames waited 1 us, 3 ms and twice 9 s."""
    executor, stats = new_executor(FakeEngine()), StageStats()
    ms = 1_000_000
    stats.step_done(executor.execute(step_of(control(5, Flag.OPEN), control(6, Flag.OPEN))))
    stats.step_done(executor.execute(step_of(rows_frame(5, 0, 3), taken_ns=1_000)))
    stats.step_done(executor.execute(step_of(rows_frame(5, 3, 1), taken_ns=3 * ms)))
    stats.step_done(executor.execute(step_of(rows_frame(5, 4), rows_frame(6, 0), taken_ns=9_000 * ms)))
    return stats


def test_histograms_are_cumulative_and_add_up(worked: StageStats) -> None:
    found = scrape(worked)
    rows = names.METRIC_BATCH_ROWS
    assert [plain(found, f"{rows}_bucket", le=str(float(end))) for end in (1, 2, 3, 4)] == [1, 2, 3, 3]
    assert (plain(found, f"{rows}_bucket", le="+Inf"), plain(found, f"{rows}_sum")) == (3, 6)
    assert plain(found, f"{rows}_count") == plain(found, f"{names.METRIC_STEPS}_total") == 3
    sessions = names.METRIC_BATCH_SESSIONS
    assert [plain(found, f"{sessions}_bucket", le=str(float(end))) for end in (1, 2)] == [2, 3]
    wait = names.METRIC_FRAME_WAIT
    ends = [(end * 1e-9, plain(found, f"{wait}_bucket", le=str(end * 1e-9))) for end in WAIT_BUCKETS_NS]
    assert [count for end, count in ends] == [1 if end < 0.003 else 2 for end, _ in ends]
    assert plain(found, f"{wait}_bucket", le="+Inf") == plain(found, f"{wait}_count") == 4
    assert plain(found, f"{wait}_sum") == pytest.approx(18.003001)


def test_a_status_has_the_interval_of_each_latest_step(worked: StageStats) -> None:
    bare, full = worked.message(with_recent=False), worked.message(with_recent=False, with_steps=True)
    assert not bare.step_start_ns
    assert len(full.step_start_ns) == len(full.step_end_ns) == full.n_steps == 3
    spans = zip(full.step_start_ns, full.step_end_ns, strict=True)
    assert sum(end_ns - start_ns for start_ns, end_ns in spans) == full.busy_ns


def test_decode_frames_are_counted_with_the_time_for_which_they_were_held() -> None:
    """Waiting for their step and in its native decode; prompt rows are counted separately."""
    executor, stats = new_executor(FakeEngine()), StageStats()
    executor.execute(step_of(control(5, Flag.OPEN), control(6, Flag.OPEN)))
    chunk, row = rows_frame(5, 0, 3, flags=Flag.PREFILL), rows_frame(6, 0)
    result = executor.execute(step_of(chunk, row, taken_ns=5_000_000))
    stats.step_done(result)
    counts = stats.message(with_recent=False)
    assert (counts.n_frames, counts.n_decode_frames) == (2, 1)
    assert counts.decode_held_ns == 5_000_000 - row.arrived_ns + result.decode_ns


def test_a_step_whose_frames_were_all_refused_is_no_native_step(worked: StageStats) -> None:
    before, executor = worked.message(with_recent=True), new_executor(FakeEngine())
    result = executor.execute(step_of(rows_frame(9, 4), taken_ns=1_000))  # session 9 was never opened
    assert [fault.label for output in result.outputs for fault in output.faults] == ["bad_session"]
    worked.step_done(result)
    after = worked.message(with_recent=True)
    assert list(after.recent_wait_ns) == [*before.recent_wait_ns, 1_000], "the frame did wait"
    del before.recent_wait_ns[:], after.recent_wait_ns[:]
    assert after == before
    found = scrape(worked)
    assert plain(found, f"{names.METRIC_FRAME_WAIT}_count") == 5
    assert plain(found, f"{names.METRIC_BATCH_ROWS}_count") == plain(found, f"{names.METRIC_STEPS}_total") == 3


def test_counters_and_gauges_have_the_counts(worked: StageStats) -> None:
    worked.faults_by_label["not_finite"] += 2
    worked.predicted_ns, worked.measured_ns = 3_000_000_000, 4_000_000_000
    worked.payload_bytes, worked.envelopes = {"in": 10, "out": 20}, {"in": 3, "out": 4}
    worked.n_epochs = 2
    telemetry = Telemetry(TelemetryConfig(level=Level.BATCHES))
    found = scrape(worked, telemetry, Gauges(7, 8, 3, 1, 4, 1_000, 64_000))
    expected: list[tuple[str, dict[str, str], float]] = [
        (f"{names.METRIC_ROWS}_total", {}, 6),
        (f"{names.METRIC_PADDED_ROWS}_total", {}, 0),
        (f"{names.METRIC_CLOSE_REASONS}_total", {"reason": "queue_drained"}, 3),
        (f"{names.METRIC_STEP_SECONDS}_total", {}, worked.busy_ns * 1e-9),
        (f"{names.METRIC_STEP_PREDICTED_SECONDS}_total", {}, 3),
        (f"{names.METRIC_STEP_MEASURED_SECONDS}_total", {}, 4),
        (f"{names.METRIC_ENCODE_SECONDS}_total", {}, worked.encode_ns * 1e-9),
        (f"{names.METRIC_FAULTS}_total", {"label": "not_finite"}, 2),
        (f"{names.METRIC_LINK_BYTES}_total", {"direction": "in"}, 10),
        (f"{names.METRIC_LINK_BYTES}_total", {"direction": "out"}, 20),
        (f"{names.METRIC_LINK_ENVELOPES}_total", {"direction": "in"}, 3),
        (f"{names.METRIC_LINK_ENVELOPES}_total", {"direction": "out"}, 4),
        (f"{names.METRIC_EPOCHS}_total", {}, 2),
        (f"{names.METRIC_SPANS_EXPORTED}_total", {}, 0),
        (f"{names.METRIC_SPANS_DROPPED}_total", {}, 0),
        (names.METRIC_QUEUED_ROWS, {}, 7),
        (names.METRIC_QUEUED_FRAMES, {}, 8),
        (names.METRIC_LANES_USED, {}, 3),
        (names.METRIC_LANES_KEPT, {}, 1),
        (names.METRIC_LANES_LIMIT, {}, 4),
        (names.METRIC_LINK_IN_FLIGHT, {}, 1_000),
        (names.METRIC_LINK_WINDOW, {}, 64_000),
        (names.METRIC_TELEMETRY_LEVEL, {}, 2),
        (names.METRIC_BATCH_INFO, {"layers": "0-3", "policy": "auto"}, 1),
    ]
    for name, labels, value in expected:
        assert plain(found, name, **labels) == pytest.approx(value), name
    assert worked.encode_ns > 0


def test_every_documented_metric_of_a_stage_is_there(worked: StageStats) -> None:
    worked.faults_by_label["native"] += 1
    exposed = {name for name, _ in scrape(worked)}
    own = {value for key, value in vars(names).items() if key.startswith("METRIC_") and _is_of_a_stage(key)}
    assert len(own) > 20
    missing = {name for name in own if not exposed & {name, f"{name}_total", f"{name}_bucket"}}
    assert missing == set()


def test_a_new_figure_is_an_entry_and_its_count(worked: StageStats, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is exposed with its help and unit, and is on the page of metrics, without anything else."""
    flux = figures.Figure("relayline_flux_seconds", "Time in flux", "flux_ns", figures.SECONDS)
    kinds = figures.Figure("relayline_flux_kinds", "Fluxes by kind", "flux_by_kind", label="kind")
    monkeypatch.setattr(figures, "COUNTERS", (*figures.COUNTERS, flux, kinds))
    worked.flux_ns, worked.flux_by_kind = 3_000_000_000, {"b": 2, "a": 1}  # type: ignore[attr-defined]
    found = scrape(worked)
    assert plain(found, "relayline_flux_seconds_total") == 3
    assert [plain(found, "relayline_flux_kinds_total", kind=kind) for kind in "ab"] == [1, 2]
    assert "| `relayline_flux_seconds_total` | counter | seconds |  | Time in flux |" in metrics_text()
    assert "| `relayline_flux_kinds_total` | counter |  | kind | Fluxes by kind |" in metrics_text()


def test_no_two_figures_have_one_name_and_every_field_is_there(worked: StageStats) -> None:
    counted = figures.COUNTERS + figures.HISTOGRAMS
    held = figures.GAUGES
    everything = [*counted, *held, *figures.TELEMETRY_COUNTERS, *figures.TELEMETRY_GAUGES]
    assert len({figure.name for figure in everything}) == len(everything)
    assert all(hasattr(worked, figure.field) for figure in counted)
    fields = {field.name for field in dataclasses.fields(Gauges)} - {"tier"}  # which has two separate figures
    assert {figure.field for figure in held} == fields | {"tier_bytes", "tier_states"}


def _is_of_a_stage(key: str) -> bool:
    source = Path(names.__file__).read_text()
    section = source.split("--- metrics of a stage")[1].split("# ---")[0]
    return f"\n{key}: Final" in section


def config(artifact: Path, **changes: object) -> StageConfig:
    defaults = {"n_lanes": 4, "ctx_tokens": 32, "n_threads": 1, "calibrate": False, "verify": False}
    return stage_config(artifact, **(defaults | changes))


async def test_metrics_over_http(tmp_path: Path) -> None:
    artifacts = write_pipeline(tmp_path, TinyShape(), [2])
    async with (
        serve(config(artifacts[0], metrics=("127.0.0.1", 0))) as (address, facts, _),
        aiohttp.ClientSession() as http,
    ):
        client = StageClient(address)
        status = await client.status(with_recent=False)
        await client.close()
        assert status is not None
        assert (status.metrics_address, status.metrics_tls) == (facts.metrics_address, False), (
            "others get the right path"
        )
        url = f"http://{facts.metrics_address}"
        async with http.get(f"{url}/metrics") as reply:
            assert reply.status == 200
            assert reply.headers["Content-Type"].startswith("text/plain")
            text = await reply.text()
        found = samples(text)
        assert plain(found, names.METRIC_LANES_LIMIT) == 4
        assert plain(found, "process_resident_memory_bytes") > 1_000_000
        assert 'stage="0"' in text
        openmetrics = {"Accept": "application/openmetrics-text; version=1.0.0"}
        async with http.get(f"{url}/metrics", headers=openmetrics) as reply:
            assert (await reply.text()).endswith("# EOF\n")
        async with http.get(f"{url}/else") as reply:
            assert reply.status == 404
        taken = ("127.0.0.1", int(facts.metrics_address.rpartition(":")[2]))
        with pytest.raises(
            StartError, match=r"cannot serve metrics on .* in use; take another port \(--metrics HOST:PORT, or"
        ):
            async with serve(config(artifacts[1], metrics=taken)):
                pass


async def test_metrics_are_off_unless_asked_for(tmp_path: Path) -> None:
    artifacts = write_pipeline(tmp_path, TinyShape(), [2])
    async with serve(config(artifacts[0])) as (_, facts, _):
        assert facts.metrics_address == ""


def stage_arguments(artifact: Path, *more: str) -> list[str | Path]:
    engine = ("--ctx", "32", "--lanes", "2", "--threads", "1", "--no-calibrate", "--no-verify", "--json")
    return ["stage", "--artifact", artifact, *engine, *more]


async def test_a_stage_process_tells_where_its_metrics_are(tmp_path: Path) -> None:
    artifacts = write_pipeline(tmp_path, TinyShape(), [2])
    flags = ("--metrics", "127.0.0.1:0", "--trace-level", "batches", "--trace-sample", "0.5")
    with running(*stage_arguments(artifacts[0], *flags)) as stage:
        async with aiohttp.ClientSession() as http, http.get(f"http://{stage.event['metrics']}/metrics") as reply:
            assert plain(samples(await reply.text()), names.METRIC_TELEMETRY_LEVEL) == Level.BATCHES
        assert stage.stop() == 0


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (("--otlp-endpoint", "localhost:4317"), "give http://HOST:4317"),
        (("--trace-level", "loud"), "--trace-level loud is unknown; choose one of off, summary"),
        (("--trace-sample", "2"), "--trace-sample 2.0 is outside 0..1"),
    ],
)
def test_a_mistaken_flag_is_one_line(tmp_path: Path, flags: tuple[str, ...], text: str) -> None:
    artifact = tmp_path / "x.gguf"
    artifact.touch()
    done = relayline(*stage_arguments(artifact, *flags))
    assert done.returncode == 2
    assert text in done.stderr
    assert "Traceback" not in done.stderr


def test_a_mistaken_variable_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    artifacts = write_pipeline(tmp_path, TinyShape(), [2])
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "tape")
    done = relayline(*stage_arguments(artifacts[0]))
    assert done.returncode == 2
    assert "OTEL_TRACES_EXPORTER 'tape' is unknown" in done.stderr
    assert "Traceback" not in done.stderr


async def test_beyond_loopback_metrics_need_a_permitted_role(tmp_path: Path) -> None:
    ids = make_identities(tmp_path / "ids")
    collector = StageCollector({"stage": "1"}, StageStats(), Telemetry(), lambda: Gauges(0, 0, 0, 0, 0, 0, 0))

    async def ask(port: int, who: Path | None) -> tuple[int, str]:
        context = ssl.create_default_context(cafile=str(ids.ca / "ca.pem"))
        if who is not None:
            context.load_cert_chain(who / "cert.pem", who / "key.pem")
        url = f"https://127.0.0.1:{port}/metrics"
        async with aiohttp.ClientSession() as session, session.get(url, ssl=context) as response:
            return response.status, await response.text()

    with pytest.raises(UsageError, match=r"the metrics port would listen on .*, beyond this machine, without TLS"):
        async with serve_metrics(("0.0.0.0", 0), collector):
            pass
    async with serve_metrics(("0.0.0.0", 0), collector, security_of(ids.box1)) as address:
        port = int(address.rpartition(":")[2])
        for who in (ids.monitor, ids.coordinator):
            status, text = await ask(port, who)
            assert (status, names.METRIC_STEPS in text) == (200, True)
            (expiry,) = re.findall(rf"^{names.METRIC_CERTIFICATE_EXPIRES} (\S+)$", text, re.MULTILINE)
            assert float(expiry) == read_certificate(ids.box1 / "cert.pem").not_valid_after_utc.timestamp()
        assert await ask(port, ids.box2) == (
            403, "stage box2 on box2 may not read metrics; issue a certificate with `relayline certs issue --monitor`\n"
        )  # fmt: skip
        for who in (None, ids.stranger):
            with pytest.raises((aiohttp.ClientError, OSError)):
                await ask(port, who)
        async with aiohttp.ClientSession() as session:
            with pytest.raises((aiohttp.ClientError, OSError)):
                await session.get(f"http://127.0.0.1:{port}/metrics")
        revoke(ids.ca, lambda identity: identity.role is Role.MONITOR, NOW)
        assert await ask(port, ids.monitor) == (403, "the credential of monitor on head is revoked\n")
    async with (
        serve_metrics(("127.0.0.1", 0), collector, security_of(ids.box1)) as address,
        aiohttp.ClientSession() as session,
        session.get(f"http://{address}/metrics") as response,
    ):
        assert response.status == 200, "on loopback as ever"
        assert names.METRIC_CERTIFICATE_EXPIRES in await response.text()
    assert PLAINTEXT.certificate_expires_unix_s() is None
    (ids.box1 / "cert.pem").write_text("cut")
    assert security_of(ids.box1).certificate_expires_unix_s() is None, "no scrape fails for it"


def test_a_wait_leads_to_the_second_of_passes_that_it_was_in() -> None:
    """Only clients that ask for OpenMetrics get exemplars, as Prometheus does."""
    executor, stats = new_executor(FakeEngine()), StageStats()
    passes = trace_context.new_root()
    executor.mark = lambda members: trace_context.new_below(passes)
    stats.step_done(executor.execute(step_of(control(5, Flag.OPEN))))
    stats.step_done(executor.execute(step_of(rows_frame(5, 0, arrived_ns=10), taken_ns=3_000_010)))
    executor.mark = lambda members: trace_context.NONE
    stats.step_done(executor.execute(step_of(rows_frame(5, 1, arrived_ns=10), taken_ns=60_000_010)))
    registry = CollectorRegistry(auto_describe=False)
    registry.register(StageCollector({"stage": "1"}, stats, Telemetry(), lambda: Gauges(0, 0, 0, 0, 0, 0, 0)))
    text = openmetrics_text(registry).decode()
    found = [line for line in text.splitlines() if " # " in line and line.startswith(names.METRIC_FRAME_WAIT)]
    assert len(found) == 1, "the other batch was not recorded"
    assert 'le="0.005"' in found[0]
    assert f'# {{trace_id="{passes[:16].hex()}"}} 0.003' in found[0]
    assert "trace_id" not in generate_latest(registry).decode()
