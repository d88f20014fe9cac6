"""`relayline init`: a commented manifest for this machine."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import click

from relayline.deploy.cli.options import OUTPUT, Line
from relayline.deploy.cli.paths import FileToRead, FileToWrite, write_text
from relayline.deploy.launch.here import at_home
from relayline.deploy.manifest import parse_manifest
from relayline.deploy.manifest.deployment import HF_FILE
from relayline.deploy.manifest.model import HUB_SCHEME
from relayline.deploy.manifest.schema import SCHEMA_FILE
from relayline.deploy.manifest.smallest import smallest_manifest, with_hosts
from relayline.deploy.manifest.starter import MachineFacts, ModelChoice, StageHost, starter_text
from relayline.deploy.models.hub_files import with_file
from relayline.deploy.models.hub_reference import HubFile, parse_reference
from relayline.deploy.models.model_source import is_on_hub
from relayline.wire.common.errors import UsageError
from relayline.wire.common.texts import printable
from relayline.wire.common.units import GIB, bytes_text
from relayline.wire.common.usable_cores import usable_cores


class ModelToName(FileToRead):
    """A model's file to read, or the name of one on the hub, which stays text."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Check one name."""
        text = str(value)
        if not is_on_hub(text):
            return super().convert(value, param, ctx)
        try:
            parse_reference(text)
        except UsageError as error:
            self.fail(printable(str(error)), param, ctx)
        return text


@click.command("init", short_help="Write a commented manifest for this machine.")
@click.option(
    "--model", type=ModelToName(), default=None,
    help="GGUF file, or its first shard; of the hub ORG/REPO[:QUANT] or hf://ORG/REPO/FILE.gguf.",
)  # fmt: skip
@click.option(
    "--hosts", type=Line("host,..."), default="",
    help="Hosts of its stages in layer order, separated by commas [default: here].",
)  # fmt: skip
@click.option(
    *OUTPUT, "output", type=FileToWrite(may_be_stdout=True), default=Path("pipeline.yaml"), show_default=True,
    help="File to write; - for stdout.",
)  # fmt: skip
@click.option("--force", is_flag=True, help="Replace the file if there is one.")
def init_command(model: Path | str | None, hosts: str, output: Path, force: bool) -> None:
    """Write a manifest, ready for `relayline plan` and `relayline up`: of two stages on this machine, or of one stage
    on each of --hosts.

    Of ORG/REPO[:QUANT] the hub is asked for the names of its files, and the manifest names the one that is meant.
    """
    is_stdout = str(output) == "-"
    if not (is_stdout or force) and os.path.lexists(output):
        raise UsageError(f"{output} already exists; give --force to replace it, or another --output")
    choice = _choice(model, Path() if is_stdout else output.parent)
    text = starter_text(machine_facts(), choice, str(SCHEMA_FILE), _stage_hosts(hosts, choice.path))
    # A file name that is not text (surrogates) is refused by the reader like any other wrong value.
    parse_manifest(text.encode("utf-8", "surrogateescape"), str(output))
    if is_stdout:
        click.echo(text, nl=False)
        return
    write_text(output, text)
    click.echo(f"wrote {output}; next: relayline plan {output}")


def machine_facts() -> MachineFacts:
    """Look at this machine: cores this process may use, memory, and what llama.cpp was built for."""
    import llama_cpp

    return MachineFacts(
        n_cores=len(usable_cores()),
        memory_gib=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB,
        has_gpu_build=bool(llama_cpp.llama_supports_gpu_offload()),
    )


def _stage_hosts(hosts: str, model: str) -> list[StageHost]:
    """Return a stage for each host, named as `plan --hosts` names it. Raises UsageError for one that is no host."""
    if not hosts:
        return []
    given = with_hosts(smallest_manifest(Path(model)), [host.strip() for host in hosts.split(",")])
    here = at_home(given)
    return [StageHost(a.name, a.host, is_here=b.is_local) for a, b in zip(given.stages, here.stages, strict=True)]


def _choice(model: Path | str | None, directory: Path) -> ModelChoice:
    """Name the model relative to the manifest if it is below that directory. Raises as `with_file`."""
    if model is None:
        return ModelChoice("model.gguf", "Put your GGUF file's path here; for a sharded model, its first file.")
    if isinstance(model, str):
        return _hub_choice(parse_reference(model))
    from relayline.coordinator.model.inspection import inspect_whole

    facts = inspect_whole(model)
    about = f"{facts.architecture}, {facts.n_layers} layers, {bytes_text(facts.file_bytes)}"
    absolute, base = model.resolve(), directory.resolve()
    path = absolute.relative_to(base) if absolute.is_relative_to(base) else absolute
    if not facts.supported:
        about += f"; not supported: {facts.refusal}"
    return ModelChoice(str(path), _printable(about))


def _hub_choice(model: HubFile) -> ModelChoice:
    """Name one file of the hub, the one that `up` would load. It is asked only if the user has named no file."""
    found = with_file(model)
    revision = f"@{found.revision}" if found.revision else ""
    address = f"{HUB_SCHEME}{found.repo}/{found.file}{revision}"
    if not re.fullmatch(HF_FILE, address):
        raise UsageError(f"{printable(address)}: a manifest names files of letters, digits, '_', '.' and '-' alone")
    return ModelChoice(address, "The first file of the model on the Hugging Face hub.", is_on_hub=True)


def _printable(text: str) -> str:
    """Keep text from a model's file on one line of a comment."""
    return "".join(char if char.isprintable() else " " for char in text)
