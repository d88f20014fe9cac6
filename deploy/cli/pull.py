"""`relayline pull`: a model loaded before it is needed."""

from __future__ import annotations

import json

import click


@click.command("pull", short_help="Load a model from the Hugging Face hub.")
@click.argument("model")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def pull_command(model: str, as_json: bool) -> None:
    """Load MODEL into the hub's cache and print where it is.

    An interrupted download is resumed. MODEL is ORG/REPO[:QUANT], hf://ORG/REPO[:QUANT] or hf://ORG/REPO/FILE.gguf,
    each with an optional @REVISION. HF_TOKEN, HF_HOME and HF_ENDPOINT have their usual meaning.
    """
    from relayline.coordinator.model.gguf_file import open_model
    from relayline.deploy.launch.model_source import resolve_model

    path = resolve_model(model)
    files = open_model(path).files
    n_bytes = sum(file.size_bytes for file in files)
    if as_json:
        click.echo(json.dumps({"path": str(path), "files": len(files), "size_bytes": n_bytes}))
        return
    shards = f" in {len(files)} files" if len(files) > 1 else ""
    click.echo(f"{path}\n{n_bytes / (1 << 30):.2f} GiB{shards}; next: relayline up {model}")
