"""`relayline pull`: downloads a model before it is needed."""

from __future__ import annotations

import json
from pathlib import Path

import click

from relayline.deploy.cli.options import Name
from relayline.deploy.cli.paths import Directory
from relayline.wire.common.units import bytes_text
from relayline.wire.settings.setting import entry_of
from relayline.wire.settings.table import ServingSettings


@click.command("pull", short_help="Download a model from the Hugging Face hub.")
@click.argument("model", type=Name())
@click.option(
    "--to",
    "directory",
    type=Directory(),
    default=None,
    help="Also put the file(s) into this directory.",
)
@click.option(
    entry_of(ServingSettings, "mmproj").flag,
    "with_projector",
    is_flag=True,
    help="Download the repository's projector too, for images.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def pull_command(model: str, directory: Path | None, with_projector: bool, as_json: bool) -> None:
    """Download MODEL into the hub's cache and print its path.

    An interrupted download goes on where it stopped. MODEL is ORG/REPO[:QUANT], hf://ORG/REPO[:QUANT] or
    hf://ORG/REPO/FILE.gguf, each with an optional @REVISION. HF_TOKEN, HF_HOME and HF_ENDPOINT have their usual
    meaning.

    With --to the files are also in that directory, under their own names, without taking space twice if the file system
    allows it. A model that is already there is left alone.

    With --mmproj it downloads the repository's projector (mmproj*.gguf) too; if there are several, the one in f16.
    """
    from relayline.coordinator.model.gguf_file import open_model
    from relayline.deploy.models.model_source import projector_of, resolve_model, resolve_projector
    from relayline.deploy.models.placed import check_directory, place, placed_before

    path = placed_before(model, directory) if directory is not None else None
    is_here = path is not None  # then the hub is not asked for anything
    if path is None:
        if directory is not None:
            check_directory(directory)
        path = resolve_model(model)
        if directory is not None:
            path = place(path, directory)
    files = open_model(path).files
    n_bytes = sum(file.size_bytes for file in files)
    projector = resolve_projector(model, path) if with_projector else None
    if projector is not None and directory is not None:
        projector = place(projector, directory)
    if as_json:
        more = {"mmproj": str(projector)} if projector else {}
        click.echo(json.dumps({"path": str(path), "files": len(files), "size_bytes": n_bytes, **more}))
        return
    shards = f" in {len(files)} files" if len(files) > 1 else ""
    flag = " --mmproj auto" if projector else ""
    click.echo(f"{path}\n{bytes_text(n_bytes)}{shards}; next: relayline up {model}{flag}")
    if projector is not None:
        click.echo(f"projector: {projector}")
    elif not is_here and (name := projector_of(model)):
        click.echo(f"its repository has a projector for images, {name}: --mmproj downloads it too")
