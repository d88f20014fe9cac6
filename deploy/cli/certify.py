"""`relayline certify`: may this split of this model be trusted?"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from relayline.deploy.cli.model import MODEL
from relayline.deploy.cli.options import IntRange, Line, log_options, parse_cuts
from relayline.deploy.cli.paths import Directory
from relayline.deploy.cli.setting_flags import setting_option, setting_options
from relayline.deploy.models.progress import shows_bars
from relayline.wire.common import logs
from relayline.wire.common.texts import whole_number
from relayline.wire.settings.setting import entry_of, from_parameters
from relayline.wire.settings.table import EngineSettings, ServingSettings

if TYPE_CHECKING:
    from relayline.coordinator.model.inspection import ModelFacts
    from relayline.deploy.certify.run import CertifyConfig, Report
    from relayline.deploy.certify.run import Progress as ProgressCallback


def _parse_cuts_or_all(context: click.Context, parameter: click.Parameter, text: str) -> tuple[int, ...] | None:
    return None if text == "all" else parse_cuts(context, parameter, text)


def _parse_seeds(_: click.Context, __: click.Parameter, text: str) -> tuple[int, ...]:
    parts = text.split(",")
    found = tuple(each for part in parts if (each := whole_number(part.strip(), 18)) is not None)
    if len(found) < len(parts) or len(parts) > 16:
        raise click.BadParameter(f"{text!r} is not a list of at most 16 numbers such as 1,2,3")
    return found


@click.command("certify", short_help="Compare a split model with the unsplit one.")
@MODEL
@click.option(
    "--cuts",
    type=Line("layers"),
    callback=_parse_cuts_or_all,
    default="all",
    show_default=True,
    help="all: every legal cut in turn; or the cuts of one pipeline, e.g. 8,16.",
)
@click.option(
    "--stages",
    "n_stages",
    type=IntRange(2, 64),
    default=None,
    help="One pipeline of so many stages, with balanced cuts.",
)
@setting_option(entry_of(ServingSettings, "wire"), default="f32")
@click.option(
    "--seeds",
    type=Line("n,..."),
    callback=_parse_seeds,
    default="1",
    show_default=True,
    help="Random seeds of the prompts; each adds one lone session and one mixed batch.",
)
@click.option("--steps", type=IntRange(16, 256), default=24, show_default=True, help="Decode steps per session.")
@setting_options(EngineSettings, only=("ctx_tokens", "n_threads", "gpu_layers", "kv_type", "kv_layout"))
@click.option("--keep", type=Directory(), default=None, help="Keep the artifacts in this directory.")
@click.option("--experimental", is_flag=True, help="Accept a model family that nobody has certified.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a table.")
@log_options
def certify_command(**given: Any) -> None:
    """Run MODEL (a GGUF file, any of its shards, or their directory) split and unsplit, and compare the results.

    The split runs as real stage processes that are connected as in a pipeline. They compute a prompt of several prefill
    chunks, decode steps, and a batch of concurrent sessions of different lengths, all of random token ids. The unsplit
    model then gets the same tokens.

    Exit code 0 means that you can trust every cut. With --wire f32 the split's logits equal the unsplit model's up to
    float noise, which is measured on the unsplit model itself. With f16 the split prefers another token only where the
    unsplit model was undecided. Exit code 1 names the cuts that failed.

    The artifacts of one cut, about as large as the model, are in the temporary directory (TMPDIR) until its check ends.
    With --keep those of all cuts stay.
    """  # fmt: skip
    from relayline.deploy.certify.report import as_json, print_report
    from relayline.deploy.certify.run import CertifyConfig, check_model
    from relayline.wire.common.process import run

    logs.setup("certify", as_json=given["log_json"], verbose=given["verbose"])
    if not given["verbose"]:
        logging.getLogger("relayline").setLevel(logging.ERROR)  # what matters of a lost stage is in the report
    config = CertifyConfig(
        model=given["model"],
        cuts=given["cuts"],
        n_stages=given["n_stages"],
        wire=given["wire"],
        seeds=given["seeds"],
        n_steps=given["steps"],
        engine=from_parameters(EngineSettings, given),
        experimental=given["experimental"],
        keep=given["keep"],
        verbose=given["verbose"],
    )
    facts = check_model(config.model, experimental=config.experimental)

    async def main(stopping: asyncio.Event) -> Report:
        return await _until_stopped(config, facts, stopping)

    report = run(main)
    if given["as_json"]:
        click.echo(as_json(report))
    else:
        print_report(report)
    if not report.passed:
        sys.exit(1)  # click's own Exit would be swallowed outside its standalone mode


async def _until_stopped(config: CertifyConfig, facts: ModelFacts, stopping: asyncio.Event) -> Report:
    """Certify; on SIGINT or SIGTERM end processes and remove temporary files first, then raise click's Abort."""
    from relayline.deploy.certify.run import certify
    from relayline.deploy.launch.local import print_prefixed

    def drop(name: str, text: str) -> None:
        """Take a stage's line; the last of them explain its death, if it dies."""

    with _progress_bar(config, facts) as progress:
        work = asyncio.ensure_future(certify(config, facts, progress, print_prefixed if config.verbose else drop))
        stop = asyncio.ensure_future(stopping.wait())
        try:
            await asyncio.wait({work, stop}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                raise click.Abort
            return work.result()
        finally:
            for task in (work, stop):
                task.cancel()
            await asyncio.gather(work, stop, return_exceptions=True)


@contextlib.contextmanager
def _progress_bar(config: CertifyConfig, facts: ModelFacts) -> Iterator[ProgressCallback]:
    """Yield a callback that draws a bar if stderr is a terminal; there it also prints writes to the disk."""
    from relayline.deploy.certify.run import disk_needed

    console = Console(stderr=True)
    columns = (BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not shows_bars(console)) as bar:
        if console.is_terminal:
            console.print(disk_needed(config, facts), soft_wrap=True, markup=False, highlight=False)
        task = bar.add_task("starting", total=1.0)

        def update(share: float, text: str) -> None:
            bar.update(task, completed=share, description=text)

        yield update
