"""One line of the doctor, and running all probes side by side, each bounded in time."""

from __future__ import annotations

import asyncio
import dataclasses
import enum
import inspect
import threading
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from relayline.wire.common.errors import RelaylineError

Result = TypeVar("Result")

FINDINGS_PER_PROBE_MAX = 512  # stages, files or ports of one manifest


class Outcome(enum.Enum):
    """How bad it is."""

    OK = "ok"
    WARNING = "warning"
    FAILURE = "failure"


@dataclasses.dataclass(frozen=True, slots=True)
class Finding:
    """One line: the subject, the verdict, the finding and, unless all is well, the remedy."""

    check: str
    """The subject, such as `memory` or `port 8080`."""
    outcome: Outcome
    """How it is."""
    found: str
    """The finding, in one line."""
    remedy: str = ""
    """What to do; empty when there is nothing to do."""


def ok(check: str, found: str) -> Finding:
    """Return a finding that all is well."""
    return Finding(check, Outcome.OK, found)


def warning(check: str, found: str, remedy: str) -> Finding:
    """Return a finding that hinders nothing now."""
    return Finding(check, Outcome.WARNING, found, remedy)


def failure(check: str, found: str, remedy: str) -> Finding:
    """Return a finding with which the pipeline will not run."""
    return Finding(check, Outcome.FAILURE, found, remedy)


@dataclasses.dataclass(frozen=True, slots=True)
class Probe:
    """Something to look at. `look` is a coroutine function, or a plain function that may block."""

    check: str
    """The name of its line if it does not finish."""
    look: Callable[[], list[Finding]] | Callable[[], Awaitable[list[Finding]]]
    """Returns its findings; a RelaylineError or OSError becomes a failure."""
    timeout_s: float
    """How long it may take; after that it is a warning."""


async def in_daemon(function: Callable[[], Result]) -> Result:
    """Run a blocking function in a thread that never delays the end of the process."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Result] = loop.create_future()

    def finish(result: Result | None, error: BaseException | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]

    def work() -> None:
        result, error = None, None
        try:
            result = function()
        except Exception as caught:
            error = caught
        try:
            loop.call_soon_threadsafe(finish, result, error)
        except RuntimeError:
            pass  # the loop has closed; nothing waits any more

    threading.Thread(target=work, name="doctor", daemon=True).start()
    return await future


async def examine(probes: Sequence[Probe]) -> list[Finding]:
    """Run all probes side by side; returns their findings in the probes' order."""
    found = await asyncio.gather(*(_examine(probe) for probe in probes))
    return [finding for findings in found for finding in findings[:FINDINGS_PER_PROBE_MAX]]


async def _examine(probe: Probe) -> list[Finding]:
    try:
        async with asyncio.timeout(probe.timeout_s):
            if inspect.iscoroutinefunction(probe.look):
                findings: list[Finding] = await probe.look()
                return findings
            return await in_daemon(probe.look)  # type: ignore[arg-type]
    except TimeoutError:
        return [warning(probe.check, f"not known after {probe.timeout_s:.0f} s", "try again with a longer --timeout")]
    except RelaylineError as error:
        return [failure(probe.check, error.message.splitlines()[0], "")]
    except OSError as error:
        return [failure(probe.check, f"{error.filename or ''} {error.strerror or error}".strip(), "")]
