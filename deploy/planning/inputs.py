"""From a manifest to the planner: the model's sizes, this machine, other hosts as declared, links.

The sources of a host's speed, best first:

* A calibration file of that host.
* Numbers that the manifest declares.
* The host's own measurement when it joined (deploy.planning.known_hosts), bounded where it was busy then.
* A measurement of this very model on this machine (`relayline plan --measure`).
* An estimate: of a GPU by its name, else from this machine's memory bandwidth and arithmetic. Other hosts count as
  equal to this machine then.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from relayline.coordinator.model.cuts import ranges
from relayline.coordinator.model.inspection import ModelFacts, inspect_model
from relayline.coordinator.planner.instance import Host, Instance, Link, Load, Machine
from relayline.coordinator.planner.memory import StageMemory, stage_memory
from relayline.coordinator.planner.search import Best, best_split
from relayline.coordinator.planner.speed import Speed, from_samples, roofline
from relayline.coordinator.planner.whatif import explain
from relayline.deploy.machine import facts as machine
from relayline.deploy.machine.gpus import known_gpus
from relayline.deploy.manifest import Manifest, Stage, is_local
from relayline.deploy.manifest.stage import Link as StageLink
from relayline.deploy.planning.busy import bounded
from relayline.deploy.planning.drafting import (
    Reserved,
    drafted_shape,
    guesses_of,
    has_coordinator,
    offloads_beside_draft,
    reserved_for_coordinator,
)
from relayline.deploy.planning.gpu_speeds import UNKNOWN, GpuSpeed, speed_of
from relayline.deploy.planning.known_hosts import KnownHost, known_hosts, place_of, threads_on
from relayline.deploy.planning.measure import known_speed, sample_of
from relayline.deploy.planning.shapes import bytes_of_weight, runs_ahead
from relayline.deploy.planning.shared import gpu_numbers
from relayline.wire.common.errors import UsageError
from relayline.wire.common.kv_layout import choose_pipeline_layout
from relayline.wire.model_files.adapters import layer_bytes_of

LOOPBACK = Link(round_trip_ns=0, bytes_per_s=2e9)  # the cost of a hop on one machine is in the host's work of a step
NOBODY: Mapping[str, KnownHost] = MappingProxyType({})


def load_of(manifest: Manifest, architecture: str, n_streams: int = 0) -> Load:
    """Return the load that the manifest's pipeline must hold; n_streams as in planner.instance.Load.

    `architecture`: of the model.
    """
    engine = manifest.engine
    gpu_layers = [stage.gpu_layers_used for stage in manifest.stages]
    return Load(
        ctx_tokens=engine.ctx_tokens,
        n_lanes=engine.n_lanes,
        kv_type=engine.kv_type,
        kv_layout=choose_pipeline_layout(
            engine.kv_layout, architecture, ctx_tokens=engine.ctx_tokens, gpu_layers=gpu_layers
        ),
        window_cells=engine.window_cells,
        wire_dtype=manifest.serving.wire,
        max_rows=engine.max_rows,
        n_streams=n_streams,
        rewind_rows=engine.rewind_rows,
        mtp_drafts=guesses_of(manifest.serving, engine),
        prefix_memory_bytes=max(0, engine.prefix_memory_bytes),  # auto takes only memory that is left
        adapter_bytes=layer_bytes_of(manifest.serving.lora),
    )


def threads_of(manifest: Manifest, known: Mapping[str, KnownHost] = NOBODY) -> tuple[int, ...]:
    """Return the threads of every stage; a host's cores divided by its stages where the manifest leaves it open.

    An unknown host is assumed to have as many cores as this one.
    """
    return tuple(threads_on(manifest, stage, _cores_of(stage, known)) for stage in manifest.stages)


def _cores_of(stage: Stage, known: Mapping[str, KnownHost]) -> int:
    """Return the cores of a stage's host; if unknown, those of this machine."""
    host = known.get(stage.name)
    return host.n_cores if host is not None and host.n_cores and not stage.is_local else machine.cores()


def instance_of(
    manifest: Manifest,
    facts: ModelFacts,
    *,
    n_streams: int = 0,
    is_running: bool = False,
    known: Mapping[str, KnownHost] | None = None,
) -> Instance:
    """Return the planning problem of a manifest.

    With is_running the pipeline is up already, so this machine counts with all its memory, not only the free part.
    `known`: the hosts' own reports, by stage; without it their earlier ones. Raises UsageError for an unusable
    calibration file.
    """
    if known is None:
        known = known_hosts(manifest, facts.path)
    threads = threads_of(manifest, known)
    is_coordinator_here = any(stage.is_local for stage in manifest.stages) and has_coordinator(manifest)
    reserved = reserved_for_coordinator(manifest) if is_coordinator_here else Reserved()
    machines = _machines(manifest, threads, known, reserved, is_running=is_running)
    bytes_per_weight = bytes_of_weight(facts)
    hosts = []
    places = zip(gpu_numbers(manifest), offloads_beside_draft(manifest, facts), strict=True)
    for stage, n_threads, (device, offload) in zip(manifest.stages, threads, places, strict=True):
        measured = None if not stage.is_local else _measured(manifest, facts, stage, n_threads)
        reported = known[stage.name].speed if stage.name in known else None
        hosts.append(
            Host(
                name=stage.name,
                machine=machines[place_of(stage)],
                threads=n_threads,
                speed=_given(manifest, stage, n_threads, bytes_per_weight)
                or reported
                or measured
                or _estimated(stage, n_threads, bytes_per_weight),
                memory_bytes=stage.memory_bytes,
                layers=stage.layer_range,
                device=device,
                offload=offload,
                runs_ahead=runs_ahead(dataclasses.replace(manifest.engine, **stage.engine_settings), facts),
            )
        )
    busy = [host.name for host in hosts if host.name in known and known[host.name].is_doubtful]
    if busy:
        by_cores = zip(manifest.stages, threads, strict=True)
        estimates = {stage.name: _estimated(stage, n_threads, bytes_per_weight) for stage, n_threads in by_cores}
        hosts = bounded(hosts, busy, estimates)
    links = _links(manifest, known, "localhost" if is_coordinator_here else manifest.spec.coordinator.host)
    hosts = [dataclasses.replace(host, link=link) for host, link in zip(hosts, links[1:], strict=True)]
    coordinator = machines.get("localhost") if is_coordinator_here else None
    return Instance(
        drafted_shape(facts, manifest.serving),
        tuple(hosts),
        load_of(manifest, facts.architecture, n_streams),
        links[0],
        coordinator,
    )


def memory_of(manifest: Manifest, facts: ModelFacts, cuts: Sequence[int]) -> list[StageMemory]:
    """Return the memory of each stage of a manifest, cut so."""
    shape, load = drafted_shape(facts, manifest.serving), load_of(manifest, facts.architecture)
    offloads = offloads_beside_draft(manifest, facts)
    edges = ranges(facts.n_layers, cuts)
    return [stage_memory(shape, load, *edge, offload) for edge, offload in zip(edges, offloads, strict=True)]


def _machines(
    manifest: Manifest,
    threads: Sequence[int],
    known: Mapping[str, KnownHost],
    reserved: Reserved,
    *,
    is_running: bool,
) -> dict[str, Machine]:
    """Return the machines by their places. `reserved`: of this one."""
    found: dict[str, Machine] = {}
    for stage in manifest.stages:
        place = place_of(stage)
        if stage.is_local:
            memory = machine.total_memory_bytes() if is_running else machine.available_memory_bytes()
            found.setdefault(place, Machine(place, machine.cores(), memory, *reserved))
            continue
        used = sum(n for other, n in zip(manifest.stages, threads, strict=True) if place_of(other) == place)
        host = known.get(stage.name)
        memory = None if host is None else host.memory_bytes or None if is_running else host.usable_memory_bytes
        if place not in found or found[place].memory_bytes is None:
            found[place] = Machine(place, max(used, _cores_of(stage, known)), memory)
    return found


def _link_of(declared: StageLink) -> Link:
    return Link(round(declared.round_trip_ms * 1e6), declared.bandwidth_gbps * 1e9 / 8)


def _links(manifest: Manifest, known: Mapping[str, KnownHost], coordinator_host: str) -> list[Link]:
    """Return the links from the coordinator round to it again; within a machine a link costs nothing to speak of.

    Between two hosts it is as the manifest says. Otherwise it is as slow as the slower of their links to the
    coordinator, if both are known; to a relayed stage the way passes there, so their delays add up. The manifest does
    not describe the link from the coordinator to the first stage: it counts as equal to the link back.
    """
    stages = manifest.stages
    places = [coordinator_host, *(stage.host for stage in stages)]
    names = ["", *(stage.name for stage in stages)]
    given = [stages[-1].link, *(stage.link for stage in stages)]
    found = []
    for at, declared in enumerate(given):
        after = (at + 1) % len(places)
        is_relayed = after > 0 and _is_relayed(stages[after - 1], known)
        if _same_machine(places[at], places[after]) and not is_relayed:
            found.append(LOOPBACK)
            continue
        between = _through_relay if is_relayed else _slower
        measured = between(known.get(names[at]), known.get(names[after]), is_one=not at or not after)
        found.append(measured if measured is not None and declared == StageLink() else _link_of(declared))
    return found


def _slower(one: KnownHost | None, other: KnownHost | None, *, is_one: bool) -> Link | None:
    """Return the slower of two ways to the coordinator; `is_one`: one of the two ends is the coordinator itself."""
    links = [host.link for host in (one, other) if host is not None and host.link is not None]
    if len(links) < (1 if is_one else 2):
        return None
    return Link(max(link.round_trip_ns for link in links), min(link.bytes_per_s for link in links))


def _is_relayed(stage: Stage, known: Mapping[str, KnownHost]) -> bool:
    """Return whether others reach a stage through the relay: its manifest says so, or it was started so."""
    host = known.get(stage.name)
    return stage.relay or (host is not None and host.is_relayed)


def _through_relay(one: KnownHost | None, other: KnownHost | None, *, is_one: bool) -> Link | None:
    """Return the way from one stage to a relayed one: to the coordinator's host, and from there on."""
    link = _slower(one, other, is_one=is_one)
    if link is None:
        return None
    trips = [host.link.round_trip_ns for host in (one, other) if host is not None and host.link is not None]
    return dataclasses.replace(link, round_trip_ns=sum(trips))


def _same_machine(left: str, right: str) -> bool:
    return left == right or (is_local(left) and is_local(right))


def _given(manifest: Manifest, stage: Stage, n_threads: int, bytes_per_weight: float) -> Speed | None:
    """Return the speed that the manifest gives, None if it says nothing."""
    speed = stage.speed
    if speed.calibration is not None:
        return _calibrated(manifest.resolve(speed.calibration))
    if not is_declared(stage):
        return None
    bandwidth, flops, _ = _like_here(stage, n_threads)
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


def is_declared(stage: Stage) -> bool:
    """Tell whether the manifest says how fast a stage's host is."""
    speed = stage.speed
    return any(given is not None for given in (speed.calibration, speed.decode_gbytes_per_s, speed.prefill_gflops))


def _estimated(stage: Stage, n_threads: int, bytes_per_weight: float) -> Speed:
    bandwidth, flops, step_ns = _like_here(stage, n_threads)
    return roofline(bandwidth, flops, step_ns=step_ns, bytes_per_weight=bytes_per_weight, source="estimated")


def _like_here(stage: Stage, n_threads: int) -> GpuSpeed:
    """Return the speed of a host that was neither declared nor measured: by its GPU's name, or as this machine's."""
    if stage.device != "gpu":
        return GpuSpeed(machine.bandwidth_bytes_per_s(n_threads), machine.flops(n_threads), 0.0)
    known = known_gpus() if stage.is_local else ()
    return next((speed for gpu in known if (speed := speed_of(gpu.description)) is not None), UNKNOWN)


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


def best_for(instance: Instance) -> Best:
    """Return the best split. Raises UsageError, with the shortage and its remedies, if there is none."""
    best = best_split(instance)
    if best is None:
        raise UsageError(explain(instance).text)
    return best


def cuts_for(manifest: Manifest, model_path: Path, *, is_running: bool = False) -> tuple[int, ...]:
    """Return the best cuts for a manifest: the first layer of every stage but the first; () for one stage.

    Ranges that the manifest gives are kept. `is_running` as in `instance_of`. Raises UsageError where nothing fits,
    ModelFileError.
    """
    best = best_for(instance_of(manifest, inspect_model(model_path), is_running=is_running))
    return tuple(start for start, _ in best.edges[1:])
