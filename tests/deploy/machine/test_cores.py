"""A machine's cores divided among its stages: lists, shares, and processes that stay on their cores."""

from __future__ import annotations

import os
from pathlib import Path

import hypothesis.strategies as st
import pytest
import yaml
from hypothesis import given

from relayline.coordinator.model.split import split_model
from relayline.deploy.launch.arrange import arrange
from relayline.deploy.launch.prepare import cores_of
from relayline.deploy.machine import cores
from relayline.deploy.machine.cores import divided, in_order, keep_to, read_cores, shares, write_cores
from relayline.deploy.manifest import Stage
from relayline.deploy.render import compose
from relayline.deploy.render.inside import notes
from relayline.deploy.testing.processes import relayline, running
from relayline.wire.common import usable_cores as usable_cores_module
from relayline.wire.common.errors import UsageError
from relayline.wire.settings.table import EngineSettings
from tests.deploy.launch.test_launch_parts import SMALL, manifest_of
from tests.deploy.manifest.test_manifest import parsed, with_stages
from tests.support.launches import launched
from tests.support.tiny_models import make_tiny


@given(st.sets(st.integers(0, cores.CORE_MAX), min_size=1))
def test_lists_are_read_as_they_are_written(numbers: set[int]) -> None:
    assert read_cores(write_cores(numbers)) == tuple(sorted(numbers))


def test_lists_are_short_and_may_be_in_any_order() -> None:
    assert write_cores((0, 1, 2, 3, 8)) == "0-3,8"
    assert read_cores("8,2-3,0-2") == (0, 1, 2, 3, 8)


@pytest.mark.parametrize("text", ["", "a", "1,", "3-1", "-1", "0-8192", "99999", "1 2", "1-2-3", "0x1", "٣"])
def test_a_bad_list_of_cores_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="cores"):
        read_cores(text)


def test_second_threads_of_cores_come_last_within_a_node_and_nodes_stay_together() -> None:
    spread = {core: (0, core // 4) for core in range(8)}  # 0 and 4 are one core, as many systems number them
    assert in_order(spread) == [0, 1, 2, 3, 4, 5, 6, 7]
    adjacent = {core: (0, core % 2) for core in range(8)}  # 0 and 1 are one core
    assert in_order(adjacent) == [0, 2, 4, 6, 1, 3, 5, 7]
    two_nodes = {core: (core % 2, core // 4) for core in range(8)}
    assert in_order(two_nodes) == [0, 2, 4, 6, 1, 3, 5, 7]


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(0, 20))
def test_every_stage_has_cores_for_its_threads_and_no_core_two_stages(n_threads: list[int], n_spare: int) -> None:
    n_cores = sum(n_threads) + n_spare
    found = divided(range(n_cores), n_threads)
    assert found is not None
    assert [core for share in found for core in share] == list(range(n_cores))
    for share, count in zip(found, n_threads, strict=True):
        assert len(share) >= count
        assert abs(len(share) - count * n_cores / sum(n_threads)) < 1


@pytest.mark.parametrize(("n_cores", "n_threads"), [(3, [2, 2]), (2, []), (2, [1, 0]), (0, [1])])
def test_threads_are_not_pinned_where_they_outnumber_cores(n_cores: int, n_threads: list[int]) -> None:
    assert divided(range(n_cores), n_threads) is None


def test_a_system_that_does_not_say_where_its_cores_are_divides_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cores, "SYSTEM", tmp_path)
    assert shares([1]) is None
    for core in os.sched_getaffinity(0):
        topology = tmp_path / "cpu" / f"cpu{core}" / "topology"
        topology.mkdir(parents=True)
        (topology / "thread_siblings_list").write_text(f"{core}\n")
    for node, listed in enumerate(("", write_cores(os.sched_getaffinity(0)))):
        (tmp_path / "node" / f"node{node}").mkdir(parents=True)
        (tmp_path / "node" / f"node{node}" / "cpulist").write_text(f"{listed}\n")
    assert shares([1]) == [tuple(sorted(os.sched_getaffinity(0)))]
    (tmp_path / "node" / "node0" / "cpulist").write_text("many\n")
    assert shares([1]) is None


def test_cores_that_are_not_there_are_refused_before_anything_changes() -> None:
    allowed = os.sched_getaffinity(0)
    here = write_cores(allowed)
    with pytest.raises(UsageError, match=rf"^--cores {cores.CORE_MAX}: this process may run on {here}$"):
        keep_to((min(allowed), cores.CORE_MAX))
    assert os.sched_getaffinity(0) == allowed


@pytest.fixture(scope="module")
def split(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("split")
    split_model(make_tiny("llama", directory / "tiny.gguf", n_layers=4, tokenizer=True), directory, n_stages=2)
    return directory


def test_every_thread_of_a_stage_keeps_to_its_cores(split: Path) -> None:
    core = max(os.sched_getaffinity(0))
    arguments = ("stage", "--artifact", split / "stage-0.gguf", "--no-calibrate", "--json")
    with running(*arguments, "--cores", str(core)) as stage:
        threads = [*Path(f"/proc/{stage.process.pid}/task").iterdir()]
        assert len(threads) > 3
        assert {frozenset(os.sched_getaffinity(int(thread.name))) for thread in threads} == {frozenset([core])}
    for wrong in "x", str(cores.CORE_MAX):
        refused = relayline(*arguments, "--cores", wrong)
        assert refused.returncode == 2
        assert wrong in refused.stderr
        assert "Traceback" not in refused.stderr


def test_a_manifest_divides_cores_too_where_it_names_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = manifest_of(SMALL, tmp_path)
    monkeypatch.setattr("relayline.deploy.launch.prepare.shares", lambda n_threads: divided(range(8), n_threads))
    monkeypatch.setattr("relayline.deploy.launch.prepare.threads_for", lambda *_: 4)
    one, other = manifest.stages
    assert cores_of(manifest.stages) == {one.name: "0-3", other.name: "4-7"}
    named = Stage.model_validate({**one.model_dump(by_alias=True), "cores": "7,0-1"})
    assert cores_of((named, other)) == {one.name: "0-1,7", other.name: "any"}
    monkeypatch.setattr("relayline.deploy.launch.prepare.shares", lambda _: None)
    assert cores_of(manifest.stages) == {one.name: "any", other.name: "any"}
    spec = manifest.spec.model_copy(update={"stages": (named, other)})
    plan = arrange(manifest.model_copy(update={"spec": spec}), tmp_path / "a.yaml", tmp_path / "settled.json")
    assert [stage.arguments[2:4] if "--cores" in stage.arguments else () for stage in plan.stages] == [
        ("--cores", "0-1,7"),
        (),
    ]


def test_up_can_leave_stages_on_any_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("relayline.deploy.launch.prepare.shares", lambda n_threads: divided(range(8), n_threads))
    monkeypatch.setattr("relayline.deploy.launch.prepare.threads_for", lambda *_: 4)
    for flags, expected in (((), ["0-3", "4-7"]), (("--no-pin",), ["any", "any"])):
        stages = launched(monkeypatch, "m.gguf", *flags).manifest.stages
        assert list(cores_of(stages).values()) == expected


def test_cores_named_are_a_cpuset_in_compose_and_left_to_the_kubelet_in_kubernetes() -> None:
    manifest = parsed(with_stages("name: a, cores: '3,0-1', threads: 2, memoryGib: 4"))
    services = yaml.safe_load(compose.render(manifest, "/models"))["services"]
    assert services["a"]["cpuset"] == "0-1,3"
    assert [note for note in notes(manifest, in_kubernetes=True) if "cores are left out" in note]
    plain = parsed(with_stages("name: a, threads: 2, memoryGib: 4"))
    assert "cpuset" not in yaml.safe_load(compose.render(plain, "/models"))["services"]["a"]


@pytest.mark.parametrize(
    ("capacities", "computing"),
    [
        ([1024] * 4, [0, 1, 2, 3]),
        ([250, 250, 250, 250, 760, 760, 1024, 1024], [4, 5, 6, 7]),  # Arm: small, middle and large cores
        ([1024, 1024, 600, 600], [0, 1, 2, 3]),  # x86: efficient cores have their part
        ([1024, None, 250, 250], [0, 1, 2, 3]),
    ],
)
def test_cores_that_are_much_slower_get_no_thread(
    capacities: list[int | None], computing: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for core, capacity in enumerate(capacities):
        siblings = tmp_path / "cpu" / f"cpu{core}" / "topology" / "thread_siblings_list"
        siblings.parent.mkdir(parents=True)
        siblings.write_text(f"{core}\n")
        if capacity is not None:
            (tmp_path / "cpu" / f"cpu{core}" / "cpu_capacity").write_text(f"{capacity}\n")
    (tmp_path / "node").mkdir()
    monkeypatch.setattr(cores, "SYSTEM", tmp_path)
    monkeypatch.setattr(usable_cores_module, "CPUS", tmp_path / "cpu")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(len(capacities))))
    assert usable_cores_module.computing_cores() == computing
    assert EngineSettings().threads_used == len(computing)
    assert shares([1, 1]) == [tuple(computing[: len(computing) // 2]), tuple(computing[len(computing) // 2 :])]
    assert shares([len(capacities)]) == [tuple(range(len(capacities)))], "the user wants as many"
