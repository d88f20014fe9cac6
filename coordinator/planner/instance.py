"""The inputs of a plan: the model's sizes, the hosts in stage order, and the lanes and context they must hold. Pure
values.

Bytes are bytes, times are nanoseconds. Stages are in the order of the layers; a plan never reorders them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from relayline.coordinator.planner.speed import Speed
from relayline.coordinator.schedule.shared_devices import Place, device_numbers
from relayline.wire.envelopes.envelope import HEADER_BYTES
from relayline.wire.envelopes.frames import FRAME_BYTES

ELEMENT_BYTES = {"f16": 2, "f32": 4}  # of activations on the wire
# Bytes of one KV value by cache type; llama.cpp's quantised types store blocks of 32 values.
KV_VALUE_BYTES = {"f32": 4.0, "f16": 2.0, "q8_0": 34 / 32, "q5_1": 24 / 32, "q5_0": 22 / 32, "q4_1": 20 / 32,
                  "q4_0": 18 / 32}  # fmt: skip
LEAD_BYTES = 16  # tags and lengths of one envelope's rows
TOKEN_BYTES = 4  # of a token id, to stage 0 and back from the last stage


@dataclasses.dataclass(frozen=True, slots=True)
class Before:
    """Bytes of the placeholders that a stage has before its own layers: in the host's memory, and not computed."""

    weights_bytes: int = 0
    kv_bytes: int = 0
    """Per token with an f16 cache."""
    state_bytes: int = 0
    """Per lane."""


@dataclasses.dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes of a model. Per-layer tuples have one item per layer."""

    layer_bytes: tuple[int, ...]
    head_bytes: int
    """The last stage's weights besides its layers."""
    embedding_bytes: int
    """The token embedding table, held by the first stage."""
    kv_bytes: tuple[int, ...]
    """KV bytes per token and layer with an f16 cache; 0 where a layer does not attend."""
    n_embd: int
    n_vocab: int
    n_ff: int
    """Width of the widest row inside a layer: with it the compute buffers grow."""
    n_heads: int = 0
    """Attention heads of the layer that has most; 0 where the model does not say."""
    windows: tuple[bool, ...] = ()
    """Whether each layer has a sliding window; empty where none has."""
    window_tokens: int = 0
    """Tokens that a row of these layers reads, its own included."""
    n_masks: int = 1
    """Attention masks of a step: layers with and without sliding windows have one each."""
    has_indexers: bool = False
    """Layers score all cells for each row of a step, to choose the ones it attends to."""
    state_bytes: tuple[int, ...] = ()
    """Bytes per lane and layer of a recurrent state; empty where no layer has one."""
    rewinds_states: bool = False
    """Whether llama.cpp can keep earlier states too; see Load.rewind_rows."""
    row_widths: tuple[int, ...] = ()
    """Values of each row that enters a layer; empty where they are n_embd in all."""
    prediction_bytes: int = 0
    """Weights of the last stage's prediction layers; see Load.mtp_drafts."""
    prediction_kv_bytes: int = 0
    """Their KV bytes per token with an f16 cache."""
    bits_per_weight: float = 0.0
    """Of the layers on average; 0.0 if unknown."""
    ctx_train: int = 0
    """Tokens of the longest context that it was trained for; 0: not known."""
    before: Callable[[int, int], Before] = lambda _start, _end: Before()
    """What a stage with the layers from start to end (not included) holds in place of earlier layers."""
    is_allowed: Callable[[int, int], bool] = lambda _start, _end: True
    """Whether the layers from start to end (not included) may be one stage."""

    @property
    def n_layers(self) -> int:
        """Number of layers."""
        return len(self.layer_bytes)

    def row_width(self, layer: int) -> int:
        """Return how many values a row that enters a layer has."""
        return self.row_widths[layer] if self.row_widths else self.n_embd

    @property
    def widest_row(self) -> int:
        """Values of the widest row between two layers."""
        return max(self.row_widths, default=self.n_embd)


@dataclasses.dataclass(frozen=True, slots=True)
class Load:
    """The lanes and context that the pipeline must hold, and how it is driven."""

    ctx_tokens: int = 2_048
    """Tokens of one stream."""
    n_lanes: int = 32
    """Streams that may run at once; each reserves ctx_tokens cells of KV cache."""
    kv_type: str = "f16"
    """Element type of the KV cache; a key of KV_VALUE_BYTES."""
    kv_layout: str = "unified"
    """How lanes hold their KV cells: unified or per-lane."""
    window_cells: str = "auto"
    """What layers with a sliding window keep of a lane; one of WINDOW_CELLS."""
    wire_dtype: str = "f16"
    """Element type of activations between stages; a key of ELEMENT_BYTES."""
    max_rows: int = 512
    """Rows of one native step."""
    n_streams: int = 0
    """Streams that the split is optimised for; 0 means every lane."""
    rewind_rows: int = 0
    """Earlier recurrent states of each lane, for drafts."""
    mtp_drafts: int = 0
    """Tokens that the last stage guesses by its prediction layers; 0: it does not load them."""
    prefix_memory_bytes: int = 0
    """Memory of each stage for stored prefixes."""
    adapter_bytes: tuple[int, ...] = ()
    """Bytes of LoRA adapters by layer of the model; layers behind the last one have none."""

    @property
    def streams(self) -> int:
        """Streams that the split is optimised for."""
        return min(self.n_streams or self.n_lanes, self.n_lanes)


@dataclasses.dataclass(frozen=True, slots=True)
class Link:
    """The network from a stage to the next; from the last one, back to the coordinator."""

    round_trip_ns: int = 0
    bytes_per_s: float = 1.25e9

    def one_way_ns(self, size_bytes: float) -> int:
        """Return how long a message of this size is under way."""
        return self.round_trip_ns // 2 + self.transfer_ns(size_bytes)

    def transfer_ns(self, size_bytes: float) -> int:
        """Return how long the link is busy with a message of this size."""
        return round(size_bytes / self.bytes_per_s * 1e9)


@dataclasses.dataclass(frozen=True, slots=True)
class Machine:
    """A computer on which one or several stages run."""

    name: str
    cores: int
    memory_bytes: int | None = None
    """The memory that all its stages together may use; None if unknown."""
    reserved_bytes: int = 0
    """Other processes there: the coordinator, and a draft model's."""
    draft_bytes: int = 0
    """The draft model's part of these."""


@dataclasses.dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU with its own memory, or several over which stages are split."""

    name: str
    memory_bytes: int | None = None
    """Its memory; None if unknown."""
    draft_bytes: int = 0
    """What a draft model takes of it."""


@dataclasses.dataclass(frozen=True, slots=True)
class Offload:
    """The part of a stage that goes to a GPU, as llama.cpp shares it out. Per-layer tuples are of the whole model."""

    gpu: Gpu
    gpu_layers: int = -1
    """The stage's last layers that go there; -1 for all of them, and the head."""
    n_cpu_moe: int = 0
    """The experts of so many of the stage's first layers stay in the host's memory."""
    expert_bytes: tuple[int, ...] = ()
    """Weights of experts, without those in `kept_bytes`; empty where no layer has any."""
    kept_bytes: tuple[int, ...] = ()
    """Weights that --override-tensor keeps in the host's memory; empty for none."""
    kept_head_bytes: int = 0
    """And of the head."""

    def n_layers(self, start: int, end: int) -> int:
        """Return how many layers of a stage with the layers [start, end) go to the GPU."""
        return end - start if self.gpu_layers < 0 else min(self.gpu_layers, end - start)

    def takes_head(self, start: int, end: int) -> bool:
        """Whether the head of such a last stage goes there."""
        return self.gpu_layers < 0 or self.gpu_layers > end - start


@dataclasses.dataclass(frozen=True, slots=True)
class Host:
    """One stage's place."""

    name: str
    machine: Machine
    threads: int
    """Threads of a native step."""
    speed: Speed
    memory_bytes: int | None = None
    """A limit for this stage alone, of its GPU's memory where it has one; None for no limit but the machine's."""
    layers: tuple[int, int] | None = None
    """Its layers [start, end) when they are given; None when the planner decides."""
    link: Link = Link()
    device: int = -1
    """Stages of the same number, from 0 on, take turns: they compute on one device."""
    offload: Offload | None = None
    """The part on a GPU; None: it computes on the processor."""
    runs_ahead: bool = False
    """Whether it computes next rows before they are asked for, if it holds the whole model."""

    @property
    def cores_used(self) -> int:
        """Cores that a step keeps busy. Its speed is that of its threads, whether each has a core or not."""
        return min(self.threads, self.machine.cores)

    @property
    def is_on_gpu(self) -> bool:
        """Whether it computes on a GPU."""
        return self.offload is not None or self.device >= 0


@dataclasses.dataclass(frozen=True, slots=True)
class Instance:
    """A whole planning problem. Stages of one machine share its memory and its cores."""

    model: ModelShape
    hosts: tuple[Host, ...]
    load: Load = Load()
    entry: Link = Link()
    """From the coordinator to the first stage."""
    coordinator: Machine | None = None
    """Where the coordinator runs, if stages run there too: it shares their cores."""

    @property
    def crowded_machines(self) -> tuple[Machine, ...]:
        """Machines whose cores may be what limits: too few for all stages, or just enough and others compute too."""
        mine: dict[Machine, list[Host]] = {}
        for host in self.hosts:
            mine.setdefault(host.machine, []).append(host)
        return tuple(
            machine
            for machine, hosts in mine.items()
            if sum(host.cores_used for host in hosts) + (len(hosts) > 1 or machine == self.coordinator) > machine.cores
        )

    @property
    def devices(self) -> tuple[int, ...]:
        """A number for each stage, the same where stages take turns, as the coordinator will find when they run."""
        return tuple(device_numbers(self.places))

    @property
    def places(self) -> tuple[Place, ...]:
        """The place of each stage, as far as it is known before they run."""
        places = []
        for host in self.hosts:
            gpu = f"GPU {host.device}" if host.device >= 0 else f"GPU of {host.name}"
            if host.is_on_gpu:
                places.append(Place(gpu, {gpu: gpu}))
            else:
                places.append(Place(host.machine.name, {}, frozenset(range(host.machine.cores)), host.threads))
        return tuple(places)

    def link_bytes(self, rows: int, edges: Sequence[tuple[int, int]] = ()) -> tuple[int, ...]:
        """Return the bytes of a decode flight of `rows` rows: to stage 0, between neighbours, back.

        edges: layers of each stage; without them, as where rows are widest.
        """
        around = HEADER_BYTES + LEAD_BYTES + rows * FRAME_BYTES
        tokens = around + rows * TOKEN_BYTES
        row_bytes = rows * ELEMENT_BYTES[self.load.wire_dtype]
        widths = [self.model.row_width(start) for start, _ in edges[1:]]
        widths = widths or [self.model.widest_row] * (len(self.hosts) - 1)
        return (tokens, *(around + row_bytes * width for width in widths), tokens)

    @property
    def links(self) -> tuple[Link, ...]:
        """Coordinator to stage 0, between neighbours, last stage to coordinator."""
        return (self.entry, *(host.link for host in self.hosts))
