"""Checks that stages fit together: names, ports and layer ranges. Pure; ValueError names the mismatch."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from relayline.deploy.manifest.stage import Stage
from relayline.stage.joining.usual_port import STAGE_PORT as STAGE_PORT
from relayline.wire.common.texts import counted, named_layers

METRICS_PORT = 9_464  # as Prometheus's exporter allocations give to OpenTelemetry


class StageError(ValueError):
    """Something wrong with one stage in the company of the others; `index` says which, `field` where."""

    def __init__(self, index: int, field: str, message: str) -> None:
        super().__init__(message)
        self.index, self.field = index, field


def check_stages(stages: Sequence[Stage], coordinator_ports: Mapping[int, str], coordinator_host: str) -> None:
    """Raise StageError if stages share a name, or a port on one host, or one has the coordinator's port on its host.

    `coordinator_ports`: the use of each port that is known before the start.
    """
    names: dict[str, int] = {}
    taken: dict[tuple[str, int], str] = {}  # by host and port: which stage has it
    at_coordinator: dict[int, Stage] = {}
    for index, stage in enumerate(stages):
        if stage.name in names:
            raise StageError(index, "name", f"stage name {stage.name!r} is taken by stage {names[stage.name]}")
        names[stage.name] = index
        if stage.relay and stage.is_local:
            raise StageError(index, "relay", "relay is for a stage on another host; give its `host`")
        listen, metrics = listen_port(stages, stage), metrics_port(stages, stage)
        is_there = stage.is_local or stage.host == coordinator_host
        if stage.relay or (is_there and stage.port):
            other = at_coordinator.setdefault(listen, stage)
            if other is not stage and (stage.relay or other.relay):
                raise StageError(index, "port", f"port {listen} on {coordinator_host} is taken by stage {other.name!r}")
        if stage.relay and listen in coordinator_ports:
            raise StageError(index, "port", f"port {listen} is taken by the coordinator's {coordinator_ports[listen]}")
        own = {"metricsPort": metrics} if stage.relay else {"port": listen, "metricsPort": metrics}
        _take(taken, index, stage, own)
        for field, port in own.items():
            if is_there and port in coordinator_ports:
                raise StageError(index, field, f"port {port} is taken by the coordinator's {coordinator_ports[port]}")
        if stage.gpu_layers is not None and stage.device == "cpu":
            raise StageError(index, "gpuLayers", "gpuLayers needs `device: gpu`")


def _take(taken: dict[tuple[str, int], str], index: int, stage: Stage, own: Mapping[str, int]) -> None:
    """Note a stage's own ports on its host, by field; 0 is chosen by the system. Raises StageError for a taken one."""
    for at, (field, port) in enumerate(own.items()):
        owner = taken.setdefault((stage.host, port), stage.name)
        is_own_again = port in [*own.values()][:at]
        if port and (owner != stage.name or is_own_again):
            raise StageError(index, field, f"port {port} on {stage.host} is taken by stage {owner!r}")


def check_spares(spares: Sequence[Stage]) -> None:
    """Raise ValueError for a spare that is given layers: it takes those of another stage."""
    for spare in spares:
        if spare.layer_range is not None:
            raise ValueError(f"spare {spare.name!r} gets the layers of the stage that it replaces; leave out its")


def check_layers(stages: Sequence[Stage]) -> None:
    """Raise StageError unless the given ranges can be part of one contiguous split.

    `auto` and ranges may be mixed. The stages between two ranges share exactly the layers between them, at least one
    each. Those after the last range share the model's remaining layers. So the first range starts at 0 unless `auto`
    stages come before it, and neighbouring ranges touch.
    """
    end = n_auto = 0
    before = ""
    for index, stage in enumerate(stages):
        if stage.layer_range is None:
            n_auto += 1
            continue
        start, next_end = stage.layer_range
        left = start - end
        where = f"after stage {before!r}, whose last layer is {end - 1}" if before else "at the start of the model"
        if left < 0:
            raise StageError(index, "layers", f"stage {before!r} holds {named_layers(start, end)} already")
        if n_auto == 0 and left > 0:
            raise StageError(index, "layers", f"no stage holds {named_layers(end, start)} {where}; start at {end}")
        if left < n_auto:
            share = f"{counted(n_auto, 'auto stage has', 'auto stages have')} to share {counted(left, 'layer')}"
            raise StageError(index, "layers", f"{share} {where}; each needs at least one")
        end, n_auto, before = next_end, 0, stage.name


def fixed_cuts(stages: Sequence[Stage]) -> tuple[int | None, ...]:
    """Return the first layer of every stage but the first, as far as ranges say; None elsewhere."""
    cuts: list[int | None] = []
    for left, right in itertools.pairwise(stages):
        if right.layer_range is not None:
            cuts.append(right.layer_range[0])
        else:
            cuts.append(None if left.layer_range is None else left.layer_range[1])
    return tuple(cuts)


def listen_port(stages: Sequence[Stage], stage: Stage) -> int:
    """Return the port a stage listens on; 0 means chosen by the system."""
    if stage.port or stage.is_local:
        return stage.port
    return relay_port_of(stages, stage) if stage.relay else STAGE_PORT + place_on_host(stages, stage)


def relay_port_of(stages: Sequence[Stage], stage: Stage) -> int:
    """Return the port of a relayed stage at the coordinator's host: the next one that no stage there has been given."""
    given = {other.port for other in stages if other.port and (other.is_local or other.relay)}
    free = (port for port in itertools.count(STAGE_PORT) if port not in given)
    waiting = [other.name for other in stages if other.relay and not other.port]
    return next(itertools.islice(free, waiting.index(stage.name), None))


def metrics_port(stages: Sequence[Stage], stage: Stage) -> int:
    """Return the port of a stage's Prometheus endpoint; 0 means chosen by the system."""
    return stage.metrics_port if stage.metrics_port or stage.is_local else METRICS_PORT + place_on_host(stages, stage)


def place_on_host(stages: Sequence[Stage], stage: Stage) -> int:
    """Return how many stages of the same host come before this one."""
    return [other.name for other in stages if other.host == stage.host].index(stage.name)
