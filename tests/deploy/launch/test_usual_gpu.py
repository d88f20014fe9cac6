"""A model without a manifest on a machine with GPUs: one stage there, with all layers or as many as fit."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from relayline.coordinator.model.inspection import inspect_model
from relayline.coordinator.planner.instance import Gpu as PlannedGpu
from relayline.coordinator.planner.instance import Offload
from relayline.coordinator.planner.memory import GPU_RESERVE_BYTES_MIN, stage_memory
from relayline.deploy.launch.gpus import layers_that_fit, offloaded, with_usual_gpu
from relayline.deploy.machine.gpus import Gpu, devices_here, gpu_backends, gpus_here
from relayline.deploy.manifest.smallest import StageFlags, smallest_manifest, with_stages
from relayline.deploy.planning.inputs import load_of
from relayline.deploy.planning.shapes import shape_of
from relayline.deploy.testing import paths
from relayline.wire.common.units import GIB, MIB

LARGE = Gpu("CUDA0", "NVIDIA H100", 80 * GIB)
OTHER = Gpu("CUDA1", "NVIDIA H100", 80 * GIB)
MODEL = paths.DEMO_MODEL


def flags_of(found: Sequence[Gpu], flags: StageFlags | None = None, **stages: Any) -> StageFlags:
    manifest = smallest_manifest(MODEL, **stages)
    return with_usual_gpu(manifest, flags or StageFlags(), lambda: found)


def test_a_model_goes_to_the_gpu_as_one_stage(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        flags = flags_of([LARGE])
    assert (flags.n_stages, flags.gpu_layers) == (1, -1)
    assert caplog.messages == ["all layers go to CUDA0 (NVIDIA H100); --gpu-layers 0 leaves them to the processor"]
    (stage,) = with_stages(smallest_manifest(MODEL), flags, 0).stages
    assert stage.gpu_layers_used == -1


@pytest.mark.parametrize(
    ("asked", "n_stages", "gpu_layers"),
    [
        (StageFlags(gpu_layers=0), None, 0),
        (StageFlags(gpu_layers=3), 1, 3),
        (StageFlags(n_stages=3), 3, -1),
        (StageFlags(cuts=(2,)), None, -1),
        (StageFlags(devices={"devices": "none"}), None, None),
        (StageFlags(devices={"devices": "CUDA1"}), 1, -1),
        (StageFlags(devices={"devices": "CUDA7"}), None, None),
        (StageFlags(devices={"n_cpu_moe": 4}), 1, -1),
    ],
)
def test_explicit_values_count(asked: StageFlags, n_stages: int | None, gpu_layers: int | None) -> None:
    flags = flags_of([LARGE, OTHER], asked)
    assert (flags.n_stages, flags.gpu_layers) == (n_stages, gpu_layers)
    assert dataclasses.replace(flags, n_stages=asked.n_stages, gpu_layers=asked.gpu_layers) == asked


def test_without_a_gpu_and_with_listed_stages_nothing_changes() -> None:
    assert flags_of([]) == StageFlags()
    manifest = with_stages(smallest_manifest(MODEL), StageFlags(n_stages=2), 0)
    assert with_usual_gpu(manifest, StageFlags(), lambda: [LARGE]) == StageFlags()
    assert with_usual_gpu(smallest_manifest(Path("none.gguf")), StageFlags(), lambda: [LARGE]) == StageFlags()


def test_as_many_layers_as_fit_go_to_a_small_gpu(caplog: pytest.LogCaptureFixture) -> None:
    """From one layer's bytes too little to one byte over: the last layers go first, the head with all of them."""
    model, load = shape_of(inspect_model(MODEL)), load_of(smallest_manifest(MODEL), "llama")
    n_layers = model.n_layers
    whole = stage_memory(model, load, 0, n_layers, Offload(PlannedGpu("CUDA0"))).gpu
    assert whole is not None
    need = whole.total_bytes

    def fitting(usable_bytes: int) -> int:
        return layers_that_fit([Gpu("CUDA0", "small", GPU_RESERVE_BYTES_MIN + usable_bytes)], model, load)

    assert fitting(need) == n_layers
    assert fitting(need - 1) == n_layers - 1
    counts = [fitting(need * tenths // 10) for tenths in range(11)]
    assert counts == sorted(counts)
    assert counts[0] == 0

    with caplog.at_level(logging.INFO):
        small = Gpu("CUDA0", "small", GPU_RESERVE_BYTES_MIN + need - 1)
        flags = offloaded(StageFlags(), [small], model, load)
        assert (flags.n_stages, flags.gpu_layers) == (1, n_layers - 1)
        assert f"{n_layers - 1} of {n_layers} layers, as many as fit," in caplog.text
        assert offloaded(StageFlags(n_stages=2), [small], model, load) == StageFlags(n_stages=2)
        assert "does not fit on CUDA0 (small)" in caplog.text


def test_memory_that_the_driver_keeps_is_not_planned_with() -> None:
    model, load = shape_of(inspect_model(MODEL)), load_of(smallest_manifest(MODEL), "llama")
    assert layers_that_fit([Gpu("CUDA0", "tiny", 512 * MIB)], model, load) == 0


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        (
            'print("ggml says hello\\n[[\\"CUDA0\\", \\"NVIDIA H100\\", true, false, 85899345920],'
            ' [\\"Metal\\", \\"M4\\", true, true, 0], [\\"CPU\\", \\"EPYC\\", false, false, 0]]")',
            (LARGE,),
        ),
        ("print('[]')", ()),
        ("raise SystemExit(3)", ()),
        ("pass", ()),
        ("print('[1, 2]')", ()),
    ],
)
def test_a_driver_that_fails_leaves_the_processor(
    program: str, expected: tuple[Gpu, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "libggml-cuda.so").touch()
    monkeypatch.setenv("LLAMA_CPP_LIB_PATH", str(tmp_path))
    assert gpus_here(lambda: devices_here(program)) == expected


def test_a_build_without_a_backend_starts_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("libggml.so", "libggml-base.so.0", "libggml-cpu-haswell.so", "libggml-blas.so"):
        (tmp_path / name).touch()
    monkeypatch.setenv("LLAMA_CPP_LIB_PATH", str(tmp_path))
    assert gpus_here(lambda: pytest.fail("it was asked")) == ()
    assert gpu_backends() == ()
    for name in ("libggml-vulkan.so", "libggml-vulkan.so.0", "libggml-cuda.so"):
        (tmp_path / name).touch()
    assert gpu_backends() == ("cuda", "vulkan")


def test_the_program_that_lists_devices_runs(caplog: pytest.LogCaptureFixture) -> None:
    """In any build: one without a backend has no GPU to list, but can be asked."""
    found = devices_here()
    assert found is not None
    assert "CPU" in {device.name for device in found}
    assert not caplog.records


def test_a_card_that_two_backends_list_counts_once(caplog: pytest.LogCaptureFixture) -> None:
    bus_id = "0000:c1:00.0"
    twice = [Gpu("CUDA0", "NVIDIA H100", 80 * GIB, bus_id), Gpu("Vulkan0", "NVIDIA H100", 80 * GIB, bus_id)]
    with caplog.at_level(logging.INFO):
        flags_of(twice)
        flags_of(twice, StageFlags(devices={"devices": "Vulkan0"}))
    first, second = caplog.messages
    assert first.startswith("all layers go to CUDA0 (NVIDIA H100);")
    assert second.startswith("all layers go to Vulkan0 (NVIDIA H100);"), "which the user names"
