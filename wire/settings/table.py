"""The table of settings: everything a user can set about how a pipeline computes, serves and records.

To add one, write an entry here and use the field where it matters. Flag, variable, manifest key, JSON Schema, the flags
of child processes, a stage's order and the page of settings follow; run `make reference` for the files among them.
"""

from __future__ import annotations

import dataclasses

from relayline.wire.common import bounds
from relayline.wire.common.kv_layout import KV_LAYOUTS, WINDOW_CELLS, asked_layout, choose_layout
from relayline.wire.common.thoughts import read_last_words
from relayline.wire.common.usable_cores import computing_cores
from relayline.wire.envelopes.dtypes import DTYPE_BY_NAME
from relayline.wire.model_files.adapter_texts import read_adapters
from relayline.wire.settings.device_texts import (
    DEVICES_MAX,
    SPLIT_MODES,
    read_devices,
    read_overrides,
    read_shares,
)
from relayline.wire.settings.media_hosts import read_media_hosts
from relayline.wire.settings.page_url import read_page_url
from relayline.wire.settings.setting import Reader, Settings, setting
from relayline.wire.telemetry.config import LEVEL_NAMES

LANES_MAX = 255  # llama.cpp is compiled for 256 sequences, and one is kept for padding rows
LAYERS_MAX = 100_000
THREADS_MAX = 1_024
POLICIES = ("auto", "drain", "single")
KV_TYPES = ("f32", "f16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0")
WIRE_DTYPES = tuple(DTYPE_BY_NAME)
PREFIX_MEMORY_AUTO = -1  # of EngineSettings.prefix_memory_bytes: as much as the host can spare
DRAFT_AUTO = -1  # of ServingSettings.draft: as many as pays, but none with grants

assert LANES_MAX * bounds.CTX_TOKENS_MAX < 1 << 30  # llama.cpp counts the cells of a cache in 32 bits

STAGE, COORDINATOR = Reader.STAGE, Reader.COORDINATOR


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings(Settings):
    """The engine of one stage."""

    ctx_tokens: int = setting(
        2_048,
        """
    Tokens per stream, prompt and answer together. Where it is not set, `up` chooses at most 32,768: as many as the
    model was trained for and half of the free memory allows.""",
        low=8,
        high=bounds.CTX_TOKENS_MAX,
        flag="--ctx",
        place="context.tokens",
        reader=STAGE,
    )
    n_lanes: int = setting(
        32,
        """
    Streams that may run at once. The default is lower for models with a large recurrent state per lane, and where `up`
    finds no memory for 8,192 tokens in each of 32 lanes.""",
        low=1,
        high=LANES_MAX,
        flag="--lanes",
        place="context.lanes",
        reader=STAGE,
    )
    n_threads: int = setting(
        0,
        "Threads of a native step. 0: the host's cores without much slower ones, divided by the number of its stages.",
        low=0,
        high=THREADS_MAX,
        flag="--threads",
        flag_doc="Threads of a native step. 0: all cores but much slower ones; `up` divides them among the stages.",
        place="stages[].threads",
        reader=STAGE,
        host_wins=True,
    )
    embeddings: bool = setting(
        False,
        "Whether the last stage gives embeddings when it is on a GPU, which slows its steps. On a CPU it always does.",
        flag="--embeddings",
        flag_doc="Give embeddings on a GPU too, if this is the last stage: slower steps. A CPU always gives them.",
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
    Devices of the stage, separated by commas. `relayline doctor` lists their names. none: only the processor; empty:
    all GPUs.""",
        form=read_devices,
        flag="--device",
        place="stages[].devices",
        reader=STAGE,
        host_wins=True,
    )
    split_mode: str = setting(
        "layer",
        """
    How the stage is split over its GPUs. layer: by layers; row: the weights by rows; tensor: also attention and its
    cache; none: all on `mainGpu`.""",
        choices=SPLIT_MODES,
        flag="--split-mode",
        flag_doc="""
    How a stage is split over its GPUs. layer: by layers; row: the weights by rows; tensor: also attention and its
    cache; none: all on --main-gpu.""",
        place="stages[].splitMode",
        reader=STAGE,
        host_wins=True,
    )
    tensor_split: str = setting(
        "",
        "Share of each GPU, separated by commas, such as 3,1; empty: by free memory.",
        form=read_shares,
        flag="--tensor-split",
        place="stages[].tensorSplit",
        reader=STAGE,
        host_wins=True,
    )
    main_gpu: int = setting(
        0,
        "With split mode none the GPU to use, with row the GPU for everything else: its index among the stage's GPUs.",
        low=0,
        high=DEVICES_MAX - 1,
        flag="--main-gpu",
        place="stages[].mainGpu",
        reader=STAGE,
        host_wins=True,
    )
    n_cpu_moe: int = setting(
        0,
        "How many of the stage's first layers keep their experts' weights in host memory.",
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
    PATTERN=DEVICE, separated by commas: weights whose name matches the regular expression go to that device, such as
    ffn_.*_exps=CPU. The first pattern that matches counts.""",
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
        "Most rows of one native step.",
        low=1,
        high=bounds.ROWS_PER_ENVELOPE_MAX,
        flag="--max-rows",
        place="batching.maxRows",
        reader=STAGE,
    )
    prefill_rows: int = setting(
        128,
        "Most prefill rows in a step with decode rows, with policy drain.",
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
    unified: lanes share all cells, and a step is one micro-batch. per-lane: each lane has its own cells, which is
    faster on CPUs for long streams. auto: what the model needs, otherwise per-lane on a CPU for contexts from 1,024
    tokens on, and unified elsewhere.""",
        choices=KV_LAYOUTS,
        flag="--kv-layout",
        place="context.kvLayout",
        reader=STAGE,
        if_unknown="unified",
    )
    window_cells: str = setting(
        "auto",
        """
    What layers with a sliding window keep of a lane. window: the KV cells that its next rows read. all: every cell, so
    that a prefix of any length can be used again. auto: window where that saves half of these cells or more.""",
        choices=WINDOW_CELLS,
        flag="--window-cells",
        place="context.windowCells",
        reader=STAGE,
    )
    rewind_rows: int = setting(
        0,
        """
    Models with recurrent states only: how many draft tokens a lane can take back. Each costs every lane the memory of
    one more state. 0: no drafts. llama.cpp cannot do it for some families; see `relayline inspect`.""",
        low=0,
        high=bounds.DRAFT_TOKENS_MAX,
        flag="--rewind-rows",
        place="context.rewindRows",
        reader=STAGE,
    )
    mtp_drafts: int = setting(
        0,
        """
    Models with prediction layers (MTP, "nextn") only: how many tokens the last stage guesses behind each one by
    these layers, while few streams decode. They take memory there. 0: none. Models with recurrent states need
    --rewind-rows N too. See `relayline inspect`.""",
        low=0,
        high=bounds.DRAFT_TOKENS_MAX,
        flag="--mtp-drafts",
        place="batching.mtpDrafts",
        reader=STAGE,
    )
    prefix_memory_bytes: int = setting(
        PREFIX_MEMORY_AUTO,
        """
    Host memory of each stage for the prefix cache. It holds prefixes whose lane another stream has taken; each is
    copied between two steps. auto: up to 8 GiB while the host has memory to spare, for prefixes that take long to
    read. 0: none.""",
        words={"auto": PREFIX_MEMORY_AUTO},
        low=0,
        high=1 << 50,
        flag="--prefix-memory-bytes",
        place="context.prefixMemoryBytes",
        reader=STAGE,
    )
    prefix_disk_bytes: int = setting(
        0,
        """
    Disk space of each stage for the prefix cache, in `prefixDiskDir`. It is written at the end of every answer and
    survives a restart. 0: none.""",
        low=0,
        high=1 << 50,
        flag="--prefix-disk-bytes",
        flag_doc="Disk space of each stage for the prefix cache, in --prefix-disk-dir. It survives a restart. 0: none.",
        place="context.prefixDiskBytes",
        reader=STAGE,
    )
    prefix_disk_dir: str = setting(
        "",
        """
    Directory for the prefix cache of a host's stages; empty: relayline/prefixes in the user's cache.""",
        flag="--prefix-disk-dir",
        place="context.prefixDiskDir",
        reader=STAGE,
        host_wins=True,
    )
    device_sampling: str = setting(
        "auto",
        """
    on: the last stage finds the largest logit of each row on its device, and copies only the rows that need more.
    all: and of drawn rows only what a draw looks at. off: it copies every row. auto: on for a GPU. Needs unified KV
    cells.""",
        choices=("auto", "on", "all", "off"),
        flag="--device-sampling",
        place="batching.deviceSampling",
        reader=STAGE,
    )
    run_ahead: str = setting(
        "auto",
        """
    on: where one stage is the whole model, it computes a stream's next row before the coordinator asks for it; off: it
    waits; auto: on where that is a GPU. Needs KV cells that can be taken back.""",
        choices=("auto", "on", "off"),
        flag="--run-ahead",
        place="batching.runAhead",
        reader=STAGE,
    )
    calibrate: bool = setting(
        True,
        "Whether stages measure their cost curve at the first start.",
        flag="--no-calibrate",
        flag_doc="Do not measure the cost curve at the first start; learn it from real steps only.",
        place="batching.calibrate",
        reader=STAGE,
    )
    reflection: bool = setting(
        False,
        """
    Whether the gRPC ports of stages, and the port where they join, describe their services to tools such as grpcurl.
    Such a call needs the same credentials as other calls to the port.""",
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
        """Threads after resolving 0 to the cores on which this process computes."""
        return self.n_threads or len(computing_cores())

    def of_architecture(self, architecture: str) -> EngineSettings:
        """Return the same for a model of this architecture: where only one layout will do, auto means that."""
        return dataclasses.replace(self, kv_layout=asked_layout(self.kv_layout, architecture))

    def resolved(self) -> EngineSettings:
        """Return a copy with this process's own choices filled in: threads and layout of KV cells."""
        return dataclasses.replace(self, n_threads=self.threads_used, kv_layout=self.layout_used)


def wants_rows_ahead(engine: EngineSettings) -> bool:
    """Whether a stage that is the whole model computes next rows before they are asked for, if its lanes allow it."""
    is_wanted = engine.run_ahead == "on" or (engine.run_ahead == "auto" and engine.gpu_layers != 0)
    return is_wanted and engine.policy != "single"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ServingSettings(Settings):
    """How a coordinator takes requests and fills its stages."""

    prefix_lanes: int | None = setting(
        None,
        """
    Free lanes that the prefix cache may use for the KV cells of ended streams. Default: half of all lanes with
    kv-layout per-lane, none with unified. With 0, new prompts copy no prefix from running streams either.""",
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
        "Most prompt rows in one chunk of prefill; 0: automatic.",
        low=0,
        high=bounds.ROWS_PER_FRAME_MAX,
        flag="--prefill-chunk",
        place="batching.prefillChunk",
        reader=COORDINATOR,
    )
    itl_stretch: float = setting(
        2.0,
        "How many times longer running streams may wait between tokens during prefill.",
        low=1,
        high=1_000,
        flag="--itl-stretch",
        place="batching.itlStretch",
        reader=COORDINATOR,
    )
    draft: int = setting(
        DRAFT_AUTO,
        """
    Draft tokens for speculative decoding by prompt lookup, verified in one step. auto: as many as pay off, but none
    with --grant-steps; off: none; N: always up to N, which excludes --grant-steps.""",
        words={"auto": DRAFT_AUTO, "off": 0},
        low=1,
        high=bounds.DRAFT_TOKENS_MAX,
        flag="--draft",
        place="batching.draft",
        reader=COORDINATOR,
    )
    draft_model: str = setting(
        "",
        """
    A small GGUF model with the same vocabulary. It drafts tokens beside the coordinator, and stages verify them. Tokens
    that it guesses right cost a part of a step. An EAGLE-3 model drafts on the last stage instead, from inner rows that
    all stages hand on.""",
        flag="--draft-model",
        place="coordinator.draftModel",
        reader=COORDINATOR,
    )
    draft_threads: int = setting(
        0,
        "Threads of the draft model; 0: half of the coordinator's cores.",
        low=0,
        high=THREADS_MAX,
        flag="--draft-threads",
        place="coordinator.draftThreads",
        reader=COORDINATOR,
    )
    draft_ctx_tokens: int = setting(
        16_384,
        "Tokens that the draft model holds, of all streams together; longer streams have no drafts of it.",
        low=512,
        high=bounds.CTX_TOKENS_MAX,
        flag="--draft-ctx",
        place="coordinator.draftCtxTokens",
        reader=COORDINATOR,
    )
    draft_gpu_layers: int = setting(
        -1,
        "Layers of the draft model on the coordinator's GPU; -1: all, where llama.cpp has a GPU.",
        low=-1,
        high=LAYERS_MAX,
        flag="--draft-gpu-layers",
        place="coordinator.draftGpuLayers",
        reader=COORDINATOR,
    )
    grant_steps: int = setting(
        0,
        """
    Steps for which stages continue a stream without waiting for the coordinator. off: none. It turns --draft auto
    off, and does nothing with one stage. If the coordinator is far away: as many as go into four round trips.""",
        words={"off": 0},
        low=1,
        high=bounds.GRANT_STEPS_MAX,
        flag="--grant-steps",
        place="batching.grantSteps",
        reader=COORDINATOR,
    )
    groups: int = setting(
        0,
        "Number of decode groups; 0: automatic.",
        low=0,
        high=4_096,
        flag="--groups",
        place="batching.groups",
        reader=COORDINATOR,
    )
    group_rows: int = setting(
        0,
        "Rows per decode group; 0: automatic.",
        low=0,
        high=bounds.ROWS_PER_ENVELOPE_MAX,
        flag="--group-rows",
        place="batching.groupRows",
        reader=COORDINATOR,
    )
    share: bool = setting(
        True,
        "Whether identical deterministic requests that run at the same time are decoded only once.",
        flag="--no-share",
        flag_doc="Decode identical deterministic requests separately, even if they run at the same time.",
        place="batching.share",
        reader=COORDINATOR,
    )
    queue: int = setting(
        256,
        "Requests that may wait for a lane; further ones get 429.",
        low=0,
        high=100_000,
        flag="--queue",
        place="coordinator.queue",
        reader=COORDINATOR,
    )
    lost_wait_s: float = setting(
        15.0,
        "How long new requests wait for their first token after the loss of a stage; then they get 503.",
        low=0,
        high=3_600,
        flag="--lost-wait",
        flag_doc="Seconds that new requests wait for their first token after the loss of a stage; then they get 503.",
        place="coordinator.lostWaitSeconds",
        reader=COORDINATOR,
    )
    takeover_s: float = setting(
        60.0,
        """
    How long a stage may be away before a spare, or the stages with room, take over its layers; 0: no limit.""",
        low=0,
        high=86_400,
        flag="--takeover",
        flag_doc="Seconds until a spare, or the stages with room, take over the layers of a lost stage; 0: never.",
        place="coordinator.takeoverSeconds",
        reader=COORDINATOR,
    )
    sleep_idle_s: float = setting(
        0.0,
        """
    Time without requests after which all stages free their memory, in seconds; 0: never. The next request waits until
    they have loaded again.""",
        low=0,
        high=31_536_000,
        flag="--sleep-idle-seconds",
        place="coordinator.sleepIdleSeconds",
        reader=COORDINATOR,
    )
    rebalance: str = setting(
        "tell",
        """
    What to do if another cut would have been clearly faster for a minute. tell: report it; auto: move the layers
    while serving.""",
        choices=("tell", "auto"),
        flag="--rebalance",
        place="coordinator.rebalance",
        reader=COORDINATOR,
    )
    rebalance_every_s: float = setting(
        600.0,
        "With rebalance auto: shortest time between two moves, in seconds. A move that takes layers back waits longer.",
        low=60,
        high=86_400,
        flag="--rebalance-every",
        place="coordinator.rebalanceEverySeconds",
        reader=COORDINATOR,
    )
    model_id: str = setting(
        "",
        "Model name in the API; empty: the model's own.",
        flag="--model-id",
        place="coordinator.modelId",
        reader=COORDINATOR,
    )
    served_model_name: str = setting(
        "",
        "Further names of the model in the API, separated by commas. An answer has the name that its request had.",
        flag="--served-model-name",
        place="coordinator.servedModelName",
        reader=COORDINATOR,
    )
    any_model_name: bool = setting(
        False,
        "Whether requests may name any model. An answer has the name that its request had.",
        flag="--any-model-name",
        flag_doc="Accept any model name in requests. An answer has the name that its request had.",
        place="coordinator.anyModelName",
        reader=COORDINATOR,
    )
    mmproj: str = setting(
        "",
        """
    The model's multimodal projector, a GGUF file. With it chats may hold images and videos, or audio, as far as it has
    encoders for them, which run on the coordinator's host. auto: from the model's repository or directory. Empty:
    chats are text.""",
        flag="--mmproj",
        place="coordinator.mmproj",
        reader=COORDINATOR,
    )
    media_hosts: str = setting(
        "",
        """
    Hosts from which the images, audio and videos of chats may be fetched by their addresses, separated by commas: HOST,
    *.HOST for those below it, or * for all with a public IP address. Empty: from none.""",
        form=read_media_hosts,
        flag="--media-hosts",
        place="coordinator.mediaHosts",
        reader=COORDINATOR,
    )
    lora: str = setting(
        "",
        """
    LoRA adapters, GGUF files separated by commas: FILE, FILE:SCALE or NAME=FILE. Every request has those without a
    name. One with a name is a model of its own in the API, which a request chooses by `model`.""",
        form=read_adapters,
        flag="--lora",
        place="coordinator.lora",
        reader=COORDINATOR,
    )
    image_max_tokens: int = setting(
        0,
        """
    Most tokens of one image, for projectors whose images vary in size: larger images are scaled down. 0: as the
    projector says, and at most 512 where an image of Gemma 4 must fit one native step.""",
        low=0,
        high=bounds.CTX_TOKENS_MAX,
        flag="--image-max-tokens",
        place="coordinator.imageMaxTokens",
        reader=COORDINATOR,
    )
    video_fps: float = setting(
        4.0,
        """
    Pictures of a video that the model looks at, for each second of it. Fewer where they would be more than
    --video-max-frames.""",
        low=0.01,
        high=60,
        flag="--video-fps",
        place="coordinator.videoFps",
        reader=COORDINATOR,
    )
    video_max_frames: int = setting(
        32,
        """
    Most pictures of a video that the model looks at. Of a longer video they are further apart, from its beginning to
    its end.""",
        low=1,
        high=bounds.VIDEO_FRAMES_MAX,
        flag="--video-max-frames",
        place="coordinator.videoMaxFrames",
        reader=COORDINATOR,
    )
    pooling: str = setting(
        "auto",
        "How a prompt's hidden rows become one embedding: mean, last or cls. auto: as the model says, otherwise last.",
        choices=("auto", "mean", "last", "cls"),
        flag="--pooling",
        place="coordinator.pooling",
        reader=COORDINATOR,
    )
    sampling_defaults: str = setting(
        "model",
        """
    Where the values of sampling options come from that a request does not name. model: from the model's file, where it
    recommends any. openai: always the defaults of the API that the request uses.""",
        choices=("model", "openai"),
        flag="--sampling-defaults",
        place="coordinator.samplingDefaults",
        reader=COORDINATOR,
    )
    cors: str = setting(
        "",
        "Origins, separated by commas, whose web pages may read the API, such as http://localhost:3000; * for all.",
        flag="--cors",
        place="coordinator.http.cors",
        reader=COORDINATOR,
    )
    connections_per_address: int = setting(
        512,
        "Most connections from one address beyond this machine, such as a proxy's; 0: no limit.",
        low=0,
        high=1_000_000,
        flag="--connections-per-address",
        place="coordinator.http.connectionsPerAddress",
        reader=COORDINATOR,
    )
    protect_metrics: bool = setting(
        False,
        "Whether /metrics requires an API key too.",
        flag="--protect-metrics",
        flag_doc="Require an API key for /metrics too.",
        place="coordinator.protectMetrics",
        reader=COORDINATOR,
    )
    allow_invites: bool = setting(
        False,
        "Whether holders of an API key may make join lines for new machines, in the page too. A stage sees what passes "
        "through it of every request, so with this a key can do more than ask.",
        flag="--allow-invites",
        flag_doc="Let holders of an API key make join lines for new machines; needs --api-keys.",
        place="coordinator.allowInvites",
        reader=COORDINATOR,
    )
    announce: bool = setting(
        True,
        "Whether the local network is told of a pipeline that other hosts may join: name, model, address, and how many "
        "stages it awaits. Hosts then find it with a short code or `relayline nearby`. On loopback it never is.",
        flag="--no-announce",
        flag_doc="Do not tell the local network of a pipeline that other hosts may join.",
        place="coordinator.announce",
        reader=COORDINATOR,
    )
    jaeger_url: str = setting(
        "",
        "Address of Jaeger, such as http://HOST:16686; the page at / links requests to their traces there.",
        form=read_page_url,
        flag="--jaeger-url",
        place="telemetry.jaegerUrl",
        reader=COORDINATOR,
    )
    reasoning_budget: int = setting(
        -1,
        """
    Most tokens of each block of a chat's thoughts, for requests that name none. Then the thoughts are ended. -1: any
    number; 0: none.""",
        low=-1,
        high=bounds.CTX_TOKENS_MAX,
        flag="--reasoning-budget",
        place="coordinator.reasoningBudget",
        reader=COORDINATOR,
    )
    reasoning_budget_message: str = setting(
        "",
        "Text that ends thoughts beyond the budget, before the mark of their end: 192 bytes at most. "
        "\\n in it is a new line.",
        form=read_last_words,
        flag="--reasoning-budget-message",
        place="coordinator.reasoningBudgetMessage",
        reader=COORDINATOR,
    )
    strict_max_tokens: bool = setting(
        False,
        "Whether a max_tokens that does not fit the context gets 400. Otherwise the answer may fill what is left.",
        flag="--strict-max-tokens",
        flag_doc="Answer 400 to a max_tokens that does not fit the context. Otherwise answers may fill what is left.",
        place="coordinator.http.strictMaxTokens",
        reader=COORDINATOR,
    )
    responses_dir: str = setting(
        "",
        """
    Directory for stored responses of /v1/responses and for /v1/conversations, on the coordinator's host. It keeps them
    over restarts, and goes on with responses in the background. Empty: they are in memory, and end with the
    coordinator.""",
        flag="--responses-dir",
        place="coordinator.responsesDir",
        reader=COORDINATOR,
    )
    batch_dir: str = setting(
        "",
        """
    Directory for /v1/files, /v1/batches and /v1/messages/batches, on the coordinator's host. It keeps them over
    restarts. Empty: no files and batches.""",
        flag="--batch-dir",
        place="coordinator.batchDir",
        reader=COORDINATOR,
    )
    batch_lanes: int = setting(
        0,
        "Lanes that batches may use together. 0: all but one, which is left to other requests.",
        low=0,
        high=LANES_MAX,
        flag="--batch-lanes",
        place="coordinator.batchLanes",
        reader=COORDINATOR,
    )
    batches: int = setting(
        2,
        "Batches that run at the same time; others wait.",
        low=1,
        high=64,
        flag="--batches",
        place="coordinator.batches",
        reader=COORDINATOR,
    )
    batch_requests: int = setting(
        50_000,
        "Most requests of one batch.",
        low=1,
        high=10_000_000,
        flag="--batch-requests",
        place="coordinator.batchRequests",
        reader=COORDINATOR,
    )
    batch_files: int = setting(
        1_000,
        "Most files that are kept, of requests and of answers, and most batches.",
        low=1,
        high=100_000,
        flag="--batch-files",
        place="coordinator.batchFiles",
        reader=COORDINATOR,
    )
    batch_file_bytes: int = setting(
        200 << 20,
        "Largest file of requests.",
        low=0,
        high=1 << 50,
        flag="--batch-file-bytes",
        place="coordinator.batchFileBytes",
        reader=COORDINATOR,
    )
    batch_disk_bytes: int = setting(
        8 << 30,
        "Disk space of all files together, beyond which none is taken. Answers of running batches are always kept.",
        low=0,
        high=1 << 50,
        flag="--batch-disk-bytes",
        place="coordinator.batchDiskBytes",
        reader=COORDINATOR,
    )

    @property
    def adapter_names(self) -> tuple[str, ...]:
        """The names of the LoRA adapters that requests choose among, in the order of `lora`."""
        return tuple(each.name for each in read_adapters(self.lora) if each.name) if self.lora else ()

    @property
    def draft_tokens(self) -> int:
        """`draft` as it holds: DRAFT_AUTO is none with grants, since a stream with drafts gets no grant."""
        return 0 if self.grant_steps and self.draft == DRAFT_AUTO else self.draft


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TelemetrySettings(Settings):
    """How much is recorded about requests and batches."""

    level: str = setting(
        "summary",
        "What to record. summary: each request; batches: also each native step; frames: also each frame; off: nothing.",
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
        "Share of requests that are traced, 0 to 1.",
        low=0,
        high=1,
        flag="--trace-sample",
        flag_doc="Share of requests that are traced, 0 to 1; the coordinator decides, stages follow.",
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


KEPT_DIRECTORIES = ("responses_dir", "batch_dir")  # of ServingSettings: what is in them outlives the coordinator
# The settings of a stage's devices, besides `gpu_layers`.
DEVICE_SETTINGS = ("devices", "split_mode", "tensor_split", "main_gpu", "n_cpu_moe", "override_tensor")

TABLES = (EngineSettings, ServingSettings, TelemetrySettings)
