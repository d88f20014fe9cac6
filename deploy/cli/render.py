"""`relayline render`: a manifest as Compose, Kubernetes or LeaderWorkerSet files."""

from __future__ import annotations

import os
from importlib import resources
from pathlib import Path

import click

from relayline.deploy.cli.options import OUTPUT
from relayline.deploy.cli.paths import Directory, FileToRead
from relayline.deploy.launch.lanes import with_usual_lanes
from relayline.deploy.manifest import Manifest, load_manifest
from relayline.deploy.manifest.gateway import is_gateway, load_gateway
from relayline.deploy.render import compose, compose_hosts
from relayline.deploy.render.cluster import KUSTOMIZATION_FILE, kustomization
from relayline.deploy.render.front import Front
from relayline.deploy.render.front import notes as front_notes
from relayline.deploy.render.inside import notes
from relayline.deploy.render.observability import DASHBOARDS_DIR
from relayline.deploy.render.targets import COMPOSE, TARGETS, render, render_gateway
from relayline.deploy.render.write import write_files
from relayline.wire.common.errors import UsageError
from relayline.wire.common.places import expanded


@click.command("render", short_help="Turn a manifest into Compose or Kubernetes files.")
@click.argument("manifest", type=FileToRead())
@click.option("--target", type=click.Choice(TARGETS), required=True, help="What will run the files.")
@click.option(*OUTPUT, "output", type=Directory(), default=None, help="Directory to write into [default: stdout].")
@click.option(
    "--force", is_flag=True, help="Also replace files there that were edited, or that relayline did not render."
)
def render_command(manifest: Path, target: str, output: Path | None, force: bool) -> None:
    """Turn MANIFEST into files for Compose or Kubernetes. They hold no secrets, only names of secrets.

    compose: every process on one machine. compose-hosts: one file for each host of the manifest, with the manifest's
    ports; copy it to its host and run `docker compose up` there. The top of each file says what else the host needs.

    Of a gateway's MANIFEST, compose and kubernetes write the gateway and every pipeline behind it that has a manifest.
    """
    if is_gateway(manifest):
        _render_gateway(manifest, target, output, force=force)
        return
    if target == compose_hosts.TARGET and output is None:
        raise UsageError("--target compose-hosts writes a file for each host; say where with --output DIR")
    loaded = with_usual_lanes(load_manifest(manifest))
    files = render(loaded, target, models_dir(loaded, output or loaded.directory))
    for note in notes(loaded, in_kubernetes=target not in COMPOSE):
        click.echo(f"relayline: note: {note}", err=True)
    if target == compose.TARGET and compose_hosts.has_several(loaded):
        several = "the manifest has several hosts and this file is for one; --target compose-hosts makes one for each"
        click.echo(f"relayline: note: {several}", err=True)
    _put(files, loaded.name, target, loaded.spec.deployment.namespace, output, force=force)


def _render_gateway(path: Path, target: str, output: Path | None, *, force: bool) -> None:
    from relayline.deploy.launch.gateway.pipelines import pipelines_behind  # it knows the gateway's HTTP server

    gateway = load_gateway(path)
    pipelines = tuple(each.prepared(with_usual_lanes) for each in pipelines_behind(gateway, {}))
    rendered = {each.name: each.manifest for each in pipelines if each.manifest is not None}
    directory = output or gateway.resolve(".")
    files = render_gateway(
        gateway, pipelines, target, {name: models_dir(one, directory) for name, one in rendered.items()}
    )
    front = Front(gateway, pipelines, {})
    for note in front_notes(front, in_kubernetes=target not in COMPOSE):
        click.echo(f"relayline: note: {note}", err=True)
    for name, one in rendered.items():
        if target == compose.TARGET and compose_hosts.has_several(one):
            click.echo(f"relayline: note: {name} has several hosts in its manifest, and this file is for one", err=True)
    _put(files, gateway.name, target, front.deployment.namespace, output, "Gateway", force=force)


def _put(
    files: dict[str, str],
    name: str,
    target: str,
    namespace: str | None,
    output: Path | None,
    kind: str = "Pipeline",
    *,
    force: bool,
) -> None:
    """Print the rendered files, or write them with their companions."""
    if output is None:
        click.echo("---\n".join(files.values()), nl=False)
        return
    if target in COMPOSE:
        files |= dashboards()
    else:
        files |= {KUSTOMIZATION_FILE: kustomization(name, target, namespace, list(files), kind)}
    for path in write_files(output, files, force=force):
        click.echo(f"wrote {path}", err=True)


def models_dir(manifest: Manifest, compose_dir: Path) -> str:
    """Return the model's directory relative to the directory of compose.yaml; absolute if the manifest says so."""
    if manifest.model_path is None or manifest.spec.model.path is None:
        return "."
    parent = manifest.model_path.parent
    if expanded(manifest.spec.model.path).is_absolute():
        return str(parent)
    relative = os.path.relpath(parent, compose_dir)
    return relative if relative.startswith(".") else f"./{relative}"


def dashboards() -> dict[str, str]:
    """Return Grafana's boards as installed, by their path next to compose.yaml."""
    folder = resources.files("relayline.deploy").joinpath("observability", "grafana", "dashboards")
    if not folder.is_dir():
        return {}
    boards = sorted(folder.iterdir(), key=lambda entry: entry.name)
    return {
        f"{DASHBOARDS_DIR}/{board.name}": board.read_text("utf-8") for board in boards if board.name.endswith(".json")
    }
