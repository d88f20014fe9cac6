"""`relayline cache`: the artifacts that stages of this machine fetched from coordinators."""

from __future__ import annotations

import datetime
import json
from pathlib import Path

import click

from relayline.wire.common.places import artifacts_dir

MIB = 1 << 20


@click.command("cache", short_help="Show or remove the artifacts that joining stages fetched.")
@click.option("--cache", "directory", type=click.Path(path_type=Path, file_okay=False), help="As given to `stage`.")
@click.option("--clear", is_flag=True, help="Remove them; a stage that needs one again fetches it again.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per artifact.")
def cache_command(directory: Path | None, clear: bool, as_json: bool) -> None:
    """Show the artifacts that stages of this machine fetched when they joined, or remove them.

    They stay until they are removed here. Stages that run keep what they have loaded.
    """
    from relayline.stage.joining.artifact_store import cached, remove

    cache = directory or artifacts_dir()
    entries = cached(cache)
    for entry in entries:
        removed = clear and remove(entry)
        used = datetime.datetime.fromtimestamp(entry.used_s, datetime.UTC)
        state = "removed" if removed else "being fetched" if clear else "whole" if entry.is_whole else "partial"
        facts = {"file": entry.file, "sha256": entry.directory.name, "size_bytes": entry.size_bytes, "state": state,
                 "used": used.isoformat(timespec="seconds")}  # fmt: skip
        text = f"{entry.directory.name[:12]}  {entry.size_bytes / MIB:>10,.1f} MiB  {used:%Y-%m-%d %H:%M}  {state:<13}"
        print(json.dumps(facts) if as_json else f"{text}  {entry.file}")
    if not as_json:
        print(f"{cache}: {len(entries)} artifacts, {sum(entry.size_bytes for entry in entries) / MIB:,.1f} MiB")
