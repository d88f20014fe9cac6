"""From a manifest's stages to the load of GPUs: the card, its layers, and tensors that stay on the host."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import pytest

from relayline.coordinator.planner.instance import Gpu, Offload
from relayline.deploy.manifest import Manifest, parse_manifest
from relayline.deploy.planning.offload import expert_bytes_of, offloads_of


class Tensor(NamedTuple):
    name: str
    size_bytes: int


class Card(NamedTuple):
    name: str
    memory_bytes: int
    bus_id: str = ""


TENSORS = [
    Tensor("token_embd.weight", 1000),
    *(
        Tensor(f"blk.{layer}.{name}.weight", size)
        for layer in range(3)
        for name, size in (("attn_q", 10), ("ffn_up_exps", 100 + layer), ("ffn_gate_inp", 1))
    ),
    Tensor("output.weight", 500),
]
CARDS = (Card("CUDA0", 24), Card("CUDA1", 16))


def offloads(*stages: dict[str, Any], gpus: tuple[Card, ...] = CARDS) -> list[Offload | None]:
    return offloads_of(manifest(*stages), TENSORS, 2, gpus)


def manifest(*stages: dict[str, Any]) -> Manifest:
    spec = {"model": {"path": "m.gguf"}, "stages": [{"name": f"s{at}", **each} for at, each in enumerate(stages)]}
    whole = {"apiVersion": "relayline.dev/v1alpha1", "kind": "Pipeline", "metadata": {"name": "x"}, "spec": spec}
    return parse_manifest(json.dumps(whole).encode(), "x.yaml")


def test_experts_are_counted_by_layer_without_a_prediction_layer() -> None:
    assert expert_bytes_of(TENSORS, 2) == (100, 101)
    assert expert_bytes_of(TENSORS[:1], 2) == ()


@pytest.mark.parametrize(
    ("stage", "expected"),
    [
        ({}, None),
        ({"device": "gpu"}, Offload(Gpu("CUDA0+CUDA1 of localhost", 40))),
        ({"device": "gpu", "gpuLayers": 0}, None),
        ({"device": "gpu", "gpuLayers": 3, "devices": "CUDA1"}, Offload(Gpu("CUDA1 of localhost", 16), 3)),
        ({"device": "gpu", "splitMode": "none", "mainGpu": 1}, Offload(Gpu("GPU 1 of localhost", 16))),
        ({"device": "gpu", "host": "far"}, Offload(Gpu("GPU of far"))),
        ({"device": "gpu", "devices": "CUDA7"}, None),
        (
            {"device": "gpu", "devices": "CUDA0", "cpuMoeLayers": 1},
            Offload(Gpu("CUDA0 of localhost", 24), n_cpu_moe=1, expert_bytes=(100, 101)),
        ),
        (
            {"device": "gpu", "devices": "CUDA0", "cpuMoeLayers": 2, "overrideTensor": r"blk\.0\.ffn.*=CPU,output=CPU"},
            Offload(Gpu("CUDA0 of localhost", 24), -1, 2, (0, 101), (101, 0), 500),
        ),
        ({"device": "gpu", "devices": "CUDA0", "overrideTensor": "exps=CUDA1"}, Offload(Gpu("CUDA0 of localhost", 24))),
    ],
)
def test_a_stage_reports_its_part_on_the_card(stage: dict[str, Any], expected: Offload | None) -> None:
    assert offloads(stage) == [expected]


def test_stages_on_one_card_share_its_memory() -> None:
    one, other, third = offloads(
        {"device": "gpu", "devices": "CUDA0"},
        {"device": "gpu", "devices": "CUDA0"},
        {"device": "gpu", "devices": "CUDA1"},
    )
    assert one is not None
    assert other is not None
    assert third is not None
    assert one.gpu == other.gpu != third.gpu


def test_a_gpu_without_its_own_memory_takes_the_hosts() -> None:
    assert offloads({"device": "gpu"}, gpus=()) == [None]


def test_a_card_that_two_backends_list_has_its_memory_once() -> None:
    twice = (
        Card("CUDA0", 24, "0000:c1:00.0"),
        Card("Vulkan0", 24, "0000:c1:00.0"),
        Card("Vulkan1", 16, "0000:c2:00.0"),
    )
    (all_of_them, second, named) = (
        offloads({"device": "gpu", **given}, gpus=twice)[0]
        for given in ({}, {"splitMode": "none", "mainGpu": 1}, {"devices": "Vulkan0"})
    )
    assert all_of_them == Offload(Gpu("CUDA0+Vulkan1 of localhost", 40))
    assert second == Offload(Gpu("GPU 1 of localhost", 16))
    assert named == Offload(Gpu("Vulkan0 of localhost", 24))
