"""Measurements that hosts report are kept, and plans are made from them."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from relayline.coordinator.engine.membership import Introduction
from relayline.coordinator.joining.config import PoolState
from relayline.coordinator.joining.survey import HostReport
from relayline.coordinator.model.inspection import inspect_model
from relayline.coordinator.planner.instance import Link
from relayline.coordinator.planner.memory import HEADROOM, stage_memory
from relayline.coordinator.planner.speed import Sample
from relayline.deploy.cli.survey import explainer
from relayline.deploy.launch.plan_file import read_plan, write_plan
from relayline.deploy.launch.prepare import settled
from relayline.deploy.launch.survey import plan_record, unknown_hosts, wants_survey
from relayline.deploy.manifest import Manifest, parse_manifest
from relayline.deploy.planning.busy import BUSY_SLOWER_MAX
from relayline.deploy.planning.inputs import best_for, instance_of, load_of
from relayline.deploy.planning.known_hosts import (
    CALL_NS,
    HOSTS_DIR,
    forget_hosts,
    known_hosts,
    refine_hosts,
    remember_hosts,
)
from relayline.deploy.planning.plan_description import describe_plan, limit_text, lines_of
from relayline.deploy.planning.shapes import shape_of
from relayline.deploy.testing.paths import DEMO_MODEL
from relayline.wire.common import remembered
from relayline.wire.common.places import state_dir

MIB, GIB = 1 << 20, 1 << 30
MANIFEST = """
apiVersion: relayline.dev/v1alpha1
kind: Pipeline
metadata: {{name: two}}
spec:
  model: {{path: {model}}}
  context: {{tokens: 256, lanes: 8, kvType: {kv}}}
  stages:
  - {{name: laptop, host: 203.0.113.1{laptop}}}
  - {{name: server, host: 203.0.113.2}}
"""


@pytest.fixture(autouse=True)
def _own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def manifest(kv: str = "f16", laptop: str = "") -> Manifest:
    return parse_manifest(MANIFEST.format(model=DEMO_MODEL, kv=kv, laptop=laptop).encode(), "manifest")


def report(
    name: str, layer_ms: float, *, cores: int = 4, memory: int = 8 * GIB, link: Link | None = None
) -> HostReport:
    """A host on which a step of one row takes this long for a MiB of layers or head."""
    points = [(rows, layer_ms * 1e6 * (1 + 0.5 * (rows - 1))) for rows in (1, 2, 4, 8, 16, 32)]
    who = Introduction(name, "p", 7, "1", "203.0.113.9", f"{name}.lan", "Linux", cores, memory, None, memory, "a CPU")
    return HostReport(who, (Sample(MIB, 0, points),), in_service=1.0, link=link)


def test_a_faster_host_gets_more_layers_and_the_reason_is_shown() -> None:
    link = Link(2 * CALL_NS, 1e8)
    remember_hosts(
        manifest(), DEMO_MODEL, [report("laptop", 4.0, link=link), report("server", 1.0, cores=16, link=link)]
    )
    known, facts = known_hosts(manifest(), DEMO_MODEL), inspect_model(DEMO_MODEL)
    instance = instance_of(manifest(), facts, known=known)
    assert [host.threads for host in instance.hosts] == [4, 16], "each host's own cores"
    assert [host.machine.memory_bytes for host in instance.hosts] == [8 * GIB] * 2
    assert {host.speed.source for host in instance.hosts} == {"measured"}
    assert [host.speed.in_service for host in instance.hosts] == [1.0, 1.0], "measurements, not guesses"
    assert {host.link for host in instance.hosts} == {Link(CALL_NS, 1e8)}
    best = best_for(instance)
    (first, second) = (end - start for start, end in best.edges)
    assert second >= 2 * first
    described = describe_plan(instance, best.edges, known)
    assert described["from"] == "measured"
    assert [stage["relative_speed"] for stage in described["stages"]] == [1.0, 4.0]
    assert described["tok_s"] > 1.3 * described["equal_tok_s"]
    lines = lines_of(described)
    assert lines[0] == "planned from measured hosts: laptop 1.0x, server 4.0x"
    assert f"layers {first}-{facts.n_layers - 1}" in lines[2]
    assert "0.4 ms and 800 Mbit/s from here" in lines[1]
    assert "equal shares would give" in lines[-1]


def test_the_limit_of_a_plan_is_said_with_one_noun() -> None:
    assert [limit_text(f"stage {name}") for name in ("server", "stage-1")] == ["stage server", "stage-1"]
    assert limit_text("the link a to b") == "the link a to b"


def test_a_busy_measurement_decides_no_more_than_a_bound() -> None:
    """Measured under a load of 20, a host once seemed 3,124 times slower than its twin, and got one layer of all."""
    quiet, busy = report("laptop", 1.0), dataclasses.replace(report("server", 3_124.0), is_doubtful=True)
    facts = inspect_model(DEMO_MODEL)
    known = remember_hosts(manifest(), DEMO_MODEL, [quiet, busy])
    instance = instance_of(manifest(), facts, known=known)
    assert instance.hosts[0].speed.source == "measured"
    assert instance.hosts[1].speed.layer_ns(8) == pytest.approx(BUSY_SLOWER_MAX * instance.hosts[0].speed.layer_ns(8))
    described = describe_plan(instance, best_for(instance).edges, known)
    assert described["from"] == "measured"
    assert [stage["relative_speed"] for stage in described["stages"]] == [BUSY_SLOWER_MAX, 1.0]
    (line,) = [line for line in lines_of(described) if "server" in line and "layers" in line]
    assert "too busy to be measured: it counts as 2 times as slow as its cores suggest, and the next start" in line
    assert unknown_hosts(manifest(), DEMO_MODEL) == ["server"]


@pytest.mark.parametrize(
    ("laptop", "server", "cores", "counts"),
    [
        (1.0, 1.5, 4, 1.5),  # within the bound it is believed
        (100.0, 1_000.0, 4, 2.0),  # both busy: relative to the quicker one
        (1.0, 1_000.0, 1, 4 * 2.0),  # a quarter of the cores
    ],
)
def test_a_busy_host_counts_by_its_cores_relative_to_the_others(
    laptop: float, server: float, cores: int, counts: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("relayline.deploy.machine.facts.bandwidth_bytes_per_s", lambda n_threads: n_threads * 1e9)
    monkeypatch.setattr("relayline.deploy.machine.facts.flops", lambda n_threads: n_threads * 1e12)
    reports = [report("laptop", laptop), report("server", server, cores=cores)]
    known = remember_hosts(manifest(), DEMO_MODEL, [dataclasses.replace(one, is_doubtful=True) for one in reports])
    instance = instance_of(manifest(), inspect_model(DEMO_MODEL), known=known)
    first, second = (host.speed.layer_ns(8) for host in instance.hosts)
    assert second / first == pytest.approx(counts)


def test_a_host_without_room_is_said_to_be_full() -> None:
    facts = inspect_model(DEMO_MODEL)
    half = stage_memory(
        shape_of(facts), load_of(manifest(), facts.architecture), facts.n_layers // 2, facts.n_layers
    ).total_bytes
    reports = [report("laptop", 4.0), report("server", 1.0, memory=int(half / (1 - HEADROOM)) + 1)]
    remember_hosts(manifest(), DEMO_MODEL, reports)
    known = known_hosts(manifest(), DEMO_MODEL)
    instance = instance_of(manifest(), inspect_model(DEMO_MODEL), known=known)
    best = best_for(instance)
    roomy = remember_hosts(manifest(), DEMO_MODEL, [report("laptop", 4.0), report("server", 1.0)])
    free = best_for(instance_of(manifest(), inspect_model(DEMO_MODEL), known=roomy))
    assert (free.edges[0], best.edges[0]) == ((0, 1), (0, facts.n_layers // 2)), "it leaves layers to the laptop"
    assert "which is its limit" in lines_of(describe_plan(instance, best.edges, known))[2]


def test_measurements_hold_for_one_model_host_and_engine_settings() -> None:
    remember_hosts(manifest(), DEMO_MODEL, [report("laptop", 4.0), report("server", 1.0)])
    assert unknown_hosts(manifest(), DEMO_MODEL) == []
    assert unknown_hosts(manifest(kv="q8_0"), DEMO_MODEL) == ["laptop", "server"]
    assert unknown_hosts(manifest(laptop=", threads: 2"), DEMO_MODEL) == ["laptop"]
    assert unknown_hosts(manifest(laptop=", speed: {decodeGbytesPerS: 9}"), DEMO_MODEL) == []
    forget_hosts(manifest(), DEMO_MODEL)
    assert unknown_hosts(manifest(), DEMO_MODEL) == ["laptop", "server"]


def test_measurements_of_a_settled_manifest_serve_the_written_one() -> None:
    written = parse_manifest(
        MANIFEST.format(model=DEMO_MODEL, kv="f16", laptop="").replace("203.0.113.1", "localhost").encode(), "manifest"
    )
    whole = settled(written, DEMO_MODEL, [None, None])
    assert whole.stages[0].threads
    remember_hosts(whole, DEMO_MODEL, [report("laptop", 4.0), report("server", 1.0)])
    assert unknown_hosts(written, DEMO_MODEL) == []


def test_a_spares_measurements_are_kept_and_no_start_waits_for_it() -> None:
    text = MANIFEST.format(model=DEMO_MODEL, kv="f16", laptop="") + "  spares:\n  - {name: spare, host: 203.0.113.3}\n"
    with_spare = parse_manifest(text.encode(), "manifest")
    remember_hosts(with_spare, DEMO_MODEL, [report("laptop", 4.0), report("server", 1.0)])
    assert unknown_hosts(with_spare, DEMO_MODEL) == [], "it holds no layers at the start"
    remember_hosts(with_spare, DEMO_MODEL, [report("spare", 2.0)])
    assert known_hosts(with_spare, DEMO_MODEL)["spare"].host == "203.0.113.3"
    forget_hosts(with_spare, DEMO_MODEL)
    assert known_hosts(with_spare, DEMO_MODEL) == {}


def test_measurements_have_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remembered, "REMEMBERED_MAX", 1)
    remember_hosts(manifest(), DEMO_MODEL, [report("laptop", 1.0), report("server", 1.0)])
    assert list(known_hosts(manifest(), DEMO_MODEL)) == ["server"]


def test_a_file_that_cannot_be_read_is_measured_again() -> None:
    remember_hosts(manifest(), DEMO_MODEL, [report("laptop", 4.0)])
    (path,) = (state_dir() / HOSTS_DIR).iterdir()
    path.write_text("{")
    assert unknown_hosts(manifest(), DEMO_MODEL) == ["laptop", "server"]


def test_a_host_that_could_not_be_measured_is_asked_again_and_its_memory_counts() -> None:
    remember_hosts(manifest(), DEMO_MODEL, [HostReport(report("laptop", 1.0).who, problem="no such type")])
    assert "laptop" in unknown_hosts(manifest(), DEMO_MODEL)
    instance = instance_of(manifest(), inspect_model(DEMO_MODEL))
    assert (instance.hosts[0].speed.source, instance.hosts[0].machine.memory_bytes) == ("estimated", 8 * GIB)


def test_measurements_with_real_layers_improve_the_next_plan() -> None:
    remember_hosts(manifest(), DEMO_MODEL, [report("laptop", 4.0)])
    facts = inspect_model(DEMO_MODEL)
    layer_bytes = sum(facts.layer_bytes[:4])
    twice = [(rows, 2 * ns * layer_bytes / MIB) for rows, ns in report("laptop", 4.0).samples[0].decode]
    before = known_hosts(manifest(), DEMO_MODEL)["laptop"].speed
    refine_hosts(manifest(), DEMO_MODEL, {name: Sample(layer_bytes, 0, twice) for name in ("laptop", "server")})
    known = known_hosts(manifest(), DEMO_MODEL)
    assert list(known) == ["laptop"], "a host without a survey stays unknown"
    after = known["laptop"].speed
    assert before is not None
    assert after is not None
    assert after.layer_ns(4) == pytest.approx(2 * before.layer_ns(4), rel=0.01)


def test_the_plans_description_follows_moved_layers(tmp_path: Path) -> None:
    remember_hosts(manifest(), DEMO_MODEL, [report("laptop", 4.0), report("server", 1.0)])
    whole = settled(manifest(), DEMO_MODEL, [(0, 2), (2, 8)])
    plan_file = tmp_path / "plan.json"
    write_plan(plan_file, described := plan_record(whole, DEMO_MODEL))
    explain = explainer(whole, plan_file)
    assert explain(PoolState((2,), ("laptop", "server"), ("laptop",))) == described, (
        "drained, and nothing has moved yet"
    )
    moved = explain(PoolState((5,), ("laptop", "server")))
    assert moved is not None
    assert [stage["layers"] for stage in moved["stages"]] == [[0, 5], [5, 8]]
    assert moved["tok_s"] < described["tok_s"], "the slow one has most of them now"
    assert lines_of(moved)[0] == "layers have moved since the start; by measured hosts: laptop 1.0x, server 4.0x"
    assert read_plan(plan_file) == moved
    alone = explain(PoolState((), ("server",)))
    assert alone is not None
    assert [(stage["name"], stage["layers"]) for stage in alone["stages"]] == [("server", [0, 8])]
    assert explain(PoolState((4,), ("server", "fifth"), (), ("fifth",))) is None, "it was never measured"
    assert not plan_file.exists()
    assert explainer(None, plan_file)(PoolState((5,), ("laptop", "server"))) is None


def test_measurements_of_a_busy_host_make_one_plan_and_are_not_kept() -> None:
    busy = dataclasses.replace(report("laptop", 1.5), is_doubtful=True)
    remembered = remember_hosts(manifest(), DEMO_MODEL, [busy, report("server", 1.0)])
    instance = instance_of(manifest(), inspect_model(DEMO_MODEL), known=remembered)
    assert {host.speed.source for host in instance.hosts} == {"measured"}
    described = describe_plan(instance, best_for(instance).edges, remembered)
    assert "busy when it was measured" in lines_of(described)[1]
    assert unknown_hosts(manifest(), DEMO_MODEL) == ["laptop"], "the next start measures it again"
    refine_hosts(manifest(), DEMO_MODEL, {"laptop": Sample(MIB, 0, [(1, 5e6)])})
    assert unknown_hosts(manifest(), DEMO_MODEL) == ["laptop"]


def test_a_start_surveys_hosts_that_nobody_knows_where_there_is_something_to_choose() -> None:
    over_hosts = manifest()
    here = parse_manifest(
        f"apiVersion: relayline.dev/v1alpha1\nkind: Pipeline\nmetadata: {{name: here}}\n"
        f"spec: {{model: {{path: {DEMO_MODEL}}}, stages: 2}}\n".encode(),
        "manifest",
    )
    fixed = manifest(laptop=", layers: [0, 3]")
    assert wants_survey(over_hosts, DEMO_MODEL, measure=None)
    assert not wants_survey(over_hosts, DEMO_MODEL, measure=False)
    assert not wants_survey(fixed, DEMO_MODEL, measure=None), "two stages, and the first one's layers are given"
    assert not wants_survey(here, DEMO_MODEL, measure=None), "stages of one machine are equal"
    assert wants_survey(here, DEMO_MODEL, measure=True)
    remember_hosts(over_hosts, DEMO_MODEL, [report("laptop", 4.0), report("server", 1.0)])
    assert not wants_survey(over_hosts, DEMO_MODEL, measure=None), "the next start plans at once"


def test_a_plan_of_given_layers_is_described_too() -> None:
    n_layers = inspect_model(DEMO_MODEL).n_layers
    described = plan_record(manifest(laptop=", layers: [0, 3]"), DEMO_MODEL)
    assert [stage["layers"] for stage in described["stages"]] == [[0, 3], [3, n_layers]]
    assert described["from"] == "estimated"


def test_a_state_directory_that_is_a_file_holds_no_measurements(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "state").touch()
    assert known_hosts(manifest(), DEMO_MODEL) == {}
    assert not caplog.messages  # `up` says next that it cannot keep its state there


@pytest.mark.parametrize(("host", "is_here"), [("localhost", True), ("203.0.113.7", False)])
def test_a_coordinator_shares_its_hosts_cores_with_the_stages_there(host: str, is_here: bool) -> None:
    text = MANIFEST.format(model=DEMO_MODEL, kv="f16", laptop="").replace("host: 203.0.113.1", "host: localhost")
    local = parse_manifest(f"{text}  coordinator: {{host: {host}}}\n".encode(), "manifest")
    instance = instance_of(local, inspect_model(DEMO_MODEL))
    assert (instance.coordinator == instance.hosts[0].machine) is is_here
    assert instance.coordinator != instance.hosts[1].machine


def test_the_way_to_a_relayed_stage_passes_the_coordinators_host() -> None:
    """Its own link was measured through the relay, without a call; the delays of both its parts add up."""
    text = MANIFEST.format(model=DEMO_MODEL, kv="f16", laptop="").replace("203.0.113.2", "shed, relay: true")
    relayed = parse_manifest(text.encode(), "manifest")
    direct, through = Link(5_000_000 + CALL_NS, 1e8), Link(20_000_000, 1e6)
    reports = [
        report("laptop", 4.0, link=direct),
        dataclasses.replace(report("server", 1.0, link=through), is_relayed=True),
    ]
    remember_hosts(relayed, DEMO_MODEL, reports)
    known = known_hosts(relayed, DEMO_MODEL)
    instance = instance_of(relayed, inspect_model(DEMO_MODEL), known=known)
    assert [host.link for host in instance.hosts] == [Link(25_000_000, 1e6), Link(20_000_000, 1e6)]
    planned = describe_plan(instance, best_for(instance).edges, known)
    assert [stage["is_relayed"] for stage in planned["stages"]] == [False, True]
    lines = [line for line in lines_of(planned) if "from here" in line]
    assert [line.endswith("from here through the relay") for line in lines] == [False, True]
    remember_hosts(relayed, DEMO_MODEL, [report("server", 1.0, link=direct)])
    assert "server" not in known_hosts(relayed, DEMO_MODEL), "a direct way says nothing of the relay's"


@pytest.mark.parametrize(
    ("stage", "settings", "expected"),
    [
        ("{name: a, device: gpu}", "", True),
        ("{name: a, device: cpu}", "", False),
        ("{name: a, device: cpu}", "runAhead: 'on'", True),
        ("{name: a, device: gpu}", "runAhead: 'off'", False),
        ("{name: a, device: gpu}", "policy: single", False),
    ],
)
def test_a_host_alone_is_planned_with_the_rows_ahead_that_its_stage_computes(
    stage: str, settings: str, expected: bool
) -> None:
    head = MANIFEST.format(model=DEMO_MODEL, kv="f16", laptop="").partition("  stages:")[0]
    text = f"{head}  batching: {{{settings}}}\n  stages:\n  - {stage}\n  - {{name: b}}\n"
    instance = instance_of(parse_manifest(text.encode(), "manifest"), inspect_model(DEMO_MODEL))
    assert instance.hosts[0].runs_ahead is expected
