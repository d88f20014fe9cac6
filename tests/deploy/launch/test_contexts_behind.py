"""The contexts of pipelines behind one gateway: chosen for what the machines that they share have for all of them."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from relayline.coordinator.model.inspection import inspect_model
from relayline.deploy.cli.main import relayline
from relayline.deploy.launch import context, run
from relayline.deploy.launch.context import Beside, with_usual_context
from relayline.deploy.launch.gateway.beside import beside_in, read_beside
from relayline.deploy.launch.gateway.pipelines import pipelines_behind
from relayline.deploy.launch.gateway.plan import Started, plan_members
from relayline.deploy.launch.here import at_home
from relayline.deploy.launch.lanes import with_usual_lanes
from relayline.deploy.launch.run import Launch, Ready, plan_of
from relayline.deploy.launch.state import StateDir
from relayline.deploy.launch.survey import Neighbours
from relayline.deploy.launch.survey import _with_context as with_context_of_survey
from relayline.deploy.manifest import load_manifest
from relayline.deploy.manifest.gateway import load_gateway
from relayline.deploy.manifest.settings import open_context
from relayline.deploy.planning.inputs import memory_of
from relayline.deploy.planning.known_hosts import KnownHost
from relayline.wire.common.phase import Phase
from relayline.wire.common.units import GIB
from tests.support.tiny_models import make_tiny

LENGTH = 16_384
HEAD = "apiVersion: relayline.dev/v1alpha1\nkind: {kind}\nmetadata: {{name: {name}}}\nspec:\n"
REPLICA = "replicas: [{stages: [{name: x, host: 10.255.0.1}]}]"


@pytest.fixture(name="house")
def house_fixture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A gateway before two models that were trained for LENGTH tokens, on this machine."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    has_memory(monkeypatch, 64 * GIB)
    for name in ("a", "b"):
        make_tiny("llama", tmp_path / f"{name}.gguf", tokenizer=True, extra_values={"context_length": LENGTH})
        (tmp_path / f"{name}.yaml").write_text(
            HEAD.format(kind="Pipeline", name=name) + f"  model: {{path: {name}.gguf}}\n  stages: 1\n"
        )
    return written(tmp_path / "house.yaml")


def written(house: Path, more: str = "", of_b: str = "") -> Path:
    pipelines = f"  pipelines: [{{name: a, manifest: a.yaml}}, {{name: b, manifest: b.yaml{of_b}}}]\n"
    house.write_text(HEAD.format(kind="Gateway", name="house") + more + pipelines)
    return house


def has_memory(monkeypatch: pytest.MonkeyPatch, n_bytes: int) -> None:
    monkeypatch.setattr("relayline.deploy.machine.facts.available_memory_bytes", lambda: n_bytes)


def contexts(house: Path) -> list[tuple[int, int]]:
    """Lanes and tokens of each pipeline, as `plan` shows them."""
    result = CliRunner().invoke(relayline, ["plan", str(house), "--json"])
    assert result.exit_code == 0, result.output
    plans = [each["plan"] for each in json.loads(result.stdout)["pipelines"]]
    return [(plan["lanes"], plan["ctx_tokens"]) for plan in plans]


def tokens(house: Path) -> list[int]:
    return [n_lanes * ctx_tokens for n_lanes, ctx_tokens in contexts(house)]


def started(house: Path, name: str) -> tuple[int, int]:
    """Lanes and tokens as the pipeline's own `up` chooses them."""
    gateway = load_gateway(house)
    plans = {
        each.backend.name: each.local for each in plan_members(gateway, Started("house", house), gateway.members())
    }
    local = plans[name]
    assert local is not None
    beside = read_beside(local.arguments[local.arguments.index("--beside") + 1])
    manifest = at_home(with_usual_lanes(load_manifest(Path(local.arguments[1]))))
    opened = () if beside is None else open_context(manifest.spec)
    engine = with_usual_context(manifest, opened, house.parent / "none", beside=beside or Beside()).engine
    return engine.n_lanes, engine.ctx_tokens


def needed_bytes(house: Path, name: str, context: tuple[int, int]) -> int:
    """The memory of a pipeline of one stage with this context."""
    found = {each.name: each.manifest for each in pipelines_behind(load_gateway(house))}[name]
    assert found is not None
    path = house.parent / f"{name}.yaml"
    path.write_text(path.read_text() + f"  context: {{lanes: {context[0]}, tokens: {context[1]}}}\n")
    (memory,) = memory_of(load_manifest(path), inspect_model(house.parent / f"{name}.gguf"), ())
    path.write_text(path.read_text().rpartition("  context")[0])
    return memory.total_bytes


def test_each_has_what_its_model_was_trained_for_where_there_is_memory(house: Path) -> None:
    assert contexts(house) == [(32, LENGTH)] * 2
    assert started(house, "a") == started(house, "b") == (32, LENGTH)


def test_they_share_what_is_left(house: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone, each could have all; together they fit, and `plan` and `up` choose the same."""
    has_memory(monkeypatch, int(2.6 * needed_bytes(house, "a", (32, LENGTH))))
    both = contexts(house)
    assert [started(house, name) for name in ("a", "b")] == both
    assert both[0] == both[1]
    assert tokens(house)[0] < 32 * LENGTH
    assert contexts(written(house, "  awakeMax: 1\n")) == [(32, LENGTH)] * 2, "one at a time has the machine alone"
    assert started(house, "b") == (32, LENGTH)


@pytest.mark.parametrize(("phase", "is_same"), [(Phase.READY, True), (Phase.STARTING, False), (Phase.STOPPED, False)])
def test_one_that_starts_again_beside_the_other_has_what_it_had(
    house: Path, monkeypatch: pytest.MonkeyPatch, phase: Phase, *, is_same: bool
) -> None:
    """What the other one holds is not taken off twice."""
    all_bytes = int(2.6 * needed_bytes(house, "a", (32, LENGTH)))
    has_memory(monkeypatch, all_bytes)
    before = started(house, "a")
    (house.parent / "b").mkdir()
    other = SimpleNamespace(is_running=True, phase=phase, state=SimpleNamespace(name="house-b"))
    monkeypatch.setattr(context, "launched", lambda place, *_: [other] if place == house.parent / "b" else [])
    monkeypatch.setattr("relayline.deploy.machine.facts.total_memory_bytes", lambda: all_bytes)
    has_memory(monkeypatch, all_bytes // 2)
    assert (started(house, "a") == before) is is_same


def test_replicas_elsewhere_take_nothing_here(house: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    has_memory(monkeypatch, int(2.6 * needed_bytes(house, "a", (32, LENGTH))))
    before = contexts(house)
    found = {each.name: each.manifest for each in pipelines_behind(load_gateway(written(house, of_b=f", {REPLICA}")))}
    assert list(found) == ["a", "b", "b-2"]
    assert started(house, "a") == before[0]


def test_a_survey_leaves_the_others_their_share_of_a_host(house: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a host has is known once it has joined; before, `up` could not choose."""
    has_bytes = int(2.6 * needed_bytes(house, "a", (32, LENGTH)))
    for name in ("a", "b"):
        path = house.parent / f"{name}.yaml"
        path.write_text(path.read_text().replace("stages: 1", "stages: [{name: far, host: 10.255.0.1}]"))
    manifest = load_manifest(house.parent / "a.yaml")
    model = house.parent / "a.gguf"
    local = plan_members(gateway := load_gateway(house), Started("house", house), gateway.members())[0].local
    assert local is not None
    directory = StateDir(house.parent / "state-of-a")
    told = local.arguments[local.arguments.index("--beside") + 1]
    monkeypatch.setattr(run, "ready_to_start", lambda *_: Ready(manifest, None))
    directory.path.mkdir()
    plan, _ = plan_of(Launch(manifest, house, beside=told), directory)
    beside = read_beside(plan.serve_arguments[plan.serve_arguments.index("--beside") + 1])
    assert beside is not None
    known = {"far": KnownHost(1, "far", "10.255.0.1", "a.gguf", 0.0, n_cores=4, memory_bytes=has_bytes)}
    alone, shared = (
        with_context_of_survey(manifest, model, known, neighbours).engine
        for neighbours in (Neighbours(), Neighbours(beside, house.parent / "none"))
    )
    assert (alone.n_lanes, alone.ctx_tokens) == (32, LENGTH)
    assert 0 < shared.n_lanes * shared.ctx_tokens < 32 * LENGTH
    (house.parent / "b.gguf").write_bytes(b"not a model")
    own_mistake = with_context_of_survey(manifest, model, known, Neighbours(beside, house.parent / "none")).engine
    assert own_mistake == alone, "b cannot start, and says why itself"


def test_who_is_beside_is_told_as_it_is_planned(house: Path) -> None:
    gateway = load_gateway(written(house, "  awakeMax: 2\n", f", {REPLICA}"))
    behind = [each.prepared(lambda one: at_home(with_usual_lanes(one))) for each in pipelines_behind(gateway)]
    plans = plan_members(gateway, Started("house", house), gateway.members())
    for plan, pipeline in zip(plans, behind, strict=True):
        assert plan.local is not None
        said = read_beside(plan.local.arguments[plan.local.arguments.index("--beside") + 1])
        expected = beside_in(gateway, behind, pipeline.name)
        assert said is not None
        assert said.n_most == expected.n_most == 1
        hosts = [[stage.host for stage in each.stages] for each in said.others]
        assert hosts == [[stage.host for stage in each.stages] for each in expected.others]


@pytest.mark.parametrize("spoiled", ["a.gguf", "a.yaml"])
@pytest.mark.parametrize("is_absent", [True, False])
def test_a_neighbour_of_unknown_size_leaves_the_usual_context(house: Path, spoiled: str, is_absent: bool) -> None:
    gateway = load_gateway(house)
    (_, plan) = plan_members(gateway, Started("house", house), gateway.members())
    path = house.parent / spoiled
    path.unlink()
    if not is_absent:
        path.write_text("kind: [")
    assert plan.local is not None
    beside = read_beside(plan.local.arguments[plan.local.arguments.index("--beside") + 1])
    manifest = load_manifest(house.parent / "b.yaml")
    if spoiled == "a.yaml":
        assert beside is None
        return
    assert beside is not None
    assert with_usual_context(manifest, open_context(manifest.spec), house.parent / "none", beside=beside) is manifest
