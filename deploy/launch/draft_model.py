"""Finds the draft model to serve with, and checks that it can draft for the model, before the model is split."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path

from relayline.coordinator.drafting.draft_model import check_drafts
from relayline.coordinator.model.eagle3 import target_of
from relayline.coordinator.model.gguf_file import open_model
from relayline.coordinator.model.inspection import check_has_weights, check_whole
from relayline.coordinator.model.pipeline_file import load_pipeline
from relayline.deploy.launch.eagle3 import check_eagle3, target_in
from relayline.deploy.launch.prepare import override
from relayline.deploy.machine.gpus import known_gpus
from relayline.deploy.manifest import Manifest
from relayline.deploy.models.hub_headers import model_or_headers
from relayline.deploy.models.model_source import is_on_hub, resolve_model
from relayline.deploy.planning.drafting import Gpus, draft_memory, gpus_bytes
from relayline.wire.common.errors import ModelFileError, StartError, UsageError
from relayline.wire.common.places import expanded
from relayline.wire.common.units import GIB
from relayline.wire.model_files.eagle3 import is_eagle3, read_eagle3
from relayline.wire.model_files.gguf_header import read_header
from relayline.wire.model_files.model_check import check_header
from relayline.wire.settings.setting import entry_of
from relayline.wire.settings.table import ServingSettings

_SETTING = entry_of(ServingSettings, "draft_model")


def with_draft_model(manifest: Manifest) -> Manifest:
    """Return the manifest with the draft model as an absolute path, loaded from the hub if it is there.

    Raises UsageError or ModelFileError where there is none.
    """
    if not manifest.serving.draft_model:
        return manifest
    return override(manifest, {_SETTING.place: str(find_draft_model(manifest.serving.draft_model))})


@contextlib.contextmanager
def shown_draft_model(manifest: Manifest, tell: Callable[[str], None]) -> Iterator[Manifest]:
    """Give the manifest with the path of its draft model, or of its header where the draft model is on the hub.

    `tell` gets a note where only the header was read, which is there until the end of the with block. Raises as
    `with_draft_model`.
    """
    named = manifest.serving.draft_model
    if not named or not is_on_hub(named):
        yield with_draft_model(manifest)
        return
    with contextlib.ExitStack() as stack:
        with _about_draft_model():
            shown = stack.enter_context(model_or_headers(named))
        if shown.note:
            tell(f"draft model: {shown.note}")
        yield override(manifest, {_SETTING.place: str(shown.path.absolute())})


@contextlib.contextmanager
def _about_draft_model() -> Iterator[None]:
    """Name the setting in errors."""
    try:
        yield
    except (UsageError, ModelFileError) as error:
        raise type(error)(f"{_SETTING.flag}: {error}") from None


def find_draft_model(reference: str) -> Path:
    """Return the path of a draft model: a file, or one of the hub. Raises UsageError or ModelFileError."""
    with _about_draft_model():
        return resolve_model(reference if is_on_hub(reference) else str(expanded(reference))).absolute()


def check_draft_model(serving: ServingSettings, model: Path) -> None:
    """Raise UsageError or ModelFileError for a draft model that cannot draft for this one."""
    if not serving.draft_model:
        return
    path = Path(serving.draft_model)
    with _about_draft_model():
        if is_eagle3(path):
            check_eagle3(read_eagle3(path), target_in(model), model)
            return
        check_header(read_header(path))
        draft = open_model(path)
        check_whole(draft)
        check_has_weights(draft)
        check_drafts(path, model)


def check_draft_memory(serving: ServingSettings, free_bytes: int | None, gpus: Gpus = known_gpus) -> None:
    """Raise for a draft model that this machine has no memory for: UsageError where its GPUs are too small, StartError
    where the memory that is free now is too little, since others may free theirs. `free_bytes`: None if unknown.
    """
    memory = draft_memory(serving, gpus)
    if memory is None:
        return
    needs = f"{_SETTING.flag}: {serving.draft_model} needs"
    if memory.gpu is not None and memory.gpu.total_bytes > (there_bytes := gpus_bytes(gpus)):
        raise UsageError(
            f"{needs} {memory.gpu.total_bytes / GIB:.2f} GiB of this machine's GPUs, which have "
            f"{there_bytes / GIB:.2f}{_of_cells(serving, memory.gpu.kv_bytes)}"
        )
    if free_bytes is not None and memory.total_bytes > free_bytes:
        raise StartError(
            f"{needs} {memory.total_bytes / GIB:.2f} GiB on this machine, which has {free_bytes / GIB:.2f} free"
            f"{_of_cells(serving, memory.kv_bytes)}"
        )


def _of_cells(serving: ServingSettings, kv_bytes: int) -> str:
    if not kv_bytes:
        return ""
    context = entry_of(ServingSettings, "draft_ctx_tokens")
    of_cells = f"{kv_bytes / GIB:.2f} are for {serving.draft_ctx_tokens:,} tokens"
    return f"; {of_cells}: a smaller {context.flag} takes less"


def served_draft_model(serving: ServingSettings, split_tokenizer: Path) -> ServingSettings:
    """Return the settings of `serve` with the draft model's path. Raises as `find_draft_model` and
    `check_draft_model`.

    `split_tokenizer`: the file with the vocabulary of the split that is served, in its directory.
    """
    if not serving.draft_model:
        return serving
    path = find_draft_model(serving.draft_model)
    serving = dataclasses.replace(serving, draft_model=str(path))
    with _about_draft_model():
        is_eagle = is_eagle3(path)
        if is_eagle:
            target = target_of(load_pipeline(split_tokenizer.parent, stages_here=False))
            check_eagle3(read_eagle3(path), target, split_tokenizer)
    if not is_eagle:
        check_draft_model(serving, split_tokenizer)
    return serving
