"""`relayline batch`: a file of requests against a running server, overnight, and a file of its answers."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from relayline.coordinator.batches.patience import FIRST_ANSWER_S
from relayline.deploy.cli.console_http import (
    base_url,
    client_tls,
    key_headers,
    key_option,
    unanswered,
    url_option,
    why_silent,
)
from relayline.deploy.cli.options import OUTPUT, IntRange, Line, is_given
from relayline.deploy.cli.paths import FileToRead, FileToWrite
from relayline.deploy.cli.terminal import can_move
from relayline.wire.common.errors import RelaylineError, StartError, UsageError
from relayline.wire.common.texts import counted, duration_text

if TYPE_CHECKING:
    from relayline.coordinator.batches.asking import Progress
    from relayline.coordinator.batches.input_file import Known
    from relayline.coordinator.batches.output_file import OutputFile

STREAMS_MAX = 4_096
ATTEMPTS_MAX = 100
WAIT_MAX_S = 7 * 86_400
KEY_FILE_BYTES_MAX = 4_096
SHOWN_S = 1.0  # between two looks at the progress on a terminal
LOGGED_S = 60.0  # between two lines of it elsewhere


@click.command("batch", short_help="Ask a file of requests, and write a file of answers.")
@click.argument("requests", type=FileToRead(), metavar="IN.jsonl")
@click.option(
    *OUTPUT, "output", type=FileToWrite(), default=None, metavar="OUT.jsonl",
    help="File of the answers, needed without --check. One that exists is gone on with.",
)  # fmt: skip
@click.option(
    "--errors", type=FileToWrite(), default=None, metavar="FILE",
    help="File of the requests that failed [default: among the answers].",
)  # fmt: skip
@click.option(
    "--streams", type=IntRange(1, STREAMS_MAX), default=None,
    help="Requests in flight [default: the lanes of the pipeline and a few in line; 16 at another server].",
)  # fmt: skip
@click.option("--model", type=Line("name"), default="", help="Model of all requests, in place of their own.")
@click.option("--retry-failed", is_flag=True, help="Ask again what failed in an earlier run.")
@click.option("--check", is_flag=True, help="Only check IN.jsonl.")
@click.option(
    "--attempts", type=IntRange(1, ATTEMPTS_MAX), default=4, show_default=True,
    help="Of a request whose connection breaks, or that gets a 5xx other than 503.",
)  # fmt: skip
@click.option(
    "--wait", "wait_s", type=IntRange(0, WAIT_MAX_S), default=3_600,
    help="Seconds in which a server may be busy (429, 503) or away before the run ends [default: 3600; "
    f"{FIRST_ANSWER_S:g} for one that has not answered yet].",
)  # fmt: skip
@click.option(
    "--timeout", "timeout_s", type=IntRange(1, WAIT_MAX_S), default=14_400, show_default=True,
    help="Seconds of one answer.",
)  # fmt: skip
@click.option(
    "--api-key-file", type=FileToRead(may_be_pipe=True), default=None,
    help="File with the key alone, in place of --api-key.",
)  # fmt: skip
@url_option
@key_option
def batch_command(requests: Path, output: Path | None, url: str, api_key: str, **given: Any) -> int:
    """Send the requests of a file in OpenAI's batch format to the pipeline that runs here, or to any OpenAI-compatible
    server, and write their answers in the order in which they end.

    Each line of IN.jsonl is {"custom_id": ..., "method": "POST", "url": "/v1/chat/completions", "body": {...}}. After
    Ctrl-C, a crash or a power cut, the same command goes on with the requests that have no line in the output. Exit
    code 0 if all are answered, 1 if some failed, 2 if IN.jsonl has a mistake.
    """
    from relayline.coordinator.batches.input_file import check_input

    errors: Path | None = given["errors"]
    if output is None and not given["check"]:
        raise UsageError("name the file of the answers with -o OUT.jsonl, or only --check IN.jsonl")
    _check_files(requests, output, errors)
    if given["api_key_file"] is not None:
        api_key = _key_of(given["api_key_file"])
    known = check_input(requests, lambda n_lines: _say(f"checking {requests}: {counted(n_lines, 'line')}"))
    if output is None or given["check"]:
        click.echo(f"{requests} has {counted(len(known.is_done), 'request')} and no mistake")
        return 0
    given |= {"headers": key_headers(api_key), "url": base_url(url)}
    try:
        return _run(requests, known, output, errors or output, given)
    except KeyboardInterrupt:
        _say("stopped; the same command goes on with what is not answered", is_last=True)
        raise


def _check_files(requests: Path, output: Path | None, errors: Path | None) -> None:
    """Raise UsageError where a file has two roles."""
    given = (("IN.jsonl", requests), ("--output", output), ("--errors", errors))
    named = [(role, path) for role, path in given if path is not None]
    for at, (role, path) in enumerate(named):
        for other_role, other in named[:at]:
            if path.exists() and other.exists() and path.samefile(other):
                raise UsageError(f"{role} and {other_role} are the same file, {path}")


def _key_of(path: Path) -> str:
    with path.open("rb") as file:
        text = file.read(KEY_FILE_BYTES_MAX).decode("ascii", "replace").strip()
    if not text or "\n" in text:
        raise UsageError(f"{path} must have one API key and nothing else")
    return text


def _run(requests: Path, known: Known, output: Path, errors: Path, given: dict[str, Any]) -> int:
    """Ask what is not done yet; returns the exit code."""
    from relayline.coordinator.batches.output_file import OutputFile, drop_failed

    paths = dict.fromkeys((output, errors))
    if given["retry_failed"]:
        for path in paths:
            if path.exists() and (n_dropped := drop_failed(path)):
                _say(f"{path}: {n_dropped:,} failed before and asked again", is_last=True)
    with contextlib.ExitStack() as stack:
        files = {path: stack.enter_context(OutputFile(path)) for path in paths}
        counts = []
        for path, file in files.items():
            if file.mend():
                _say(f"{path}: its last line was half written; that request is asked again", is_last=True)
            counts.append(file.note_done(known))
        n_before, n_failed_before = (sum(each) for each in zip(*counts, strict=True))
        n_left = len(known.is_done) - n_before - n_failed_before
        progress = None
        if n_left:
            progress = asyncio.run(_ask(requests, known, files[output], files[errors], given, n_left))
    n_failed = n_failed_before + (progress.n_failed if progress else 0)
    answered = f"{n_before + (progress.n_answered if progress else 0):,} answered in {output}"
    click.echo(f"{answered}, {n_failed:,} failed{f' in {errors}' if n_failed and errors != output else ''}")
    if progress:
        click.echo(f"this run: {_speed(progress, time.monotonic())}")
    return 1 if n_failed else 0


async def _ask(
    requests: Path, known: Known, answers: OutputFile, errors: OutputFile, given: dict[str, Any], n_left: int
) -> Progress:
    import aiohttp

    from relayline.coordinator.batches.asking import Asking, client, streams_at
    from relayline.coordinator.batches.input_file import waiting_requests
    from relayline.coordinator.batches.patience import Terms

    first_answer_s = given["wait_s"] if is_given("wait_s") else FIRST_ANSWER_S  # who gives --wait may start it later
    terms = Terms(given["attempts"], given["wait_s"], given["timeout_s"], first_answer_s)
    url = given["url"]
    async with client(given["headers"], client_tls(url)) as session:

        def waits(error: Exception | None) -> None:
            why = "loads; the batch begins when it is ready"
            if error is not None:
                why = f"does not answer ({why_silent(error)}); trying again for {duration_text(first_answer_s)}"
            _say(f"{url} {why}", is_last=True)

        try:
            usual = await streams_at(session, url, terms, waits)  # also with --streams: is there a server at all?
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise unanswered(url, error) from error
        n_streams = given["streams"] or usual
        asking = Asking(session, url, terms, answers=answers, errors=errors, model=given["model"])
        counts = f"{n_left:,} of {counted(len(known.is_done), 'request')}"
        _say(f"{url}: {counts}, {min(n_streams, n_left):,} at a time", is_last=True)
        shown = asyncio.create_task(_show(asking.progress, n_left))
        try:
            waiting = (asked for _, asked in waiting_requests(requests, known))
            await asking.run(waiting, min(n_streams, n_left))
        except RelaylineError as error:
            raise StartError(f"{error.message}; the same command goes on with what is not answered") from error
        finally:
            shown.cancel()
            _say("", is_last=_is_live())
        return asking.progress


async def _show(progress: Progress, n_left: int) -> None:
    """Show how far it has come until it is cancelled."""
    while True:
        await asyncio.sleep(SHOWN_S if _is_live() else LOGGED_S)
        _say(progress_line(progress, n_left, time.monotonic()), is_last=not _is_live())


def progress_line(progress: Progress, n_left: int, now_s: float) -> str:
    """Return one line that says how far a run has come. `n_left`: requests that it began with."""
    n_done = progress.n_answered + progress.n_failed
    words = [f"{n_done:,} of {n_left:,} done", f"{progress.n_failed:,} failed", f"{progress.n_in_flight:,} in flight"]
    if progress.n_tokens:
        words.append(f"{progress.n_tokens / max(now_s - progress.began_s, 1e-9):,.1f} tok/s")
    if n_done:
        words.append(f"{duration_text((now_s - progress.began_s) / n_done * (n_left - n_done))} left")
    return ", ".join([*words, *([f"trying again: {progress.trouble}"] if progress.trouble else [])])


def _speed(progress: Progress, now_s: float) -> str:
    took_s = now_s - progress.began_s
    took = f"{took_s:.1f} s" if took_s < 10 else duration_text(took_s)
    n_done = progress.n_answered + progress.n_failed
    return f"{counted(n_done, 'request')} and {counted(progress.n_tokens, 'token')} in {took}, " + (
        f"{progress.n_tokens / max(took_s, 1e-9):,.1f} tok/s"
    )


def _is_live() -> bool:
    """Return whether a line on stderr can take the place of the one before."""
    return sys.stderr.isatty() and can_move()


def _say(text: str, *, is_last: bool = False) -> None:
    """Write a line to stderr; on a terminal the next one takes its place unless it is the last of its kind."""
    if _is_live():
        width = os.get_terminal_size(sys.stderr.fileno()).columns
        click.echo(f"\r\033[K{text[: max(1, width - 1)] if not is_last else text}", err=True, nl=is_last and bool(text))
    elif is_last and text:
        click.echo(text, err=True)
