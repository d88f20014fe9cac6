"""`relayline cache`: what relayline keeps on this machine's disk, and removing it."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from relayline.deploy.cli.options import FloatRange
from relayline.deploy.cli.paths import Directory
from relayline.wire.common.errors import StartError, UsageError
from relayline.wire.common.places import artifacts_dir
from relayline.wire.common.texts import counted
from relayline.wire.common.units import MIB

if TYPE_CHECKING:
    from relayline.deploy.launch.cached import Kept

DAY_S = 86_400.0
KINDS = ("splits", "artifacts", "downloads")
REMOVED = "removed"  # what became of an entry


@click.command("cache", short_help="Show or remove splits, fetched artifacts and downloads.")
@click.argument("kind", type=click.Choice(KINDS), required=False)
@click.option(
    "--cache",
    "directory",
    type=Directory(),
    help="The directory that `stage --cache` names.",
)
@click.option("--clear", is_flag=True, help="Remove the listed files; they are made or fetched again when needed.")
@click.option("--unused-days", type=FloatRange(0), default=0.0, help="Only files unused for this many days.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per entry.")
def cache_command(kind: str | None, directory: Path | None, clear: bool, unused_days: float, as_json: bool) -> None:
    """Show or remove the files that relayline keeps on this machine: splits of models, artifacts that joining stages
    fetched, and models of the Hugging Face hub.

    Only what moves of layers no longer need is removed automatically. --clear leaves alone the splits and artifacts of
    pipelines and stages that run here. It removes downloads, which other programs may use too, only if you name them:
    `cache downloads --clear`. With --cache only the artifacts in that directory are listed.
    """
    if directory is not None and kind not in (None, "artifacts"):
        raise UsageError(f"--cache names a directory of artifacts; it has no {kind}")
    entries = _entries(kind, directory)
    if unused_days:
        since_s = datetime.datetime.now(datetime.UTC).timestamp() - unused_days * DAY_S
        entries = [each for each in entries if each.used_s <= since_s]
    summed = []
    for entry in sorted(entries, key=lambda each: each.used_s):
        state = _outcome(entry, kind) if clear else entry.state
        _show(entry, state, as_json=as_json)
        summed += [entry] if not clear or state == REMOVED else []
    if not as_json:
        counts = {name: sum(each.kind == name for each in summed) for name in KINDS}
        kinds = (kind,) if kind else KINDS if directory is None else ("artifacts",)
        listed = ", ".join(_counted(counts[name], name) for name in kinds)
        where, freed = f"{directory}: " if directory is not None else "", "freed " if clear else ""
        print(f"{where}{freed}{listed}, {sum(entry.size_bytes for entry in summed) / MIB:,.1f} MiB")


def _counted(count: int, kind: str) -> str:
    return counted(count, kind.removesuffix("s"))


def _entries(kind: str | None, directory: Path | None) -> list[Kept]:
    from relayline.deploy.launch.cached import kept_artifacts, kept_downloads, kept_splits

    found = []
    if directory is None and kind in (None, "splits"):
        found += kept_splits()
    if kind in (None, "artifacts"):
        found += kept_artifacts(directory or artifacts_dir())
    if directory is None and kind in (None, "downloads"):
        found += kept_downloads()
    return found


def _outcome(entry: Kept, kind: str | None) -> str:
    """Remove an entry where it may be; returns what became of it. Raises StartError where the system forbids it."""
    from relayline.deploy.launch.cached import IN_USE

    if entry.state == IN_USE or (entry.kind == "downloads" and kind is None):
        return "kept"
    try:
        return REMOVED if entry.remove() else "being made" if entry.kind == "splits" else "being fetched"
    except OSError as error:  # it may name a file without its directory
        raise StartError(f"{entry.path}: cannot be removed: {error.strerror or error}") from error


def _show(entry: Kept, state: str, *, as_json: bool) -> None:
    used = datetime.datetime.fromtimestamp(entry.used_s, datetime.UTC)
    facts = {"kind": entry.kind, "file": entry.name, "path": str(entry.path), "size_bytes": entry.size_bytes,
             "state": state, "used": used.isoformat(timespec="seconds")}  # fmt: skip
    if entry.kind == "artifacts":
        facts["sha256"] = entry.path.name
    size, when = f"{entry.size_bytes / MIB:>10,.1f} MiB", f"{used.astimezone():%Y-%m-%d %H:%M}"
    text = f"{entry.kind:<9}  {size}  {when}  {state:<13}  {entry.name}"
    print(json.dumps(facts) if as_json else text)
