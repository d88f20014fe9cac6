"""A stage's memory by device, and the search for cuts where stages share a GPU. The devices are made up."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from relayline.coordinator.model.cuts import ranges
from relayline.coordinator.planner.costs import Costs
from relayline.coordinator.planner.instance import Gpu, Host, Instance, Load, Machine, ModelShape, Offload
from relayline.coordinator.planner.memory import GPU_RESERVE_BYTES_MIN, gpu_usable_bytes, stage_memory
from relayline.coordinator.planner.predict import predict
from relayline.coordinator.planner.search import Room, best_split, most_reaching
from relayline.coordinator.planner.speed import roofline
from relayline.coordinator.planner.whatif import explain
from relayline.wire.common.units import GIB, MIB
from tests.support.best_groupings import best_rate

N_LAYERS = 8
MODEL = ModelShape(
    layer_bytes=(GIB,) * N_LAYERS,
    head_bytes=300 * MIB,
    embedding_bytes=200 * MIB,
    kv_bytes=(4096,) * N_LAYERS,
    n_embd=4096,
    n_vocab=32_000,
    n_ff=11_008,
    state_bytes=(MIB,) * N_LAYERS,
)
LOAD = Load(ctx_tokens=1024, n_lanes=4, prefix_memory_bytes=64 * MIB)
CARD = Gpu("CUDA0 of box", 24 * GIB)
WHOLE = Offload(CARD)
EXPERTS = (900 * MIB,) * N_LAYERS


def test_a_stage_on_a_gpu_takes_its_weights_and_kv_from_there() -> None:
    """The parts in the host's memory: the embedding table, checkpoints, stored prefixes, the process."""
    plain, placed = stage_memory(MODEL, LOAD, 0, N_LAYERS), stage_memory(MODEL, LOAD, 0, N_LAYERS, WHOLE)
    assert plain.gpu is None
    assert placed.gpu is not None
    assert placed.gpu.weights_bytes == N_LAYERS * GIB + MODEL.head_bytes
    assert placed.weights_bytes == MODEL.embedding_bytes
    assert placed.gpu.kv_bytes + placed.kv_bytes == plain.kv_bytes
    without = dataclasses.replace(MODEL, state_bytes=())
    assert stage_memory(without, LOAD, 0, N_LAYERS, WHOLE).kv_bytes == 0, "only checkpoints of states are in the host's"
    assert placed.prefix_bytes == LOAD.prefix_memory_bytes
    assert placed.compute_bytes < plain.compute_bytes, "the host holds what passes through, and no graph"


@pytest.mark.parametrize(
    ("n_gpu_layers", "weights_bytes"),
    [(0, 0), (3, 3 * GIB), (8, 8 * GIB), (9, 8 * GIB + MODEL.head_bytes), (-1, 8 * GIB + MODEL.head_bytes)],
)
def test_the_last_layers_go_first_and_the_head_behind_all_of_them(n_gpu_layers: int, weights_bytes: int) -> None:
    offload = dataclasses.replace(WHOLE, gpu_layers=n_gpu_layers)
    memory = stage_memory(MODEL, LOAD, 0, N_LAYERS, offload)
    assert memory.gpu is not None
    assert memory.gpu.weights_bytes == weights_bytes
    all_weights = sum(MODEL.layer_bytes) + MODEL.head_bytes + MODEL.embedding_bytes
    assert memory.weights_bytes == all_weights - weights_bytes, "no byte is counted twice"
    middle = stage_memory(MODEL, LOAD, 2, 4, offload)
    assert middle.gpu is not None
    assert middle.gpu.weights_bytes == min(2, n_gpu_layers if n_gpu_layers >= 0 else 2) * GIB, "no head is there"


def test_experts_and_overrides_move_bytes_to_the_host() -> None:
    offload = dataclasses.replace(WHOLE, n_cpu_moe=2, expert_bytes=EXPERTS, kept_bytes=(0,) * 7 + (MIB,))
    for start, end, moved in ((0, 8, 1801), (4, 8, 1801), (2, 4, 1800), (7, 8, 901)):
        memory, before = stage_memory(MODEL, LOAD, start, end, offload), stage_memory(MODEL, LOAD, start, end, WHOLE)
        assert memory.gpu is not None
        assert before.gpu is not None
        assert before.gpu.weights_bytes - memory.gpu.weights_bytes == moved * MIB, "the first layers of the stage"
        assert memory.weights_bytes - before.weights_bytes == moved * MIB
        assert memory.compute_bytes > before.compute_bytes, "the processor computes as well"


def host(name: str, box: Machine, **more: object) -> Host:
    return Host(name, box, 4, roofline(50e9, 1e12), **more)  # type: ignore[arg-type]


def test_cuts_follow_the_memory_of_the_card_and_not_of_its_host() -> None:
    """A card for five layers in a host for one: five of eight go there, and the host does not have to hold them."""
    small, other = Machine("box", 8, 2 * GIB), Machine("other", 8, 64 * GIB)
    five = stage_memory(MODEL, LOAD, 0, 5, WHOLE).gpu
    assert five is not None
    card = Gpu("CUDA0 of box", five.total_bytes + GIB // 2 + GPU_RESERVE_BYTES_MIN)
    fast = dataclasses.replace(host("card", small), speed=roofline(2000e9, 50e12))
    instance = Instance(MODEL, (dataclasses.replace(fast, offload=Offload(card)), host("cpu", other)), LOAD)
    best = best_split(instance)
    assert best is not None
    assert best.edges == ((0, 5), (5, 8))
    stage = predict(instance, best.edges).stages[0]
    assert (stage.gpu, stage.gpu_limit_bytes) == ("CUDA0 of box", gpu_usable_bytes(card))
    assert stage.memory.total_bytes < GIB
    only = dataclasses.replace(instance, hosts=instance.hosts[:1])
    assert best_split(only) is None
    assert "CUDA0 of box needs" in explain(only).text, "the place that is short is named"


def test_two_stages_on_one_card_share_its_memory() -> None:
    box = Machine("box", 8, 64 * GIB)
    whole = stage_memory(MODEL, LOAD, 0, N_LAYERS, WHOLE).gpu
    assert whole is not None

    def fits(card_bytes: int) -> bool:
        card = Offload(Gpu("CUDA0 of box", card_bytes))
        hosts = tuple(host(name, box, device=0, offload=card) for name in "ab")
        return best_split(Instance(MODEL, hosts, LOAD)) is not None

    assert fits(2 * whole.total_bytes)
    assert not fits(int(0.9 * whole.total_bytes)), "neither half alone would be too large"


def test_a_limit_of_the_stage_is_of_its_card() -> None:
    box = Machine("box", 8, 64 * GIB)
    for limit_gib, expected in ((12, True), (4, False)):
        one = host("a", box, memory_bytes=limit_gib * GIB, offload=Offload(Gpu("GPU of box")))
        assert (best_split(Instance(MODEL, (one,), LOAD)) is not None) is expected


@pytest.mark.parametrize("devices", [(0, 0, -1), (-1, 0, 0), (0, -1, 0), (0, 1, 0), (0, 0, 0), (-1, -1, -1)])
def test_the_search_knows_that_stages_of_one_device_take_turns(devices: tuple[int, int, int]) -> None:
    """Against every cut, priced by itself: those on one device have its time together."""
    machines = [Machine(f"box{at}", 8) for at in range(3)]
    hosts = tuple(
        dataclasses.replace(host(f"s{at}", machine, device=device), speed=roofline((40 + 30 * at) * 1e9, 1e12))
        for at, (machine, device) in enumerate(zip(machines, devices, strict=True))
    )
    instance = Instance(MODEL, hosts, LOAD)
    costs = Costs(instance)
    best = most_reaching(costs, Room(instance))
    assert best is not None
    every = [ranges(N_LAYERS, cuts) for cuts in itertools.combinations(range(1, N_LAYERS), 2)]
    rates = {edges: best_rate(costs, edges, LOAD.streams) for edges in every}
    assert best.is_exact
    assert rates[best.edges] == pytest.approx(max(rates.values()))
    assert len(set(costs.devices)) == len({device if device >= 0 else at + 9 for at, device in enumerate(devices)})


def test_adapters_lie_where_their_layers_do() -> None:
    load = dataclasses.replace(LOAD, adapter_bytes=(MIB, 2 * MIB, 4 * MIB))
    for start, end, more in ((0, N_LAYERS, 7), (1, 2, 2), (3, N_LAYERS, 0)):
        before, after = stage_memory(MODEL, LOAD, start, end), stage_memory(MODEL, load, start, end)
        assert after.weights_bytes - before.weights_bytes == more * MIB
    before, after = (stage_memory(MODEL, each, 0, N_LAYERS, WHOLE) for each in (LOAD, load))
    assert before.gpu is not None
    assert after.gpu is not None
    assert after.gpu.weights_bytes - before.gpu.weights_bytes == 7 * MIB
    assert after.weights_bytes == before.weights_bytes
