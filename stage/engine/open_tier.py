"""The tier that a stage's settings ask for."""

from __future__ import annotations

import logging

from relayline.stage.engine import ggml
from relayline.stage.engine.artifact import StageArtifact
from relayline.stage.engine.tier import Tier
from relayline.stage.engine.tier_disk import TierDisk
from relayline.wire.common.places import cache_dir, expanded
from relayline.wire.common.versions import version_of
from relayline.wire.settings.table import EngineSettings

log = logging.getLogger("relayline.stage")

_DIRECTORY = "prefixes"  # below relayline's cache


def open_tier(settings: EngineSettings, artifact: StageArtifact) -> Tier | None:
    """Return the tier, or None if the settings ask for none. A disk that cannot be used is reported in one line and
    left out.
    """
    disk = None
    if settings.prefix_disk_bytes:
        directory = expanded(settings.prefix_disk_dir) if settings.prefix_disk_dir else cache_dir() / _DIRECTORY
        try:
            disk = TierDisk(directory, identity_of(settings, artifact), settings.prefix_disk_bytes)
        except BlockingIOError:
            log.warning("another stage uses %s for its prefix cache; this one keeps prefixes only in memory", directory)
        except OSError as error:
            reason = error.strerror or error
            log.warning("%s cannot be used for the prefix cache: %s; prefixes stay in memory", directory, reason)
    if disk is None and not settings.prefix_memory_bytes:
        return None
    return Tier(settings.prefix_memory_bytes, disk)


def identity_of(settings: EngineSettings, artifact: StageArtifact) -> str:
    """Return everything besides its tokens that a lane's state depends on."""
    rope = artifact.long_rope
    is_long = rope is not None and settings.ctx_tokens > rope.original_tokens
    facts = (
        artifact.source_sha256, artifact.architecture, artifact.layer_start, artifact.layer_end, settings.kv_type,
        settings.layout_used, is_long, version_of("llama-cpp-python"), ggml.kernels(),
    )  # fmt: skip
    return "\n".join(map(str, facts))
