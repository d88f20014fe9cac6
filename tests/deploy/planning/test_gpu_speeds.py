"""Estimates for GPUs without measurements."""

from __future__ import annotations

import pytest

from relayline.coordinator.planner.speed import roofline
from relayline.deploy.machine.gpus import Gpu
from relayline.deploy.manifest import parse_manifest
from relayline.deploy.planning import inputs
from relayline.deploy.planning.gpu_speeds import UNKNOWN, speed_of
from relayline.wire.common.units import GIB


@pytest.mark.parametrize(
    ("description", "gbytes_per_s"),
    [
        ("NVIDIA H200", 4_800),
        ("NVIDIA H100 PCIe", 2_000),
        ("NVIDIA H100 80GB HBM3", 3_350),
        ("NVIDIA L4", 300),
        ("NVIDIA L40S", 864),
        ("NVIDIA A100-SXM4-80GB", 1_555),
        ("NVIDIA GeForce RTX 4090", 1_008),
        ("NVIDIA GeForce RTX 4070 Ti", 504),
        ("AMD Radeon RX 7900 XTX (RADV NAVI31)", 960),
        ("Apple M2 Max", 400),
        ("Apple M2", 100),
    ],
)
def test_names_as_llama_cpp_lists_them(description: str, gbytes_per_s: int) -> None:
    speed = speed_of(description)
    assert speed is not None
    assert speed.bytes_per_s == pytest.approx(0.6 * gbytes_per_s * 1e9)


@pytest.mark.parametrize("description", ["", "llvmpipe", "NVIDIA GeForce GTX 1060", "Intel(R) Arc(TM) A770", "XM2"])
def test_others_are_unknown(description: str) -> None:
    assert speed_of(description) is None


def test_the_estimate_of_the_card_that_was_measured() -> None:
    """One H200, 8B Q4_0 (docs/results/gpu.md): 3.1 ms for one row, 13.3 ms for 64; right within a factor of two."""
    speed = speed_of("NVIDIA H200")
    assert speed is not None
    n_bytes, bytes_per_weight = 4.2e9, 4.5 / 8
    curve = roofline(speed.bytes_per_s, speed.flops, step_ns=speed.step_ns, bytes_per_weight=bytes_per_weight)
    steps_ms = {rows: (curve.step_ns + per_gib_ns * n_bytes / GIB) / 1e6 for rows, per_gib_ns in curve.layers}
    assert 3.1 / 2 < steps_ms[1] < 3.1 * 2
    assert 13.3 / 2 < steps_ms[64] < 13.3 * 2


def test_a_stage_on_this_machines_gpu_has_its_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    text = b"""
apiVersion: relayline.dev/v1alpha1
kind: Pipeline
metadata: {name: x}
spec:
  model: {path: m.gguf}
  stages:
  - {name: here, device: gpu}
  - {name: far, device: gpu, host: far}
"""
    monkeypatch.setattr(inputs, "known_gpus", lambda: (Gpu("CUDA0", "NVIDIA H200", 1),))
    here, far = parse_manifest(text, "x.yaml").stages
    assert inputs._like_here(here, 1) == speed_of("NVIDIA H200")
    assert inputs._like_here(far, 1) == UNKNOWN
    monkeypatch.setattr(inputs, "known_gpus", lambda: (Gpu("Vulkan0", "llvmpipe", 1),))
    assert inputs._like_here(here, 1) == UNKNOWN
