"""How a coordinator that serves has its model split anew: in a process of its own, beside the splits of before."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from relayline.wire.common.child_command import module_command
from relayline.wire.common.errors import ArtifactError

if TYPE_CHECKING:
    from relayline.deploy.manifest import Manifest

Cut = Callable[[tuple[int, ...]], Path]


def model_of(manifest: Manifest | None) -> Path | None:
    """Return the model's file if the manifest names one here."""
    return manifest.model_path if manifest is not None else None


def cutter(model: Path | None) -> Cut | None:
    """Return what splits a model at given layers and says where, None without a model.

    It blocks, and raises ArtifactError with what `relayline split` said.
    """
    if model is None:
        return None

    def cut(cuts: tuple[int, ...]) -> Path:
        from relayline.deploy.launch.splits import split_place

        place = split_place(model, None, cuts)
        where = ("--cuts", ",".join(map(str, cuts)), "--out", str(place))
        command = module_command("relayline.deploy.cli", "split", str(model.absolute()), *where)
        done = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
        if done.returncode:
            lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
            raise ArtifactError(lines[-1].removeprefix("relayline: error: "))
        return place

    return cut
