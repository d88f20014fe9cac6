"""What stages have to be together: names, ports and layer ranges that fit. Pure; ValueError says what does not."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from relayline.deploy.manifest.stage import Stage


class StageError(ValueError):
    """Something wrong with one stage in the company of the others; `index` says which, `field` where."""

    def __init__(self, index: int, field: str, message: str) -> None:
        super().__init__(message)
        self.index, self.field = index, field


def check_stages(stages: Sequence[Stage], http_port: int) -> None:
    """Raise StageError if two stages share a name, or a port on one host, or one here has the coordinator's."""
    names: dict[str, int] = {}
    ports: dict[tuple[str, int], str] = {}
    for index, stage in enumerate(stages):
        if stage.name in names:
            raise StageError(index, "name", f"stage name {stage.name!r} is taken by stage {names[stage.name]}")
        names[stage.name] = index
        for field, port in (("port", stage.port), ("metricsPort", stage.metrics_port)):
            owner = ports.setdefault((stage.host, port), stage.name)
            if port and (owner != stage.name or (field == "metricsPort" and port == stage.port)):
                raise StageError(index, field, f"port {port} on {stage.host} is taken by stage {owner!r}")
            if port and port == http_port and stage.is_local:
                raise StageError(index, field, f"port {port} is taken by the coordinator's http")
        if stage.gpu_layers is not None and stage.device == "cpu":
            raise StageError(index, "gpuLayers", "gpuLayers needs `device: gpu`")


def check_spares(spares: Sequence[Stage]) -> None:
    """Raise ValueError for a spare that is given layers: it takes those of another stage."""
    for spare in spares:
        if spare.layer_range is not None:
            raise ValueError(f"spare {spare.name!r} takes the layers of the stage that it stands in for; leave out its")


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
        where = f"after stage {before!r} ends at {end}" if before else "at the start of the model"
        if left < 0:
            raise StageError(index, "layers", f"stage {before!r} holds {_layers(start, end)} already")
        if n_auto == 0 and left > 0:
            raise StageError(index, "layers", f"no stage holds {_layers(end, start)} {where}; start at {end}")
        if left < n_auto:
            raise StageError(
                index, "layers", f"{n_auto} auto stages have to share {left} layers {where}; each needs at least one"
            )
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


def place_on_host(stages: Sequence[Stage], stage: Stage) -> int:
    """Return how many stages of the same host come before this one."""
    return [other.name for other in stages if other.host == stage.host].index(stage.name)


def _layers(start: int, end: int) -> str:
    return f"layer {start}" if end - start == 1 else f"layers {start}..{end - 1}"
