"""From a manifest to the planner: the model's sizes, this machine, other hosts as declared, links. The sources of a
host's speed, best first: a calibration file of that host, numbers declared in the manifest, a measurement of this very
model on this machine (`relayline plan --measure`), and last an estimate from this machine's memory bandwidth and
arithmetic. Other hosts without any of these count as equal to this machine.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from relayline.coordinator.model.cuts import is_allowed
from relayline.coordinator.model.gguf_file import open_model
from relayline.coordinator.model.inspection import BLOCK_NAME, ModelFacts, inspect_model
from relayline.coordinator.planner.instance import Host, Instance, Link, Load, Machine, ModelShape
from relayline.coordinator.planner.memory import COORDINATOR_BYTES, GIB
from relayline.coordinator.planner.search import Best, best_split
from relayline.coordinator.planner.speed import Speed, from_samples, roofline
from relayline.coordinator.planner.whatif import explain
from relayline.deploy.machine import facts as machine
from relayline.deploy.manifest import Manifest, Stage, is_local
from relayline.deploy.planning.measure import known_speed, sample_of
from relayline.deploy.planning.shared import gpu_numbers
from relayline.wire.common.errors import UsageError
from relayline.wire.common.kv_layout import choose_pipeline_layout

LOOPBACK = Link(round_trip_ns=0, bytes_per_s=2e9)  # a hop's cost on one machine is part of the host's work for a step
GPU_BYTES_PER_S, GPU_FLOPS = 300e9, 20e12  # of a GPU of which nothing is known


def shape_of(facts: ModelFacts) -> ModelShape:
    """Return the sizes that planning needs; reads the model's header once more for the width of its layers."""
    widths = [
        tensor.dims[1]
        for tensor in open_model(facts.path).tensors.values()
        if BLOCK_NAME.match(tensor.name) and len(tensor.dims) > 1
    ]
    return ModelShape(
        layer_bytes=facts.layer_bytes,
        head_bytes=facts.head_bytes,
        embedding_bytes=facts.embedding_bytes,
        kv_bytes=facts.kv_bytes_per_token,
        n_embd=facts.n_embd,
        n_vocab=facts.n_vocab,
        n_ff=max(widths, default=facts.n_embd),
        n_heads=max(facts.n_heads, default=0),
        n_masks=max(1, len(set(facts.windows))),
        has_indexers=bool(facts.indexers),
        state_bytes=facts.state_bytes_per_lane if any(facts.state_bytes_per_lane) else (),
        row_widths=facts.row_widths,
        is_allowed=lambda start, end: is_allowed(facts, start, end),
    )


def load_of(manifest: Manifest, n_streams: int = 0) -> Load:
    """Return the load that the manifest's pipeline must hold; n_streams as in planner.instance.Load."""
    engine = manifest.engine
    gpu_layers = [stage.gpu_layers_used for stage in manifest.stages]
    return Load(
        ctx_tokens=engine.ctx_tokens,
        n_lanes=engine.n_lanes,
        kv_type=engine.kv_type,
        kv_layout=choose_pipeline_layout(engine.kv_layout, ctx_tokens=engine.ctx_tokens, gpu_layers=gpu_layers),
        wire_dtype=manifest.serving.wire,
        max_rows=engine.max_rows,
        n_streams=n_streams,
    )


def threads_of(manifest: Manifest) -> tuple[int, ...]:
    """Return the threads of every stage; a host's cores divided by its stages where the manifest leaves it open."""
    cores = machine.cores()
    found = []
    for stage in manifest.stages:
        mates = [other for other in manifest.stages if _place(other) == _place(stage)]
        n_open = sum(1 for other in mates if not other.threads)
        left = cores - sum(other.threads for other in mates)
        found.append(stage.threads or max(1, left // max(1, n_open)))
    return tuple(found)


def _place(stage: Stage) -> str:
    return "localhost" if stage.is_local else stage.host


def instance_of(
    manifest: Manifest,
    facts: ModelFacts,
    *,
    n_streams: int = 0,
    is_running: bool = False,
    ignore_measured: bool = False,
) -> Instance:
    """Return the planning problem of a manifest.

    With is_running the pipeline is up already, so this machine counts with all its memory, not only the free part.
    Raises UsageError for an unusable calibration file.
    """
    threads = threads_of(manifest)
    local_memory = machine.total_memory_bytes() if is_running else machine.available_memory_bytes()
    reserved = COORDINATOR_BYTES if is_local(manifest.spec.coordinator.host) else 0
    here = Machine("localhost", machine.cores(), local_memory, reserved)
    bytes_per_weight = _bytes_per_weight(facts)
    hosts = []
    devices = gpu_numbers(manifest)
    for stage, n_threads, device in zip(manifest.stages, threads, devices, strict=True):
        cores = sum(n for other, n in zip(manifest.stages, threads, strict=True) if _place(other) == _place(stage))
        measured = None if ignore_measured or not stage.is_local else _measured(manifest, facts, stage, n_threads)
        hosts.append(
            Host(
                name=stage.name,
                machine=here if stage.is_local else Machine(stage.host, max(cores, machine.cores())),
                threads=n_threads,
                speed=_given(manifest, stage, n_threads, bytes_per_weight)
                or measured
                or _estimated(stage, n_threads, bytes_per_weight),
                memory_bytes=None if stage.memory_gib is None else int(stage.memory_gib * GIB),
                layers=stage.layer_range,
                link=_link(stage),
                device=device,
            )
        )
    places = [manifest.spec.coordinator.host, *(stage.host for stage in manifest.stages)]
    links = _links(places, [host.link for host in hosts])
    hosts = [dataclasses.replace(host, link=link) for host, link in zip(hosts, links[1:], strict=True)]
    return Instance(shape_of(facts), tuple(hosts), load_of(manifest, n_streams), links[0], here if reserved else None)


def _link(stage: Stage) -> Link:
    return Link(round(stage.link.round_trip_ms * 1e6), stage.link.bandwidth_gbps * 1e9 / 8)


def _links(places: list[str], declared: list[Link]) -> list[Link]:
    """Return the links from the coordinator around and back to it; within a machine a link costs almost nothing.

    The manifest does not describe the link from the coordinator to the first stage: it counts as equal to the link
    back.
    """
    ends = [*places, places[0]]
    between = [declared[-1], *declared]
    return [LOOPBACK if _same_machine(ends[at], ends[at + 1]) else link for at, link in enumerate(between)]


def _same_machine(left: str, right: str) -> bool:
    return left == right or (is_local(left) and is_local(right))


def _given(manifest: Manifest, stage: Stage, n_threads: int, bytes_per_weight: float) -> Speed | None:
    """Return the speed that the manifest gives, None if it says nothing."""
    speed = stage.speed
    if speed.calibration is not None:
        return _calibrated(manifest.resolve(speed.calibration))
    if speed.decode_gbytes_per_s is None and speed.prefill_gflops is None:
        return None
    bandwidth, flops = _like_here(stage, n_threads)
    if speed.decode_gbytes_per_s is not None:
        # One number says as much as a ratio to this machine: the other one is taken to be in proportion.
        flops *= speed.decode_gbytes_per_s * 1e9 / bandwidth
        bandwidth = speed.decode_gbytes_per_s * 1e9
    elif speed.prefill_gflops is not None:
        bandwidth *= speed.prefill_gflops * 1e9 / flops
    if speed.prefill_gflops is not None:
        flops = speed.prefill_gflops * 1e9
    step_ns = (speed.step_overhead_ms or 0.0) * 1e6
    return roofline(bandwidth, flops, step_ns=step_ns, bytes_per_weight=bytes_per_weight)


def _estimated(stage: Stage, n_threads: int, bytes_per_weight: float) -> Speed:
    return roofline(*_like_here(stage, n_threads), bytes_per_weight=bytes_per_weight, source="estimated")


def _like_here(stage: Stage, n_threads: int) -> tuple[float, float]:
    """Return (bytes per second, operations per second) of a host of which nothing is known."""
    if stage.device == "gpu":
        return GPU_BYTES_PER_S, GPU_FLOPS
    return machine.bandwidth_bytes_per_s(n_threads), machine.flops(n_threads)


def _calibrated(path: Path) -> Speed:
    """Read what `relayline calibrate ARTIFACT --json` printed. Raises UsageError."""
    try:
        sample = sample_of(json.loads(path.read_text()))
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"{path}: not the output of `relayline calibrate ARTIFACT --json` of this version; make it again"
        ) from error
    speed = from_samples([sample], "calibrated")
    if speed is None:
        raise UsageError(f"{path}: holds no measured step; calibrate again")
    return speed


def _measured(manifest: Manifest, facts: ModelFacts, stage: Stage, n_threads: int) -> Speed | None:
    kv_type = manifest.engine.kv_type
    return known_speed(
        facts.path,
        n_threads=n_threads,
        gpu_layers=stage.gpu_layers_used,
        kv_type=kv_type,
        n_at_once=n_at_once(manifest, n_threads),
    )


def n_at_once(manifest: Manifest, n_threads: int) -> int:
    """Return how many of the manifest's stages compute on this machine at the same time."""
    n_local = sum(stage.is_local for stage in manifest.stages)
    return max(1, min(n_local, machine.cores() // n_threads))


def _bytes_per_weight(facts: ModelFacts) -> float:
    """Return the bytes of an average weight of the layers."""
    size_bytes = n_weights = 0
    for tensor in open_model(facts.path).tensors.values():
        if BLOCK_NAME.match(tensor.name):
            count = 1
            for dim in tensor.dims:
                count *= dim
            size_bytes, n_weights = size_bytes + tensor.size_bytes, n_weights + count
    return size_bytes / n_weights if n_weights else 1.0


def best_for(instance: Instance) -> Best:
    """Return the best split. Raises UsageError, with the shortage and its remedies, where there is none."""
    best = best_split(instance)
    if best is None:
        raise UsageError(explain(instance).text)
    return best


def cuts_for(manifest: Manifest, model_path: Path) -> tuple[int, ...]:
    """Return the best cuts for a manifest: the first layer of every stage but the first; () for one stage.

    Ranges that the manifest gives are kept. Raises UsageError where nothing fits, ModelFileError.
    """
    best = best_for(instance_of(manifest, inspect_model(model_path)))
    return tuple(start for start, _ in best.edges[1:])
