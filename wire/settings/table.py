"""The table of settings: everything a user can set about how a pipeline computes, serves and records.

To add one, write an entry here and use the field where it matters. Flag, variable, manifest key, JSON Schema, the flags
of child processes, a stage's order and the page of settings follow; run `make reference` for the files among them.
"""

from __future__ import annotations

import dataclasses
import os

from relayline.wire.common import bounds
from relayline.wire.common.kv_layout import KV_LAYOUTS, asked_layout, choose_layout
from relayline.wire.envelopes.envelope import DTYPE_BY_NAME
from relayline.wire.settings.device_texts import (
    DEVICES_MAX,
    SPLIT_MODES,
    read_devices,
    read_overrides,
    read_shares,
)
from relayline.wire.settings.setting import Reader, Settings, setting
from relayline.wire.telemetry.config import LEVEL_NAMES

LANES_MAX = 255  # llama.cpp is compiled for 256 sequences, and one is kept for padding rows
LAYERS_MAX = 100_000
THREADS_MAX = 1_024
POLICIES = ("auto", "drain", "single")
KV_TYPES = ("f32", "f16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0")
WIRE_DTYPES = tuple(DTYPE_BY_NAME)
DRAFT_AUTO = -1  # of ServingSettings.draft: as many as pays

assert LANES_MAX * bounds.CTX_TOKENS_MAX < 1 << 30  # llama.cpp counts the cells of a cache in 32 bits

STAGE, COORDINATOR = Reader.STAGE, Reader.COORDINATOR


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings(Settings):
    """The engine of one stage."""

    ctx_tokens: int = setting(
        2_048,
        "Tokens per stream, prompt and answer together.",
        low=8,
        high=bounds.CTX_TOKENS_MAX,
        flag="--ctx",
        place="context.tokens",
        reader=STAGE,
    )
    n_lanes: int = setting(
        32,
        "Streams that may run at once. Left out, fewer of a model whose every lane keeps a large recurrent state.",
        low=1,
        high=LANES_MAX,
        flag="--lanes",
        place="context.lanes",
        reader=STAGE,
    )
    n_threads: int = setting(
        0,
        "Threads of a native step. 0: the host's cores divided by the stages on it.",
        low=0,
        high=THREADS_MAX,
        flag="--threads",
        flag_doc="Threads of a native step. 0: all cores; `up` divides them among the stages.",
        place="stages[].threads",
        reader=STAGE,
        host_wins=True,
    )
    embeddings: bool = setting(
        False,
        "Whether a last stage on a GPU gives embeddings, which slows its steps. On a CPU it always does.",
        flag="--embeddings",
        flag_doc="Give embeddings on a GPU too, where this is the last stage: slower steps. A CPU always gives them.",
        place="stages[].embeddings",
        reader=STAGE,
    )
    gpu_layers: int = setting(
        0,
        "Layers on the GPU; -1 for all.",
        low=-1,
        high=LAYERS_MAX,
        flag="--gpu-layers",
        place="stages[].gpuLayers",
        reader=STAGE,
    )
    devices: str = setting(
        "",
        """
    Devices that the stage computes on, by the names that `relayline doctor` lists, with commas between; none: the
    processor alone; empty: all GPUs.""",
        form=read_devices,
        flag="--device",
        place="stages[].devices",
        reader=STAGE,
        host_wins=True,
    )
    split_mode: str = setting(
        "layer",
        """
    How the stage is split over its GPUs. layer: whole layers; row: the rows of weights; tensor: also attention and its
    cache; none: all on `mainGpu`.""",
        choices=SPLIT_MODES,
        flag="--split-mode",
        flag_doc="""
    How a stage is split over its GPUs. layer: whole layers; row: the rows of weights; tensor: also attention and its
    cache; none: all on --main-gpu.""",
        place="stages[].splitMode",
        reader=STAGE,
        host_wins=True,
    )
    tensor_split: str = setting(
        "",
        "Share of each GPU, with commas between, as 3,1; empty: by free memory.",
        form=read_shares,
        flag="--tensor-split",
        place="stages[].tensorSplit",
        reader=STAGE,
        host_wins=True,
    )
    main_gpu: int = setting(
        0,
        "The one GPU with split mode none, or the one for what is not split with row: its place among the stage's own.",
        low=0,
        high=DEVICES_MAX - 1,
        flag="--main-gpu",
        place="stages[].mainGpu",
        reader=STAGE,
        host_wins=True,
    )
    n_cpu_moe: int = setting(
        0,
        "Of so many of the stage's first layers the experts' weights stay in host memory.",
        low=0,
        high=LAYERS_MAX,
        flag="--n-cpu-moe",
        place="stages[].cpuMoeLayers",
        reader=STAGE,
        host_wins=True,
    )
    override_tensor: str = setting(
        "",
        """
    PATTERN=DEVICE, with commas between: weights whose name in the model the regular expression finds go to that device,
    such as ffn_.*_exps=CPU. The first pattern that fits counts.""",
        form=read_overrides,
        flag="--override-tensor",
        place="stages[].overrideTensor",
        reader=STAGE,
        host_wins=True,
    )
    policy: str = setting(
        "auto",
        "auto: groups and padding from the cost curves; drain: batch what is queued; single: no batching.",
        choices=POLICIES,
        flag="--policy",
        place="batching.policy",
        reader=STAGE | COORDINATOR,
    )
    max_rows: int = setting(
        512,
        "Rows of one native step.",
        low=1,
        high=bounds.ROWS_PER_ENVELOPE_MAX,
        flag="--max-rows",
        place="batching.maxRows",
        reader=STAGE,
    )
    prefill_rows: int = setting(
        128,
        "Prefill rows in a step with running decoders, with policy drain.",
        low=1,
        high=bounds.ROWS_PER_ENVELOPE_MAX,
        flag="--prefill-rows",
        place="batching.prefillRows",
        reader=STAGE,
    )
    kv_type: str = setting(
        "f16",
        "Element type of the KV cache.",
        choices=KV_TYPES,
        flag="--kv-type",
        place="context.kvType",
        reader=STAGE,
    )
    kv_layout: str = setting(
        "auto",
        """
    unified: lanes share all cells, and a step is one micro-batch; per-lane: each has its own, quicker on CPUs where
    streams grow long; auto: per-lane from 1,024 tokens on where a stage is on a CPU.""",
        choices=KV_LAYOUTS,
        flag="--kv-layout",
        place="context.kvLayout",
        reader=STAGE,
        unsaid="unified",
    )
    rewind_rows: int = setting(
        0,
        """
    Of a model with recurrent states: how many guessed tokens a lane can take back, so that drafts work; each takes one
    more state of every lane. 0: no drafts. Of some families llama.cpp cannot do it; `relayline inspect` tells.""",
        low=0,
        high=bounds.DRAFT_TOKENS_MAX,
        flag="--rewind-rows",
        place="context.rewindRows",
        reader=STAGE,
    )
    prefix_memory_bytes: int = setting(
        0,
        """
    Host memory of each stage for prefixes whose lane another stream took, for later prompts that begin alike; 0:
    none. Each prefix is copied between two steps.""",
        low=0,
        high=1 << 50,
        flag="--prefix-memory-bytes",
        place="context.prefixMemoryBytes",
        reader=STAGE,
    )
    prefix_disk_bytes: int = setting(
        0,
        """
    Disk of each stage for the same, in `prefixDiskDir`: it is written at the end of every answer, and survives a
    restart; 0: none.""",
        low=0,
        high=1 << 50,
        flag="--prefix-disk-bytes",
        flag_doc="Disk of each stage for the same, in --prefix-disk-dir: it survives a restart; 0: none.",
        place="context.prefixDiskBytes",
        reader=STAGE,
    )
    prefix_disk_dir: str = setting(
        "",
        """
    Directory of a host's disk in which its stages keep what lanes held; empty: relayline/prefixes in the user's
    cache.""",
        flag="--prefix-disk-dir",
        place="context.prefixDiskDir",
        reader=STAGE,
        host_wins=True,
    )
    device_sampling: str = setting(
        "auto",
        """
    on: the last stage finds the largest logit of each row where it computes, and copies only rows that need more than
    that; off: it copies every row; auto: on where that is a GPU. Needs unified KV cells.""",
        choices=("auto", "on", "off"),
        flag="--device-sampling",
        place="batching.deviceSampling",
        reader=STAGE,
    )
    calibrate: bool = setting(
        True,
        "Whether stages measure their cost curve at the first start.",
        flag="--no-calibrate",
        flag_doc="Learn the cost curve from real steps only.",
        place="batching.calibrate",
        reader=STAGE,
    )
    reflection: bool = setting(
        False,
        """
    Whether the gRPC ports of stages, and the port that they join at, tell tools such as grpcurl of their services and
    messages. It takes the credentials that the other calls of the port take.""",
        flag="--reflection",
        place="wire.reflection",
        reader=STAGE,
    )

    @property
    def layout_used(self) -> str:
        """The layout of KV cells after resolving auto."""
        return choose_layout(self.kv_layout, ctx_tokens=self.ctx_tokens, gpu_layers=self.gpu_layers)

    @property
    def threads_used(self) -> int:
        """Threads after resolving 0 to the cores this process may run on."""
        return self.n_threads or len(os.sched_getaffinity(0))

    def of_architecture(self, architecture: str) -> EngineSettings:
        """Return the same for a model of this architecture: where only one layout will do, auto means that."""
        return dataclasses.replace(self, kv_layout=asked_layout(self.kv_layout, architecture))

    def resolved(self) -> EngineSettings:
        """Return a copy with this process's own choices filled in: threads and layout of KV cells."""
        return dataclasses.replace(self, n_threads=self.threads_used, kv_layout=self.layout_used)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ServingSettings(Settings):
    """How a coordinator takes requests and fills its stages."""

    prefix_lanes: int | None = setting(
        None,
        """
    Lanes, of those that no stream has, that may keep what ended streams computed, for prompts that begin alike; left
    out: half of all lanes where they have KV cells of their own, else none. With 0 nothing is copied from running
    streams either.""",
        low=0,
        high=4_096,
        flag="--prefix-lanes",
        place="context.prefixLanes",
        reader=COORDINATOR,
    )
    wire: str = setting(
        "f16",
        "Element type of activations between stages.",
        choices=WIRE_DTYPES,
        flag="--wire",
        place="wire.dtype",
        reader=COORDINATOR,
    )
    prefill_chunk: int = setting(
        0,
        "Largest number of prompt rows per frame; 0: chosen.",
        low=0,
        high=bounds.ROWS_PER_FRAME_MAX,
        flag="--prefill-chunk",
        place="batching.prefillChunk",
        reader=COORDINATOR,
    )
    itl_stretch: float = setting(
        2.0,
        "How many times longer running streams may wait between tokens while prompts are read.",
        low=1,
        high=1_000,
        flag="--itl-stretch",
        place="batching.itlStretch",
        reader=COORDINATOR,
    )
    draft: int = setting(
        DRAFT_AUTO,
        """
    Draft tokens of a stream, looked up in its own text and verified in one step. auto: as many as pays;
    off: none; or at most this many, always.""",
        words={"auto": DRAFT_AUTO, "off": 0},
        low=1,
        high=bounds.DRAFT_TOKENS_MAX,
        flag="--draft",
        place="batching.draft",
        reader=COORDINATOR,
    )
    groups: int = setting(
        0,
        "Decode groups by hand; 0: chosen.",
        low=0,
        high=4_096,
        flag="--groups",
        place="batching.groups",
        reader=COORDINATOR,
    )
    group_rows: int = setting(
        0,
        "Rows per group by hand; 0: chosen.",
        low=0,
        high=bounds.ROWS_PER_ENVELOPE_MAX,
        flag="--group-rows",
        place="batching.groupRows",
        reader=COORDINATOR,
    )
    share: bool = setting(
        True,
        "Whether identical deterministic requests in flight are decoded once for all.",
        flag="--no-share",
        flag_doc="Never decode identical deterministic requests once for all.",
        place="batching.share",
        reader=COORDINATOR,
    )
    queue: int = setting(
        256,
        "Requests that may wait for a lane; one more is refused with 429.",
        low=0,
        high=100_000,
        flag="--queue",
        place="coordinator.queue",
        reader=COORDINATOR,
    )
    lost_wait_s: float = setting(
        15.0,
        "How long after the loss of a stage new requests wait for their first token; then they are refused with 503.",
        low=0,
        high=3_600,
        flag="--lost-wait",
        flag_doc="Seconds after the loss of a stage in which new requests wait for a first token; then they get 503.",
        place="coordinator.lostWaitSeconds",
        reader=COORDINATOR,
    )
    takeover_s: float = setting(
        60.0,
        """
    How long a stage may be away before a spare, or those with room, take over its layers; 0 for any time.""",
        low=0,
        high=86_400,
        flag="--takeover",
        flag_doc="Seconds a stage may be away before a spare, or those with room, take over its layers; 0: any time.",
        place="coordinator.takeoverSeconds",
        reader=COORDINATOR,
    )
    rebalance: str = setting(
        "tell",
        """
    When another cut has been clearly faster for a minute: tell reports it; auto moves the layers while serving.""",
        choices=("tell", "auto"),
        flag="--rebalance",
        place="coordinator.rebalance",
        reader=COORDINATOR,
    )
    rebalance_every_s: float = setting(
        600.0,
        "With rebalance auto: seconds between two moves, at least; one that takes layers back waits longer.",
        low=60,
        high=86_400,
        flag="--rebalance-every",
        place="coordinator.rebalanceEverySeconds",
        reader=COORDINATOR,
    )
    model_id: str = setting(
        "",
        "Model name in the API; empty for the model's own.",
        flag="--model-id",
        place="coordinator.modelId",
        reader=COORDINATOR,
    )
    served_model_name: str = setting(
        "",
        "Further names of the model in the API, with commas between them; answers carry the name that was asked for.",
        flag="--served-model-name",
        place="coordinator.servedModelName",
        reader=COORDINATOR,
    )
    any_model_name: bool = setting(
        False,
        "Whether requests may name any model; answers carry the name that was asked for.",
        flag="--any-model-name",
        flag_doc="Take any model name in requests; answers carry the name that was asked for.",
        place="coordinator.anyModelName",
        reader=COORDINATOR,
    )
    mmproj: str = setting(
        "",
        """
    Projector of the model, a GGUF file of its maker beside the model: chats may hold images then, which the
    coordinator's host encodes; for `up` also auto: the model's repository's, or the one beside it; empty: none.""",
        flag="--mmproj",
        place="coordinator.mmproj",
        reader=COORDINATOR,
    )
    pooling: str = setting(
        "auto",
        "How a prompt's hidden rows become one embedding: mean, last, cls; auto: as the model says, else last.",
        choices=("auto", "mean", "last", "cls"),
        flag="--pooling",
        place="coordinator.pooling",
        reader=COORDINATOR,
    )
    cors: str = setting(
        "",
        "Origins, with commas between, whose web pages may read the API, such as http://localhost:3000; * for all.",
        flag="--cors",
        place="coordinator.http.cors",
        reader=COORDINATOR,
    )
    connections_per_address: int = setting(
        512,
        "Connections from one address beyond this machine, such as a proxy's; 0 for any number.",
        low=0,
        high=1_000_000,
        flag="--connections-per-address",
        place="coordinator.http.connectionsPerAddress",
        reader=COORDINATOR,
    )
    protect_metrics: bool = setting(
        False,
        "Whether /metrics demands an API key too.",
        flag="--protect-metrics",
        flag_doc="Demand an API key for /metrics too.",
        place="coordinator.protectMetrics",
        reader=COORDINATOR,
    )
    jaeger_url: str = setting(
        "",
        "Where people look at traces, as http://HOST:16686; the page at / links requests to it.",
        flag="--jaeger-url",
        place="telemetry.jaegerUrl",
        reader=COORDINATOR,
    )
    strict_max_tokens: bool = setting(
        False,
        "Whether a max_tokens beyond the context's room is refused with 400. Else the answer gets the room there is.",
        flag="--strict-max-tokens",
        flag_doc="Refuse a max_tokens beyond the context's room with 400. Else the answer gets the room there is.",
        place="coordinator.http.strictMaxTokens",
        reader=COORDINATOR,
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TelemetrySettings(Settings):
    """How much is recorded about requests and batches."""

    level: str = setting(
        "summary",
        "off; summary: per request; batches: also every native step; frames: also every frame.",
        choices=LEVEL_NAMES,
        flag="--trace-level",
        place="telemetry.level",
        reader=STAGE | COORDINATOR,
    )
    otlp_endpoint: str = setting(
        "",
        "OTLP collector, http(s)://host:port. Empty: the OTEL_* variables of each process decide.",
        flag="--otlp-endpoint",
        place="telemetry.otlpEndpoint",
        reader=STAGE | COORDINATOR,
    )
    sampler_ratio: float = setting(
        1.0,
        "Part of the requests that are traced.",
        low=0,
        high=1,
        flag="--trace-sample",
        flag_doc="Part of the requests that are traced; the coordinator decides, stages follow.",
        place="telemetry.samplerRatio",
        reader=STAGE | COORDINATOR,
    )
    content: bool = setting(
        False,
        "Whether prompts and answers are recorded too. They may hold personal data.",
        flag="--trace-content",
        place="telemetry.content",
        reader=COORDINATOR,
    )


# The settings of a stage's devices, besides `gpu_layers`.
DEVICE_SETTINGS = ("devices", "split_mode", "tensor_split", "main_gpu", "n_cpu_moe", "override_tensor")

TABLES = (EngineSettings, ServingSettings, TelemetrySettings)
