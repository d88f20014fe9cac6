"""A stage's report of its computing device, and a manifest's plan for stages that share a device."""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path

import pytest

from relayline.coordinator.engine.descriptions import place_of as read_place
from relayline.deploy.manifest import Manifest
from relayline.deploy.manifest.load import parse_manifest
from relayline.deploy.planning.shared import gpu_numbers, gpu_sharing
from relayline.deploy.testing.engines import stage_config
from relayline.deploy.testing.tiny_slices import TinyShape, write_pipeline
from relayline.stage import assembly
from relayline.stage.engine import ggml, place
from relayline.stage.engine.ggml import Device
from relayline.wire.common.errors import NativeError, UsageError
from relayline.wire.settings.table import EngineSettings

FOUND = (Device("CUDA0", "H100", 1, 1), Device("CUDA1", "A2", 1, 2), Device("CPU", "EPYC", 0, 3))


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ggml, "list_devices", lambda: FOUND)
    monkeypatch.setattr(ggml, "bus_id", lambda device: {"CUDA0": "0000:c1:00.0"}.get(device.name, ""))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_a_stage_on_the_processor_tells_its_cores() -> None:
    reported = place.place_of(EngineSettings(n_threads=3))
    assert list(reported.cores) == sorted(os.sched_getaffinity(0))
    assert (reported.n_threads, list(reported.devices)) == (3, [])
    assert re.fullmatch("[0-9a-f]{16}", reported.host_id)
    assert reported.host_id == place.place_of(EngineSettings()).host_id


@pytest.mark.usefixtures("two_gpus")
def test_a_stage_on_gpus_tells_which() -> None:
    both = place.place_of(EngineSettings(gpu_layers=-1))
    assert [(each.id, each.name, each.description) for each in both.devices] == [
        ("0000:c1:00.0", "CUDA0", "H100"),
        ("CUDA1 A2", "CUDA1", "A2"),  # a backend that knows no bus
    ]
    one = place.place_of(EngineSettings(gpu_layers=-1, split_mode="none", main_gpu=1))
    assert [each.name for each in one.devices] == ["CUDA1"]
    named = place.place_of(EngineSettings(gpu_layers=4, devices="CUDA0"))
    assert [each.name for each in named.devices] == ["CUDA0"]
    assert not place.place_of(EngineSettings(gpu_layers=-1, devices="none")).devices
    assert not place.place_of(EngineSettings()).devices
    first, second, third = (read_place(each) for each in (both, one, named))
    assert (first.shares(second), first.shares(third), second.shares(third)) == (True, True, False)
    assert first.gpus["0000:c1:00.0"] == "CUDA0 (H100)"


@pytest.mark.usefixtures("two_gpus")
def test_parts_of_a_gpu_are_separate_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for part in ("MIG-1", "MIG-2", "0"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", part)
        found.append(place.place_of(EngineSettings(gpu_layers=-1)).devices[0].id)
    assert found == ["0000:c1:00.0 MIG-1", "0000:c1:00.0 MIG-2", "0000:c1:00.0"]


def test_a_host_without_a_boot_id_has_a_name_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(place, "BOOT_ID", tmp_path / "none")
    assert len(place.host_id()) == 16
    assert ggml.bus_id(ggml.list_devices()[0]) == ""  # this machine's own processor sits on no bus


# --- manifests --------------------------------------------------------------------------------------------------------


def manifest_of(*stages: str) -> Manifest:
    text = "apiVersion: relayline.dev/v1alpha1\nkind: Pipeline\nmetadata: {name: p}\nspec: {model: {path: m.gguf}, "
    return parse_manifest(f"{text}stages: [{', '.join(stages)}]}}\n".encode(), "text")


@pytest.mark.parametrize(
    ("stages", "numbers", "line"),
    [
        (("{name: a}", "{name: b}"), [-1, -1], ""),
        (("{name: a, device: gpu}", "{name: b}"), [-1, -1], ""),
        (("{name: a, device: gpu}", "{name: b, device: gpu}"), [0, 0], "stages a and b share all GPUs of localhost: "),
        (("{name: a, device: gpu}", "{name: b, device: gpu, host: box}"), [-1, -1], ""),
        (("{name: a, device: gpu, devices: CUDA0}", "{name: b, device: gpu, devices: CUDA1}"), [-1, -1], ""),
        (
            ("{name: a, device: gpu}", "{name: c, device: gpu, devices: CUDA1}"),
            [0, 0],
            "stages a and c share CUDA1 of localhost: they take turns",
        ),
        (
            ("{name: a, device: gpu, splitMode: none}", "{name: b, device: gpu, splitMode: none, mainGpu: 1}"),
            [-1, -1],
            "",
        ),
        (
            ("{name: a, device: gpu, devices: 'CUDA0,CUDA1', splitMode: none, mainGpu: 1}",
             "{name: b}", "{name: c, device: gpu, devices: CUDA1}"),
            [0, -1, 0],
            "stages a and c share CUDA1 of localhost",
        ),
    ],
)  # fmt: skip
def test_stages_of_a_manifest_that_share(stages: tuple[str, ...], numbers: list[int], line: str) -> None:
    manifest = manifest_of(*stages)
    assert gpu_numbers(manifest) == numbers
    lines = gpu_sharing(manifest)
    assert len(lines) == bool(line)
    assert all(each.startswith(line) for each in lines)


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize("gpu_layers", [0, -1])
def test_a_stage_that_leaves_a_gpu_idle_logs_it(
    gpu_layers: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def ended(*_: object) -> None:
        raise NativeError("nothing is loaded here")

    (artifact,) = write_pipeline(tmp_path, TinyShape(n_layers=2), [])
    monkeypatch.setattr(assembly.llama, "llama_supports_gpu_offload", lambda: True)
    monkeypatch.setattr(assembly, "NativeEngine", ended)
    with caplog.at_level(logging.WARNING, "relayline.stage"), pytest.raises(NativeError, match="nothing is loaded"):
        assembly.load_stage(stage_config(artifact, gpu_layers=gpu_layers, verify=False))
    lines = [record.getMessage() for record in caplog.records if record.name.startswith("relayline")]
    idle = "is not used; --gpu-layers -1 (in a manifest: device: gpu) puts all layers there"
    assert lines == ([] if gpu_layers else [f"{FOUND[0].text} {idle}"])


@pytest.mark.usefixtures("two_gpus")
def test_a_device_that_is_not_here_is_refused_before_a_large_file_is_verified(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(assembly, "verify_artifact", lambda *_: pytest.fail("it was read"))
    with pytest.raises(UsageError, match="--device CUDA7 is unknown here"):
        assembly.load_stage(stage_config(tmp_path / "stage-0.gguf", devices="CUDA7", verify=True))


def test_a_card_that_two_backends_list_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    buses = {"CUDA0": "0000:c1:00.0", "Vulkan0": "0000:c1:00.0", "Vulkan1": "0000:c2:00.0"}
    found = tuple(Device(name, "A2", 1, at) for at, name in enumerate((*buses, "SYCL0"), 1))
    monkeypatch.setattr(ggml, "list_devices", lambda: found)
    monkeypatch.setattr(ggml, "bus_id", lambda device: buses.get(device.name, ""))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    names = [each.name for each in place.place_of(EngineSettings(gpu_layers=-1)).devices]
    assert names == ["CUDA0", "Vulkan1", "SYCL0"], "and one whose place is not known is another"
    both = place.place_of(EngineSettings(gpu_layers=-1, devices="CUDA0,Vulkan0")).devices
    assert [each.name for each in both] == ["CUDA0"], "computed on by two names, but one card"
