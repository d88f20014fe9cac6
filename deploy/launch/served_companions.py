"""The files that `serve` serves with a split: the projector, a draft model, and LoRA adapters."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from relayline.coordinator.http.edge.limits import limits_of
from relayline.coordinator.joining.config import OpenUnread
from relayline.coordinator.model.adapters import check_of_split
from relayline.coordinator.model.pipeline_file import load_pipeline
from relayline.coordinator.model.slices import TOKENIZER_NAME
from relayline.coordinator.schedule.config import ScheduleConfig
from relayline.deploy.launch.draft_model import served_draft_model
from relayline.deploy.launch.eagle3 import check_one_drafter, inner_layers, served_eagle3
from relayline.deploy.launch.projector import served_projector
from relayline.wire.model_files.adapters import Adapter, load_adapters
from relayline.wire.model_files.eagle3 import Drafter
from relayline.wire.settings.setting import from_parameters
from relayline.wire.settings.table import EngineSettings, ServingSettings


class Companions(NamedTuple):
    """What is served with a split."""

    serving: ServingSettings
    """With the paths of projector and of the model that drafts beside the coordinator."""
    adapters: tuple[Adapter, ...]
    inner_layers: tuple[int, ...] = ()
    """Layers whose inputs an EAGLE-3 model reads."""
    drafter: Drafter | None = None
    """That model, where stages join."""

    def scheduled(self, schedule: ScheduleConfig) -> ScheduleConfig:
        """Return a schedule that waits for no guesses from beside the coordinator if none come from there."""
        return schedule if self.serving.draft_model else dataclasses.replace(schedule, draft_model_tokens=0)


def served_companions(
    serving: ServingSettings, given: Mapping[str, Any], split: Path, open_unread: OpenUnread | None
) -> Companions:
    """Return the settings of `serve` with the paths of projector and draft model, and the adapters. Blocks.

    `open_unread`: reads artifacts of a model whose weights are on the hub. Raises UsageError or ModelFileError for a
    file that is missing, or of another model.
    """
    adapters = served_adapters(serving, split)
    serving = served_draft_model(served_projector(serving, given), split / TOKENIZER_NAME)
    check_one_drafter(serving, from_parameters(EngineSettings, given))
    if not (layers := inner_layers(serving)):
        return Companions(serving, adapters)
    joins = given["join_listen"] is not None
    drafter = served_eagle3(serving, split, open_unread) if joins else None
    return Companions(dataclasses.replace(serving, draft_model=""), adapters, layers, drafter)


def served_adapters(serving: ServingSettings, split: Path) -> tuple[Adapter, ...]:
    """Return the adapters that are served with a split, each read whole. Blocks.

    Raises ModelFileError for one of another model, UsageError for one with a name of the model itself.
    """
    adapters = load_adapters(serving.lora)
    if adapters:
        file = load_pipeline(split, stages_here=False)
        aliases = limits_of(serving).model_aliases
        check_of_split(adapters, file, [serving.model_id or file.model_name, *aliases])
    return adapters
