"""`relayline pull`: a model loaded before it is needed."""

from __future__ import annotations

import json
from pathlib import Path

import click


@click.command("pull", short_help="Load a model from the Hugging Face hub.")
@click.argument("model")
@click.option(
    "--to",
    "directory",
    type=click.Path(path_type=Path, file_okay=False),
    default=None,
    help="Also put the file(s) into this directory.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def pull_command(model: str, directory: Path | None, as_json: bool) -> None:
    """Load MODEL into the hub's cache and print where it is.

    An interrupted download is resumed. MODEL is ORG/REPO[:QUANT], hf://ORG/REPO[:QUANT] or hf://ORG/REPO/FILE.gguf,
    each with an optional @REVISION. HF_TOKEN, HF_HOME and HF_ENDPOINT have their usual meaning.

    With --to the files are in that directory too, under their own names. Where the file system allows it they take no
    space twice. A model that is there already is left alone.
    """
    from relayline.coordinator.model.gguf_file import open_model
    from relayline.deploy.launch.model_source import resolve_model
    from relayline.deploy.launch.placed import place, placed_before

    path = placed_before(model, directory) if directory is not None else None
    if path is None:
        path = resolve_model(model)
        if directory is not None:
            path = place(path, directory)
    files = open_model(path).files
    n_bytes = sum(file.size_bytes for file in files)
    if as_json:
        click.echo(json.dumps({"path": str(path), "files": len(files), "size_bytes": n_bytes}))
        return
    shards = f" in {len(files)} files" if len(files) > 1 else ""
    click.echo(f"{path}\n{n_bytes / (1 << 30):.2f} GiB{shards}; next: relayline up {model}")
