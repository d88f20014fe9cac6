"""Measures how fast this machine runs a model, on small slices of that very model, and remembers it.

Where the weights are on the hub, slices have zeros in their place, but for routers of experts. They take about as long:
dense layers of Q4_0 mostly within 4 %, and up to 7 % apart, at 1 to 64 rows.

Three slices are cut: some layers, fewer layers, and the last layers with the head (see planner.speed.from_samples for
why). Each is calibrated by `relayline calibrate`, in as many processes at once as stages will work at once, because
neighbours share caches and memory bandwidth.
"""

from __future__ import annotations

import hashlib
import json
import statistics
import subprocess
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from relayline.coordinator.model.content_key import content_key
from relayline.coordinator.model.cuts import is_allowed, legal_cuts, ranges
from relayline.coordinator.model.gguf_file import open_model
from relayline.coordinator.model.inspection import BLOCK_NAME, ModelFacts, inspect_model
from relayline.coordinator.model.origin import origins_of
from relayline.coordinator.planner.speed import Sample, Speed, from_samples
from relayline.stage.speed.calibrate import ROWS_DIFFER
from relayline.stage.speed.machine_key import machine_facts
from relayline.wire.common.child_command import module_command
from relayline.wire.common.errors import ModelFileError, StartError
from relayline.wire.common.places import cache_dir
from relayline.wire.common.process import terminated_as_interrupted
from relayline.wire.common.remembered import recall, remember
from relayline.wire.common.scratch import scratch_directory
from relayline.wire.model_files.gguf_header import Tensor
from relayline.wire.model_files.hollow_slice import spreads_rows, write_hollow
from relayline.wire.settings.setting import arguments as as_arguments
from relayline.wire.settings.table import EngineSettings

CACHE_VERSION = 4
TURNS = 2  # of every slice
LANES = 64  # of a calibrated slice: as many rows want logits at once
CTX_TOKENS = 64  # of one lane: the cache stays small
SLICE_SHARE = 0.2  # of the model's layer bytes in the larger slice
SLICE_BYTES_MAX = 2 << 30
CALIBRATE_TIMEOUT_S = 300.0


class _Stored(msgspec.Struct, frozen=True):
    layers: list[tuple[int, float]]
    head: list[tuple[int, float]]
    step_ns: float


def known_speed(model: Path, *, n_threads: int, gpu_layers: int, kv_type: str, n_at_once: int = 1) -> Speed | None:
    """Return this model's measurement on this machine with this many threads and neighbours; None if there is none."""
    path = _path(model, n_threads, gpu_layers, kv_type, n_at_once)
    try:
        stored = msgspec.json.decode(recall(path), type=_Stored)
    except (OSError, msgspec.MsgspecError):
        return None
    return Speed(tuple(stored.layers), tuple(stored.head), stored.step_ns, "measured")


def measure_speed(
    model: Path,
    *,
    n_threads: int,
    gpu_layers: int,
    kv_type: str,
    n_at_once: int,
    tell: Callable[[str], None],
) -> Speed:
    """Measure, remember, return. Takes half a minute. Raises StartError when a slice cannot be run.

    Every slice has its turn twice, and the quicker time counts: what disturbs a machine for some seconds, disturbs one.
    Raises ModelFileError where weights on the hub decide alone which experts work.
    """
    facts, opened = inspect_model(model), open_model(model)
    is_hollow = bool(origins_of(opened))
    if is_hollow and not spreads_rows(_measured_tensors(opened.tensors.values(), facts)):
        raise ModelFileError(
            f"{model.name}: its weights decide which experts work, and are on the hub; measure with `download: whole`, "
            "or plan without --measure"
        )
    settings = EngineSettings(
        n_threads=n_threads, n_lanes=LANES, ctx_tokens=CTX_TOKENS, gpu_layers=gpu_layers, kv_type=kv_type
    ).of_architecture(facts.architecture)
    names = {"n_threads", "n_lanes", "ctx_tokens", "gpu_layers", "kv_type", "kv_layout"}
    arguments = as_arguments(settings, lambda entry: entry.name in names)
    path = _path(model, n_threads, gpu_layers, kv_type, n_at_once)
    path.parent.mkdir(parents=True, exist_ok=True)
    turns: list[list[Sample]] = []
    with terminated_as_interrupted(), scratch_directory("measure-", path.parent) as directory:
        slices = enumerate(slices_for(facts))
        artifacts = [_write(model, directory / str(at), each, is_hollow=is_hollow) for at, each in slices]
        for turn in range(TURNS):
            samples = []
            for at, artifact in enumerate(artifacts):
                what = f"slice {at + 1} of {len(artifacts)} of {model.name}, turn {turn + 1} of {TURNS}"
                tell(f"measuring {what}: {n_threads} threads, {n_at_once} at once")
                samples += _calibrate(artifact, arguments, n_at_once)
            turns.append(_mean(samples, n_at_once))
    speed = from_samples([_quickest(same) for same in zip(*turns, strict=True)])
    if speed is None:
        raise StartError(f"{model}: no slice of it could be measured")
    remember(path, msgspec.json.encode(_Stored(list(speed.layers), list(speed.head), speed.step_ns)))
    return speed


def slices_for(facts: ModelFacts, wanted_bytes: float = 0.0) -> Iterator[tuple[tuple[int, ...], int]]:
    """Yield (cuts, stage index) of the slices to measure: a large and a small one without head, and the last.

    `wanted_bytes`: about how large the large one is to be; 0.0: a share of the model.
    """
    edges = (0, *legal_cuts(facts), facts.n_layers)
    ends = [at for at in edges[1:-1] if is_allowed(facts, at, facts.n_layers)]
    if not ends:
        yield (), 0
        return
    last = ends[-1]  # the fewest layers next to the head
    wanted = wanted_bytes or min(SLICE_SHARE * sum(facts.layer_bytes), SLICE_BYTES_MAX)
    starts = [at for at in edges if at < last and is_allowed(facts, at, last) and _leads(facts, at)]
    starts.sort(key=lambda at: abs(sum(facts.layer_bytes[at:last]) - wanted))
    large = starts[0] if starts else None
    if large is not None:
        yield ((large, last), 1) if large else ((last,), 0)
        small = max(starts)
        if small > large:
            yield (small, last), 1
    yield (last,), 1


def _measured_tensors(tensors: Iterable[Tensor], facts: ModelFacts) -> Iterator[Tensor]:
    """Yield those of the layers that are measured."""
    edges = [ranges(facts.n_layers, cuts)[index] for cuts, index in slices_for(facts)]
    for tensor in tensors:
        block = BLOCK_NAME.match(tensor.name)
        if block is not None and any(start <= int(block["layer"]) < end for start, end in edges):
            yield tensor


def _leads(facts: ModelFacts, start: int) -> bool:
    """Tell whether the layers before `start` may be one stage, or are none."""
    return start == 0 or is_allowed(facts, 0, start)


def _write(model: Path, directory: Path, wanted: tuple[tuple[int, ...], int], *, is_hollow: bool) -> Path:
    from relayline.coordinator.model.split import hollow_slices, write_stages

    directory.mkdir()
    if not is_hollow:
        cuts, index = wanted
        (artifact,) = write_stages(model, directory, cuts, [index])
        return artifact
    (hollow,) = hollow_slices(model, [wanted])
    path = directory / "slice.gguf"
    write_hollow(path, hollow.header, hollow.size_bytes)
    return path


def _calibrate(artifact: Path, arguments: Sequence[str], n_at_once: int) -> list[Sample]:
    """Calibrate one slice in several processes at once."""
    command = module_command("relayline.deploy.cli", "calibrate", str(artifact), "--json", *arguments)
    children = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(n_at_once)
    ]
    try:
        outputs = [child.communicate(timeout=CALIBRATE_TIMEOUT_S) for child in children]
    except subprocess.TimeoutExpired as error:
        raise StartError(
            f"measuring took longer than {CALIBRATE_TIMEOUT_S:.0f} s; try again when this machine is idle"
        ) from error
    finally:
        for child in children:
            if child.poll() is None:
                child.kill()
                child.wait()
    for child, (_, complaint) in zip(children, outputs, strict=True):
        if child.returncode:
            raise StartError(f"measuring failed: {(complaint.strip().splitlines() or ['no reason given'])[-1]}")
    return [sample_of(json.loads(output)) for output, _ in outputs]


def sample_of(found: dict[str, Any]) -> Sample:
    """Read what `relayline calibrate ARTIFACT --json` printed. Raises KeyError, TypeError or ValueError."""
    return Sample(
        layer_bytes=int(found["artifact"]["layer_bytes"]),
        head_bytes=int(found["artifact"]["head_bytes"]),
        decode=_points(found["decode"]),
        prefill=_points(found["prefill"]),
    )


def _points(lines: list[dict[str, float]]) -> list[tuple[int, float]]:
    return [(int(line["rows"]), float(line["step_ms"]) * 1e6) for line in lines]


def _mean(samples: Sequence[Sample], n_at_once: int) -> list[Sample]:
    """Return one sample for every group of equal slices: the mean of the rows that all of them measured."""
    found = []
    for first in range(0, len(samples), n_at_once):
        group = samples[first : first + n_at_once]
        found.append(_joined(group, statistics.fmean))
    return found


def _quickest(samples: Sequence[Sample]) -> Sample:
    """Return the quickest times of one slice that was measured several times."""
    return _joined(samples, min)


def _joined(samples: Sequence[Sample], join: Callable[[list[float]], float]) -> Sample:
    """Make one sample of several of one slice: join the times of the rows that all of them measured."""
    decode = _joined_points([dict(sample.decode) for sample in samples], join)
    prefill = _joined_points([dict(sample.prefill) for sample in samples], join)
    return Sample(samples[0].layer_bytes, samples[0].head_bytes, decode, prefill)


def _joined_points(curves: Sequence[dict[int, float]], join: Callable[[list[float]], float]) -> list[tuple[int, float]]:
    common = sorted(set.intersection(*(set(curve) for curve in curves)))
    return [(rows, join([curve[rows] for curve in curves])) for rows in common]


def measured_key(model: Path) -> str:
    """Return what names a model's measurements: its content, and of experts also how they are measured."""
    return content_key(model) + (f", {ROWS_DIFFER}" if inspect_model(model).n_experts else "")


def _path(model: Path, n_threads: int, gpu_layers: int, kv_type: str, n_at_once: int) -> Path:
    parts = (CACHE_VERSION, measured_key(model), n_threads, gpu_layers, kv_type, n_at_once, machine_facts())
    return cache_dir() / "curves" / f"plan-{hashlib.sha256(repr(parts).encode()).hexdigest()[:32]}.json"
