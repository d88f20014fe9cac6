"""One stage of a pipeline as its manifest describes it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, field_validator

from relayline.deploy.machine.cores import read_cores, write_cores
from relayline.deploy.manifest.deployment import Tolerations
from relayline.deploy.manifest.scalars import CoreList, DnsLabel, FilePath, Host, Labels, Part, Port, is_local
from relayline.deploy.manifest.settings import declare_settings, stage_settings
from relayline.wire.common.units import GIB
from relayline.wire.settings.device_texts import NO_DEVICE, read_devices, read_overrides, read_shares
from relayline.wire.settings.setting import STAGES
from relayline.wire.settings.table import LAYERS_MAX, EngineSettings


def _layers_tag(value: Any) -> str:
    return "auto" if isinstance(value, str) else "range"


LayerRange = tuple[Annotated[int, Field(ge=0, le=LAYERS_MAX)], Annotated[int, Field(ge=1, le=LAYERS_MAX)]]
Layers = Annotated[
    Annotated[Literal["auto"], Tag("auto")] | Annotated[LayerRange, Tag("range")],
    Discriminator(_layers_tag),
]


class Speed(Part):
    """How fast a host is, where it cannot be measured: the planner prefers measured curves."""

    decode_gbytes_per_s: Annotated[float, Field(gt=0, le=1e6)] | None = None
    """Weights and KV bytes that a decode step of one row reads per second, in 10^9 bytes: the memory bandwidth that
    this host reaches with the stage's threads."""
    prefill_gflops: Annotated[float, Field(gt=0, le=1e9)] | None = None
    """Floating-point operations per second of a step with many rows, in 10^9 (a multiply-add counts as two)."""
    step_overhead_ms: Annotated[float, Field(ge=0, le=1e4)] | None = None
    """The cost of a native step before its first row, in milliseconds."""
    calibration: FilePath | None = None
    """File with the output of `relayline calibrate ARTIFACT --json`, taken on this host."""


class Link(Part):
    """The network to the next stage; after the last stage, back to the coordinator."""

    round_trip_ms: Annotated[float, Field(ge=0, le=1e5)] = 0.2
    """Round trip of a small message, in milliseconds."""
    bandwidth_gbps: Annotated[float, Field(gt=0, le=1e6)] = 10.0
    """Bandwidth in 10^9 bits per second."""


class Stage(Part):
    """One stage: a process that holds a contiguous range of the model's layers."""

    name: DnsLabel
    """Unique name; the process, its logs, its container and its certificate carry it."""
    host: Host = "localhost"
    """Where it runs. `relayline up` starts it for localhost and 127.*; on any other host somebody starts
    `relayline stage --join` there."""
    port: Port = 0
    """Port its neighbours connect to. 0: chosen by the system on localhost; elsewhere 50051, 50052... in stage order
    on each host, so that a firewall can be opened beforehand."""
    relay: bool = False
    """For a host to which nobody can connect, as behind NAT: others reach the stage through a relay at
    coordinator.host. `port` is then a port there; `host` need not be an address."""
    device: Literal["cpu", "gpu"] = "cpu"
    """Where its layers are computed."""
    gpu_layers: Annotated[int, Field(ge=-1, le=LAYERS_MAX)] | None = None
    """With device gpu: how many of its layers go there; -1 (the default) for all."""
    if TYPE_CHECKING:
        threads: int = 0
        devices: str = ""
        split_mode: str = "layer"
        tensor_split: str = ""
        main_gpu: int = 0
        cpu_moe_layers: int = 0
        override_tensor: str = ""
    declare_settings(locals(), STAGES, but=("gpuLayers",))
    cores: CoreList = "auto"
    """Cores that it keeps to, such as 0-3,8. auto: stages on localhost divide this machine's, in proportion to their
    threads, where no stage there says anything else and there are as many cores as threads; any: it may run on all."""
    memory_gib: Annotated[float, Field(gt=0, le=1e5)] | None = None
    """Memory that this stage may use, in GiB: the planner stays below it, containers are limited to it. With device
    gpu it is the GPU's memory: the planner stays below it there, and containers are not limited. Without it the planner
    counts the memory of this machine, and of its GPUs, for local stages."""
    layers: Layers = "auto"
    """`auto`: decided by the planner. Or [first, end): two integers, the second is not included."""
    metrics_port: Port = 0
    """Port of its Prometheus endpoint. 0: chosen by the system on localhost, 9464 plus the stage's place on its host
    elsewhere."""
    labels: Labels = Field(default_factory=dict)
    """Free labels; rendered deployments put them on the stage's pods and containers."""
    node_selector: Labels = Field(default_factory=dict)
    """Kubernetes: labels of the nodes that the stage may run on."""
    tolerations: Tolerations = ()
    """Kubernetes: taints of nodes on which this stage may run, besides deployment.tolerations."""
    speed: Speed = Speed()
    """Declared speed of the host."""
    link: Link = Link()
    """Network to the next stage."""

    @field_validator("cores", mode="after")
    @classmethod
    def _are_cores(cls, cores: str) -> str:
        return cores if cores in ("auto", "any") else write_cores(read_cores(cores))

    @field_validator("layers", mode="after")
    @classmethod
    def _is_a_range(cls, layers: Literal["auto"] | tuple[int, int]) -> Literal["auto"] | tuple[int, int]:
        if layers != "auto" and layers[0] >= layers[1]:
            raise ValueError(
                f"[{layers[0]}, {layers[1]}] holds no layer: the end is not included, so write [first, last + 1]"
            )
        return layers

    @property
    def is_local(self) -> bool:
        """Whether `relayline up` starts it."""
        return is_local(self.host)

    @property
    def kept_cores(self) -> str:
        """The cores that it is bound to; empty if none were chosen."""
        return "" if self.cores in ("auto", "any") else self.cores

    @property
    def layer_range(self) -> tuple[int, int] | None:
        """The given [start, end), None for auto."""
        return None if self.layers == "auto" else self.layers

    @property
    def engine_settings(self) -> dict[str, Any]:
        """Its own engine settings, by the names of the settings."""
        return stage_settings(EngineSettings, self) | {"gpu_layers": self.gpu_layers_used}

    @property
    def gpu_layers_used(self) -> int:
        """Layers on the GPU: 0 on the CPU, -1 for all."""
        if self.device == "cpu":
            return 0
        return -1 if self.gpu_layers is None else self.gpu_layers

    @property
    def memory_bytes(self) -> int | None:
        """Memory that its model and cache may take, of its GPU if it has one; None where the manifest says nothing."""
        return None if self.memory_gib is None else int(self.memory_gib * GIB)

    @property
    def container_memory_gib(self) -> float | None:
        """Memory limit of its container, in GiB; None for none: on a GPU `memory_gib` is that one's memory."""
        return None if self.n_gpus else self.memory_gib

    @property
    def named_devices(self) -> tuple[str, ...]:
        """All devices that it names, to compute on or for weights."""
        names = read_devices(self.devices) if self.devices else ()
        rules = read_overrides(self.override_tensor) if self.override_tensor else ()
        return tuple(dict.fromkeys((*(name for name in names if name != NO_DEVICE), *(device for _, device in rules))))

    @property
    def n_gpus(self) -> int:
        """GPUs that its container asks for: as many as are named, or have a share; 0 on the CPU."""
        if self.device == "cpu" or self.devices == NO_DEVICE:
            return 0
        names = read_devices(self.devices) if self.devices else ()
        shares = read_shares(self.tensor_split) if self.tensor_split else ()
        return max(1, len(names), len(shares))
