"""The process that works on one batch of a coordinator: reads its input, asks the coordinator, writes its outputs.

It gets its order as one JSON line on stdin, and ends when stdin does, at once and whatever it is doing. On stdout it
says, one JSON line each, what it found: `problems`, or `total`, then `answered` and `failed` as they grow, and `ended`.
So nothing that grows with a file costs the coordinator time, and a crash here is no crash there.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from relayline.coordinator.batches.asking import Asking
from relayline.coordinator.batches.input_file import BadInputError, Known, check_input, waiting_requests
from relayline.coordinator.batches.lines import Outcome
from relayline.coordinator.batches.message_lines import CANCELLED, EXPIRED, FAILED
from relayline.coordinator.batches.output_file import OutputFile
from relayline.coordinator.batches.patience import Terms
from relayline.coordinator.batches.store import MODE
from relayline.wire.common.errors import RelaylineError

NICENESS = 10  # what answers other requests goes first
TOLD_S = 0.5  # between two words on the progress
BASE_URL = "http://localhost"  # of a Unix socket


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """What to do."""

    input: str
    output: str
    errors: str
    url: str
    socket: str
    """Of the coordinator's API, on this machine."""
    headers: dict[str, str]
    n_streams: int
    n_max: int
    wait_s: float
    mark: str = ""
    """The code of an error that every request gets that is not done; empty: they are asked."""


class Told(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One word on how it goes."""

    total: int | None = None
    answered: int | None = None
    failed: int | None = None
    problems: list[tuple[int, str]] | None = None
    ended: str | None = None
    """Empty: all requests have an outcome; else why the work ended."""


_MARKS = {
    EXPIRED: "This request could not be executed before the completion window expired.",
    CANCELLED: "This request was not executed: its batch was cancelled.",
    FAILED: "This request was not executed: its batch has failed.",
}


def main() -> None:
    """Work on the order that stands on stdin."""
    os.nice(NICENESS)
    order = msgspec.json.decode(sys.stdin.buffer.readline(), type=Order)
    threading.Thread(target=_end_with_stdin, daemon=True).start()
    with contextlib.suppress(KeyboardInterrupt, BrokenPipeError):
        _tell(_work(order))
    sys.stdout.flush()


def _end_with_stdin() -> None:
    """End this process when stdin does: its output may be torn at any place, and another process waits for its lock."""
    while os.read(sys.stdin.fileno(), 1):  # not through `sys.stdin`, whose lock this process needs when it ends
        pass
    os._exit(1)


def _work(order: Order) -> Told:
    try:
        known = check_input(Path(order.input), n_max=order.n_max, url=order.url)
    except BadInputError as error:
        return Told(problems=error.problems)
    except (RelaylineError, OSError) as error:
        return Told(ended=_text(error))
    try:
        with _output(order.output) as answers, _output(order.errors) as errors:
            counts = []
            for file in (answers, errors):
                file.mend()
                counts.append(file.note_done(known))
            answered, failed = (sum(each) for each in zip(*counts, strict=True))
            _tell(Told(total=len(known.is_done), answered=answered, failed=failed))
            if order.mark:
                _mark(order, known, errors)
            else:
                asyncio.run(_ask(order, known, (answers, errors), (answered, failed)))
    except (RelaylineError, OSError) as error:
        return Told(ended=_text(error))
    return Told(ended="")


def _output(path: str) -> OutputFile:
    """Open an output. The process of a coordinator that was killed may have it for a moment."""
    return OutputFile(Path(path), mode=MODE, waits=True)


def _mark(order: Order, known: Known, errors: OutputFile) -> None:
    for _, asked in waiting_requests(Path(order.input), known):
        errors.add(Outcome(asked.custom_id, error_code=order.mark, error_message=_MARKS[order.mark]).line())


async def _ask(order: Order, known: Known, files: tuple[OutputFile, OutputFile], before: tuple[int, int]) -> None:
    connector = aiohttp.UnixConnector(order.socket, limit=0, force_close=True)
    async with aiohttp.ClientSession(connector=connector, headers=order.headers) as session:
        terms = Terms(wait_s=order.wait_s, timeout_s=order.wait_s)
        asking = Asking(session, BASE_URL, terms, answers=files[0], errors=files[1])

        def tell() -> None:
            progress = asking.progress
            _tell(Told(answered=before[0] + progress.n_answered, failed=before[1] + progress.n_failed))

        telling = asyncio.create_task(_repeat(tell))
        try:
            waiting = (asked for _, asked in waiting_requests(Path(order.input), known))
            await asking.run(waiting, order.n_streams)
            tell()
        finally:
            telling.cancel()


async def _repeat(tell: Callable[[], None]) -> None:
    while True:
        await asyncio.sleep(TOLD_S)
        tell()


def _tell(told: Told) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(told) + b"\n")
    sys.stdout.buffer.flush()


def _text(error: Any) -> str:
    if isinstance(error, RelaylineError):
        return error.message
    return f"{error.filename or 'a file of the batch'}: {error.strerror or error}"


if __name__ == "__main__":
    main()
