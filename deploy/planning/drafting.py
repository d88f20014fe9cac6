"""What the coordinator takes of its machine, with its draft model, whose memory is estimated like a stage's, and with
the encoder of images and audio.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from relayline.coordinator.drafting.streams import STEP_ROWS_MAX
from relayline.coordinator.model.gguf_file import open_model
from relayline.coordinator.model.inspection import ModelFacts, inspect_model
from relayline.coordinator.planner.instance import Gpu, Load, ModelShape, Offload
from relayline.coordinator.planner.memory import COORDINATOR_BYTES, PROCESS_BYTES, StageMemory, stage_memory
from relayline.deploy.machine.addresses import is_this_machine
from relayline.deploy.machine.gpus import Gpu as GpuHere
from relayline.deploy.machine.gpus import known_gpus
from relayline.deploy.manifest import Manifest, is_local
from relayline.deploy.manifest.model import AUTO_PROJECTOR
from relayline.deploy.planning.offload import offloads_of
from relayline.deploy.planning.shapes import shape_of
from relayline.stage.engine.device_choice import each_once
from relayline.wire.common.errors import RelaylineError
from relayline.wire.common.places import expanded
from relayline.wire.model_files.eagle3 import GUESSES, Eagle3File, is_eagle3, read_eagle3, widened
from relayline.wire.settings.table import EngineSettings, ServingSettings

KV_F16_BYTES = 2
Gpus = Callable[[], Sequence[GpuHere]]


def eagle3_of(serving: ServingSettings) -> Eagle3File | None:
    """Return the draft model of these settings where it is an EAGLE-3 model, which drafts on the last stage; else None.

    None also where its file is not here yet or cannot be read: its next reader reports that.
    """
    path = Path(serving.draft_model)
    if not serving.draft_model or not path.exists():
        return None
    try:
        return read_eagle3(path) if is_eagle3(path) else None
    except RelaylineError:
        return None


def drafted_shape(facts: ModelFacts, serving: ServingSettings) -> ModelShape:
    """Return the sizes of a model with what an EAGLE-3 model of these settings adds: on the last stage its weights and
    cells, between stages the inner rows that it reads.
    """
    shape, eagle = shape_of(facts), eagle3_of(serving)
    if eagle is None:
        return shape
    table_bytes = 0 if eagle.has_table else shape.embedding_bytes
    return dataclasses.replace(
        shape,
        prediction_bytes=eagle.weights_bytes + table_bytes,
        prediction_kv_bytes=KV_F16_BYTES * eagle.kv_values,
        row_widths=widened(facts.row_widths, facts.n_embd, eagle.layers),
    )


def guesses_of(serving: ServingSettings, engine: EngineSettings) -> int:
    """Return how many tokens the last stage guesses behind a sample; 0: it holds nothing to guess with."""
    return GUESSES if eagle3_of(serving) is not None else engine.mtp_drafts


def draft_memory(serving: ServingSettings, gpus: Gpus = known_gpus) -> StageMemory | None:
    """Return what the draft model of these settings takes on the coordinator's machine; None where there is none.

    None also where its file is not here yet or cannot be read: its next reader reports that.
    """
    path = Path(serving.draft_model)
    if not serving.draft_model or not path.exists() or eagle3_of(serving) is not None:
        return None
    try:
        facts = inspect_model(path)
    except RelaylineError:
        return None
    load = Load(ctx_tokens=serving.draft_ctx_tokens, n_lanes=1, window_cells="all", max_rows=STEP_ROWS_MAX)
    offload = None
    if serving.draft_gpu_layers and gpus():
        offload = Offload(Gpu("of the draft model"), serving.draft_gpu_layers)
    return stage_memory(shape_of(facts), load, 0, facts.n_layers, offload)


def gpus_bytes(gpus: Gpus = known_gpus) -> int:
    """Return the memory of all GPUs of this machine."""
    return sum(gpu.memory_bytes for gpu in each_once(gpus()))


def beside_draft(
    offloads: Sequence[Offload | None], draft: StageMemory | None, gpus: Gpus = known_gpus
) -> list[Offload | None]:
    """Return the offloads of stages with what a draft model takes of the GPUs of this machine, of each its share."""
    if draft is None or draft.gpu is None:
        return list(offloads)
    total_bytes = gpus_bytes(gpus)
    found: list[Offload | None] = []
    for offload in offloads:
        if offload is not None and offload.gpu.memory_bytes is not None:  # of this machine
            share_bytes = draft.gpu.total_bytes * offload.gpu.memory_bytes // total_bytes
            offload = dataclasses.replace(offload, gpu=dataclasses.replace(offload.gpu, draft_bytes=share_bytes))
        found.append(offload)
    return found


def offloads_beside_draft(manifest: Manifest, facts: ModelFacts) -> list[Offload | None]:
    """Return the offload of each stage of a manifest, with what its draft model takes of the same GPUs."""
    if not any(stage.gpu_layers_used for stage in manifest.stages):
        return [None] * len(manifest.stages)
    gpus = known_gpus() if any(stage.is_local and stage.gpu_layers_used for stage in manifest.stages) else ()
    found = offloads_of(manifest, [*open_model(facts.path).tensors.values()], facts.n_layers, gpus)
    return beside_draft(found, draft_memory(manifest.serving))


class Reserved(NamedTuple):
    """Bytes of this machine's memory, without that of its GPUs."""

    total_bytes: int = 0
    """Of the coordinator, its draft model and its encoder."""
    draft_bytes: int = 0
    """The draft model's part."""


def has_coordinator(manifest: Manifest) -> bool:
    """Return whether the coordinator of a manifest runs on this machine; blocks where its host is a name.

    Where others join, its host is an address of this machine that they reach.
    """
    host = manifest.spec.coordinator.host
    return is_local(host) or is_this_machine(host)


def reserved_for_coordinator(manifest: Manifest) -> Reserved:
    """Return what a coordinator on this machine takes of its memory."""
    draft = draft_memory(manifest.serving)
    draft_bytes = 0 if draft is None else draft.total_bytes
    return Reserved(COORDINATOR_BYTES + draft_bytes + encoder_bytes(manifest.serving), draft_bytes)


def encoder_bytes(serving: ServingSettings, gpus: Gpus = known_gpus) -> int:
    """Return what the process that encodes images and audio takes of this machine's memory.

    0 where there is no projector, where its file is not here yet (`auto` is none yet), and on a machine with a GPU,
    which holds its weights.
    """
    path = expanded(serving.mmproj)
    if serving.mmproj in ("", AUTO_PROJECTOR) or not path.is_file() or gpus():
        return 0
    return PROCESS_BYTES + path.stat().st_size
