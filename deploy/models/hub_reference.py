"""The names by which users call models of the hub. Pure."""

from __future__ import annotations

import dataclasses
import re

from relayline.deploy.models.hub_choice import SHARD
from relayline.wire.common.errors import UsageError

SHARDS_MAX = 4_096  # as many as a sharded set may have, see coordinator.model.gguf_file
_NAME = r"[A-Za-z0-9_][A-Za-z0-9_.-]*"
_REFERENCE = re.compile(r"hf://([^/@]+)/([^/@]+)/([^@]+\.gguf)(?:@(.+))?")
_REPOSITORY = re.compile(rf"(?:hf://)?({_NAME}/{_NAME})(?::([A-Za-z0-9_.-]+))?(?:@([^@\s]+))?")


@dataclasses.dataclass(frozen=True, slots=True)
class HubFile:
    """One file of a repository on the hub."""

    repo: str  # ORG/NAME
    file: str  # path inside the repository; empty: chosen by `quant`
    revision: str = ""  # branch, tag or commit; empty is the repository's main branch
    quant: str = ""  # the quantisation that is wanted; empty: the usual one

    def shards(self) -> list[str]:
        """Return the files that make up the model, the first shard first. Raises UsageError for an impossible set."""
        named = SHARD.fullmatch(self.file)
        if named is None:
            return [self.file]
        stem, number, count = named[1], int(named[2]), int(named[3])
        if not 1 <= number <= count <= SHARDS_MAX:
            raise UsageError(f"{self.file}: shard {number} of {count} cannot be")
        return [f"{stem}-{index:05d}-of-{count:05d}.gguf" for index in range(1, count + 1)]


def is_hub_name(text: str) -> bool:
    """Return whether a text can name a repository of the hub, as ORG/NAME[:QUANT]."""
    found = _REPOSITORY.fullmatch(text)
    return found is not None and not found[1].endswith(".gguf")


def parse_reference(reference: str) -> HubFile:
    """Read hf://ORG/REPO/FILE.gguf[@REVISION], or [hf://]ORG/REPO[:QUANT][@REVISION]. Raises UsageError."""
    found = _REFERENCE.fullmatch(reference)
    if found is not None and not any(part in ("", ".", "..") for part in found[3].split("/")):
        return HubFile(f"{found[1]}/{found[2]}", found[3], found[4] or "")
    named = _REPOSITORY.fullmatch(reference)
    if named is None or found is not None or named[1].endswith(".gguf"):
        raise UsageError(
            f"{reference!r} is not a model on the hub; write hf://ORG/REPO/FILE.gguf, hf://ORG/REPO or hf://ORG/REPO:QUANT"
        )
    return HubFile(named[1], "", named[3] or "", named[2] or "")
