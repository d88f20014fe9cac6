"""The tier that a stage's settings ask for."""

from __future__ import annotations

import logging

from relayline.stage.engine import ggml
from relayline.stage.engine.artifact import StageArtifact
from relayline.stage.engine.native import LANES_MAX
from relayline.stage.engine.tier import Tier
from relayline.stage.engine.tier_disk import TierDisk
from relayline.wire.common.memory import available_memory_bytes, total_memory_bytes
from relayline.wire.common.places import cache_dir, expanded
from relayline.wire.common.versions import version_of
from relayline.wire.settings.table import PREFIX_MEMORY_AUTO, EngineSettings

log = logging.getLogger("relayline.stage")

AUTO_BYTES_MAX = 8 << 30  # of host memory; as much as llama-server's prompt cache takes by itself
KEPT_FREE_PART = 4  # one part of so many of the host's memory stays free
AUTO_FROM_NS = 100_000_000  # a noticeable wait; shorter prefills are not worth a copy
HELD_LANES = 2  # sequences of an engine besides its lanes
_DIRECTORY = "prefixes"  # below relayline's cache


def open_tier(
    settings: EngineSettings, artifact: StageArtifact, *, keeps_window: bool = False, name: str = ""
) -> Tier | None:
    """Return the tier, or None if the settings ask for none. A disk that cannot be used is reported in one line and
    left out. keeps_window: as of `stage.engine.kv_cache.Attention`. name: the stage's, whatever layers it has.
    """
    disk = None
    if settings.prefix_disk_bytes:
        directory = expanded(settings.prefix_disk_dir) if settings.prefix_disk_dir else cache_dir() / _DIRECTORY
        try:
            identity = identity_of(settings, artifact, keeps_window=keeps_window)
            owner = f"{artifact.source_sha256}\n{name or f'stage-{artifact.stage_index}'}"
            disk = TierDisk(directory, identity, settings.prefix_disk_bytes, owner)
        except BlockingIOError:
            log.warning("another stage uses %s for its prefix cache; this one keeps prefixes only in memory", directory)
        except OSError as error:
            reason = error.strerror or error
            log.warning("%s cannot be used for the prefix cache: %s; prefixes stay in memory", directory, reason)
    bytes_max = settings.prefix_memory_bytes
    if bytes_max == PREFIX_MEMORY_AUTO:
        if available_memory_bytes() is not None:
            return Tier(AUTO_BYTES_MAX, disk, spare_memory_bytes, store_from_ns=0 if disk is not None else AUTO_FROM_NS)
        bytes_max = 0
    return Tier(bytes_max, disk) if disk is not None or bytes_max else None


def held_lanes(settings: EngineSettings, spare_lanes: int) -> int:
    """Return how many lanes that share cells can be on their way into the tier at a time."""
    if not spare_lanes or not (settings.prefix_memory_bytes or settings.prefix_disk_bytes):
        return 0
    return max(0, min(HELD_LANES, LANES_MAX - settings.n_lanes - spare_lanes))


def spare_memory_bytes() -> int:
    """Return the memory by which an automatic tier may grow, below 0 if it should give some back."""
    return (available_memory_bytes() or 0) - (total_memory_bytes() or 0) // KEPT_FREE_PART


def identity_of(settings: EngineSettings, artifact: StageArtifact, *, keeps_window: bool) -> str:
    """Return everything besides its tokens that a lane's state depends on.

    Of a window that is kept alone there are as many cells as a step's rows need.
    """
    rope = artifact.long_rope
    is_long = rope is not None and settings.ctx_tokens > rope.original_tokens
    step_rows = settings.max_rows if keeps_window else 0
    facts = (
        artifact.source_sha256, artifact.architecture, artifact.layer_start, artifact.layer_end, settings.kv_type,
        settings.layout_used, is_long, step_rows, version_of("llama-cpp-python"), ggml.kernels(),
    )  # fmt: skip
    return "\n".join(map(str, facts))
