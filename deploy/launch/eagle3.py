"""An EAGLE-3 model of a launch: whether it fits the model, and the file that the last stage gets."""

from __future__ import annotations

import functools
import logging
from pathlib import Path

from relayline.coordinator.drafting.draft_model import check_drafts
from relayline.coordinator.joining.config import OpenUnread
from relayline.coordinator.model.eagle3 import Target, check_target, served
from relayline.coordinator.model.inspection import inspect_model
from relayline.coordinator.model.pipeline_file import load_pipeline
from relayline.deploy.manifest import Manifest
from relayline.deploy.planning.drafting import eagle3_of
from relayline.wire.common.errors import ModelFileError, UsageError
from relayline.wire.common.kv_layout import choose_pipeline_layout
from relayline.wire.model_files.eagle3 import Drafter, Eagle3File, read_eagle3
from relayline.wire.settings.setting import entry_of
from relayline.wire.settings.table import EngineSettings, ServingSettings

log = logging.getLogger("relayline.up")
_SETTING = entry_of(ServingSettings, "draft_model")


def check_eagle3(eagle: Eagle3File, target: Target, vocabulary: Path) -> None:
    """Raise UsageError or ModelFileError for an EAGLE-3 model that cannot draft for this model."""
    check_target(eagle, target)
    check_drafts(eagle.file.path, vocabulary, reads_rows=True)


def target_in(model: Path) -> Target:
    """Return what an EAGLE-3 model must know of a model's file. Raises ModelFileError."""
    facts = inspect_model(model)
    is_plain = set(facts.row_widths) == {facts.n_embd} and not facts.sidebands.deepstack_layers
    return Target(facts.architecture, facts.n_layers, facts.n_embd, facts.n_vocab, is_plain)


def warn_of_unused_eagle3(manifest: Manifest, path: Path) -> None:
    """Warn where an EAGLE-3 model could not draft for a model as it is served. Raises ModelFileError."""
    if eagle3_of(manifest.serving) is None:
        return
    facts, engine = inspect_model(path), manifest.engine
    model = facts.model_name or facts.architecture
    gpu_layers = [stage.gpu_layers_used for stage in manifest.stages]
    layout = choose_pipeline_layout(
        engine.kv_layout, facts.architecture, ctx_tokens=engine.ctx_tokens, gpu_layers=gpu_layers
    )
    if any(facts.state_bytes_per_lane) and not engine.rewind_rows:
        rewinds = entry_of(EngineSettings, "rewind_rows").flag
        text = "%s does nothing without %s N: %s has recurrent states, which a wrong guess changes"
        log.warning(text, _SETTING.flag, rewinds, model)
    elif facts.window_tokens and layout != "per-lane":
        text = "%s does nothing with shared KV cells: %s has sliding windows; --kv-layout per-lane lets it draft"
        log.warning(text, _SETTING.flag, model)


def served_eagle3(serving: ServingSettings, split: Path, open_unread: OpenUnread | None) -> Drafter | None:
    """Return the EAGLE-3 model that the settings of `serve` name, for the last stage; None for another one, or none.

    Raises as `coordinator.model.eagle3.served`.
    """
    if not (named := inner_layers(serving)):
        return None
    file = load_pipeline(split, stages_here=False)
    read = None if open_unread is None else functools.partial(open_unread, file, file.stages[0])
    try:
        drafter = served(read_eagle3(Path(serving.draft_model)), split, file, read)
    except (UsageError, ModelFileError) as error:
        raise type(error)(f"{_SETTING.flag}: {error}") from None
    fields = {"file": serving.draft_model, "layers": ",".join(map(str, named))}
    log.info("the last stage drafts with an EAGLE-3 model", extra={"fields": fields})
    return drafter


def check_one_drafter(serving: ServingSettings, engine: EngineSettings) -> None:
    """Raise UsageError where two kinds of drafts would be made on the last stage."""
    if engine.mtp_drafts and eagle3_of(serving) is not None:
        flag = entry_of(EngineSettings, "mtp_drafts").flag
        text = "both draft on the last stage; leave one of them out"
        raise UsageError(f"{_SETTING.flag} with an EAGLE-3 model and {flag} {engine.mtp_drafts} {text}")


def inner_layers(serving: ServingSettings) -> tuple[int, ...]:
    """Return the layers whose inputs the draft model reads, if it is an EAGLE-3 model; else none."""
    eagle = eagle3_of(serving)
    return () if eagle is None else eagle.layers
