"""The draft model of a launch: found, checked before the split, and rendered."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from relayline.coordinator.model.inspection import inspect_model
from relayline.coordinator.model.split import split_model
from relayline.coordinator.planner import instance
from relayline.coordinator.planner.instance import Offload
from relayline.coordinator.planner.memory import COORDINATOR_BYTES, HEADROOM, gpu_usable_bytes, stage_memory
from relayline.coordinator.planner.whatif import explain
from relayline.deploy.cli.options import check_draft
from relayline.deploy.doctor.files import look_draft_model
from relayline.deploy.doctor.plan import needed_memory_bytes
from relayline.deploy.launch.checks import check_before_work
from relayline.deploy.launch.companions import check_companions, with_companions
from relayline.deploy.launch.draft_model import check_draft_memory, served_draft_model
from relayline.deploy.launch.prepare import override
from relayline.deploy.machine.gpus import Gpu
from relayline.deploy.manifest import Manifest
from relayline.deploy.manifest.dump import dump_manifest
from relayline.deploy.manifest.load import load_manifest
from relayline.deploy.manifest.smallest import smallest_manifest
from relayline.deploy.planning.drafting import beside_draft, draft_memory
from relayline.deploy.planning.inputs import LOOPBACK, best_for, instance_of
from relayline.deploy.render.inside import _contained_draft_model
from relayline.wire.common.errors import ModelFileError, StartError, UsageError
from relayline.wire.common.units import GIB
from relayline.wire.settings.table import ServingSettings
from tests.support.tiny_models import make_tiny


def manifest_with(model: Path, draft_model: str) -> Manifest:
    return override(smallest_manifest(model), {"coordinator.draftModel": draft_model, "coordinator.http.port": 0})


@pytest.fixture(name="model")
def model_fixture(tmp_path: Path) -> Path:
    return make_tiny("llama", tmp_path / "model.gguf", tokenizer=True)


def test_its_path_means_the_same_to_every_process(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = make_tiny("llama", tmp_path / "here" / "small.gguf", tokenizer=True, n_layers=1)
    monkeypatch.chdir(tmp_path / "here")
    found = with_companions(manifest_with(model, "small.gguf"), "")
    assert found.serving.draft_model == str(small)
    check_companions(found, model)
    assert served_draft_model(ServingSettings(draft_model="small.gguf"), model).draft_model == str(small)


def test_a_manifest_names_it_beside_itself_or_on_the_hub(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "there" / "pipeline.yaml"
    path.parent.mkdir()
    for written, read in (("small.gguf", str(path.parent / "small.gguf")), ("hf://a/b/c.gguf", "hf://a/b/c.gguf")):
        path.write_text(dump_manifest(manifest_with(model, written)))
        assert load_manifest(path).serving.draft_model == read


def test_a_missing_one_is_refused_before_anything_else(model: Path) -> None:
    with pytest.raises(UsageError, match=r"nope.gguf: no such file"):
        check_before_work(manifest_with(model, "nope.gguf"))


@pytest.mark.parametrize(
    ("family", "more", "line"),
    [
        ("mamba", {"tokenizer": True}, "recurrent states"),
        ("llama", {"vocab": 64}, "same vocabulary"),
        ("", {}, "not a GGUF file"),
    ],
)
def test_one_that_cannot_draft_is_refused_before_the_split(
    model: Path, tmp_path: Path, family: str, more: dict[str, int], line: str
) -> None:
    other = tmp_path / "other.gguf"
    if family:
        make_tiny(family, other, **more)  # type: ignore[arg-type]
    else:
        other.write_text("# not a model")
    with pytest.raises((UsageError, ModelFileError), match=rf"^--draft-model: .*other\.gguf: .*{line}"):
        check_companions(manifest_with(model, str(other)), model)


@pytest.mark.parametrize(
    ("name", "line"),
    [("tokenizer.gguf", "tensor token_embd.weight is missing"), ("stage-0.gguf", "is already one stage of a split")],
)
def test_a_part_of_a_split_cannot_draft_though_its_vocabulary_fits(
    model: Path, tmp_path: Path, name: str, line: str
) -> None:
    split_model(model, tmp_path / "split", cuts=(1,))
    with pytest.raises(ModelFileError, match=rf"^--draft-model: .*{name}: {line}"):
        check_companions(manifest_with(model, str(tmp_path / "split" / name)), model)


@pytest.mark.parametrize(
    ("more", "policy"), [({"draft": 0}, "auto"), ({"grant_steps": 2}, "auto"), ({}, "drain")], ids=str
)
def test_it_needs_drafts(more: dict[str, int], policy: str) -> None:
    with pytest.raises(UsageError, match="--draft-model needs drafts"):
        check_draft(ServingSettings(draft_model="a.gguf", **more), policy)  # type: ignore[arg-type]
    check_draft(ServingSettings(draft_model="a.gguf"), "auto")


# --- its memory -------------------------------------------------------------------------------------------------------


@pytest.fixture(name="small")
def small_fixture(tmp_path: Path) -> Path:
    return make_tiny("llama", tmp_path / "small.gguf", tokenizer=True, n_layers=1)


def test_it_is_counted_like_a_stage_of_the_whole_model(small: Path) -> None:
    few, many = (
        draft_memory(ServingSettings(draft_model=str(small), draft_ctx_tokens=n), gpus=lambda: ())
        for n in (1_024, 9_216)
    )
    facts = inspect_model(small)
    assert few is not None
    assert many is not None
    assert few.weights_bytes == sum(facts.layer_bytes) + facts.head_bytes + facts.embedding_bytes
    assert many.kv_bytes - few.kv_bytes == 8_192 * sum(facts.kv_bytes_per_token)
    assert few.gpu is None
    on_gpu = draft_memory(
        ServingSettings(draft_model=str(small), draft_gpu_layers=-1), gpus=lambda: (Gpu("CUDA0", "", 8 * GIB),)
    )
    assert on_gpu is not None
    assert on_gpu.gpu is not None
    assert on_gpu.gpu.kv_bytes > 0
    assert on_gpu.kv_bytes == 0, "the cells are on the GPU"


@pytest.mark.parametrize("given", ["", "hf://a/b/c.gguf", "nope.gguf"])
def test_one_that_is_not_here_is_not_counted(given: str) -> None:
    assert draft_memory(ServingSettings(draft_model=given)) is None


def test_a_plan_leaves_room_for_it_and_doctor_adds_it(model: Path, small: Path) -> None:
    without, beside = manifest_with(model, ""), manifest_with(model, str(small))
    memory = draft_memory(beside.serving)
    assert memory is not None
    reserved = [instance_of(each, inspect_model(model)).hosts[0].machine.reserved_bytes for each in (without, beside)]
    assert reserved[1] - reserved[0] == memory.total_bytes
    needed = [needed_memory_bytes(each) for each in (without, beside)]
    assert None not in needed
    assert needed[1] - needed[0] == memory.total_bytes  # type: ignore[operator]


@pytest.mark.parametrize(("host", "is_here"), [("127.0.0.1", True), ("10.255.0.9", True), ("10.255.0.1", False)])
def test_it_counts_wherever_the_coordinator_is_on_this_machine(
    model: Path, small: Path, monkeypatch: pytest.MonkeyPatch, host: str, is_here: bool
) -> None:
    """Where other hosts join, the coordinator's host is the address at which they reach this machine."""
    monkeypatch.setattr("relayline.deploy.planning.drafting.is_this_machine", lambda host: host == "10.255.0.9")
    manifest = override(manifest_with(model, str(small)), {"coordinator.host": host})
    planned, memory = instance_of(manifest, inspect_model(model)), draft_memory(manifest.serving)
    assert memory is not None
    expected = (COORDINATOR_BYTES + memory.total_bytes, memory.total_bytes) if is_here else (0, 0)
    machine = planned.hosts[0].machine
    assert (machine.reserved_bytes, machine.draft_bytes) == expected
    assert planned.coordinator == (machine if is_here else None)
    assert (planned.entry == LOOPBACK) == is_here
    alone = override(manifest, {"coordinator.host": "10.255.0.1"})
    needed, without = needed_memory_bytes(manifest), needed_memory_bytes(alone)
    assert needed is not None
    assert without is not None
    assert needed - without == expected[0]


def test_it_takes_its_share_of_the_gpus_that_stages_use(small: Path) -> None:
    gpus = (Gpu("CUDA0", "", 6 * GIB), Gpu("CUDA1", "", 2 * GIB))
    memory = draft_memory(ServingSettings(draft_model=str(small), draft_gpu_layers=-1), gpus=lambda: gpus)
    assert memory is not None
    assert memory.gpu is not None
    there = instance.Gpu("CUDA0 of localhost", 6 * GIB)
    found, elsewhere, none = beside_draft(
        [Offload(there), Offload(instance.Gpu("GPU of b")), None], memory, gpus=lambda: gpus
    )
    assert found is not None
    assert found.gpu.draft_bytes == memory.gpu.total_bytes * 3 // 4
    assert gpu_usable_bytes(there) - gpu_usable_bytes(found.gpu) == found.gpu.draft_bytes  # type: ignore[operator]
    assert elsewhere == Offload(instance.Gpu("GPU of b"))
    assert none is None
    on_cores = draft_memory(ServingSettings(draft_model=str(small), draft_gpu_layers=0), gpus=lambda: gpus)
    for takes_none in (None, on_cores):
        assert beside_draft([Offload(there), None], takes_none, gpus=lambda: gpus) == [Offload(there), None]


def test_a_model_that_fits_without_it_alone_says_so(model: Path, small: Path) -> None:
    planned = instance_of(manifest_with(model, str(small)), inspect_model(model))
    machine = planned.hosts[0].machine
    free = machine.reserved_bytes - machine.draft_bytes  # what else is there: all of the rest is what the stages need
    stages = [stage_memory(planned.model, planned.load, *edge) for edge in best_for(planned).edges]
    most = int((free + sum(stage.total_bytes for stage in stages)) / (1 - HEADROOM)) + GIB // 64
    tight = dataclasses.replace(machine, memory_bytes=most)
    hosts = tuple(dataclasses.replace(host, machine=tight) for host in planned.hosts)
    found = explain(dataclasses.replace(planned, hosts=hosts))
    assert "no draft model" in found.remedies
    assert " of the draft model: " in found.text


def test_a_machine_without_room_for_it_is_refused_before_the_split(small: Path) -> None:
    serving = ServingSettings(draft_model=str(small), draft_ctx_tokens=4_096)
    check_draft_memory(serving, None)
    check_draft_memory(serving, GIB)
    with pytest.raises(
        StartError, match=r"^--draft-model: .*small.gguf needs 0\.\d\d GiB .* 0\.00 free; .*--draft-ctx"
    ):  # others may free theirs: a supervisor tries again
        check_draft_memory(serving, 1 << 20)


def test_nor_are_gpus_that_are_too_small_for_it_whatever_stages_use(small: Path) -> None:
    serving = ServingSettings(draft_model=str(small), draft_gpu_layers=-1)
    check_draft_memory(serving, GIB, lambda: (Gpu("CUDA0", "", GIB), Gpu("CUDA1", "", 1 << 20)))
    with pytest.raises(UsageError, match=r"needs 0\.\d\d GiB of this machine's GPUs, which have 0\.00; .*--draft-ctx"):
        check_draft_memory(serving, GIB, lambda: (Gpu("CUDA0", "", 1 << 20),))
    with pytest.raises(StartError) as refused:
        check_draft_memory(serving, 1 << 20, lambda: (Gpu("CUDA0", "", GIB),))
    assert str(refused.value).endswith(" free"), "all of its cells are on the GPU, so fewer take no less here"


def test_doctor_looks_at_it(model: Path, small: Path, tmp_path: Path) -> None:
    assert look_draft_model(manifest_with(model, "")) == []
    found = [look_draft_model(manifest_with(model, str(path)))[0] for path in (small, tmp_path / "nope.gguf")]
    assert [each.outcome.value for each in found] == ["ok", "failure"]
    assert "GiB, for 16,384 tokens" in found[0].found
    assert "not counted" in look_draft_model(manifest_with(model, "hf://a/b/c.gguf"))[0].found
    other = make_tiny("llama", tmp_path / "other.gguf", vocab=64)
    assert "same vocabulary" in look_draft_model(manifest_with(model, str(other)))[0].found


@pytest.mark.parametrize(
    ("given", "inside"), [("", ""), ("/here/a.gguf", "/models/a.gguf"), ("hf://a/b/c.gguf", "hf://a/b/c.gguf")]
)
def test_a_container_reads_it_next_to_the_model(given: str, inside: str) -> None:
    assert _contained_draft_model(given) == inside
