"""Structured logs for every process: human lines by default, one JSON object per line with --log-json.

Fields go in `extra={"fields": {...}}`; both formats print them, the human one as logfmt does. Logs go to stderr, since
stdout belongs to results.

One record is one line of bounded length, except for a traceback of ours. A terminal obeys nothing in it.
"""

from __future__ import annotations

import collections
import datetime
import json
import logging
import re
import sys
import time
from typing import Any, NamedTuple

from relayline.wire.common import bounds
from relayline.wire.common.log_repeats import Repeats
from relayline.wire.common.texts import printable

_AMBIGUOUS = re.compile(r'[\s="]')  # in a value of a field


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    return getattr(record, "fields", {})


def _text(value: object) -> str:
    return printable(str(value), bounds.LOG_VALUE_CHARS_MAX)


def _tail(record: logging.LogRecord) -> str:
    """Return the fields as key=value. A value that would end too early, or could be none, is in double quotes."""
    return "".join(f" {key}={_word(_text(value))}" for key, value in _fields(record).items())


def _word(text: str) -> str:
    if text and not _AMBIGUOUS.search(text):
        return text
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def _traceback(text: str) -> str:
    """Each of its lines is made printable, since the last one may quote what a client sent."""
    return "\n".join(map(_text, text.split("\n")))


class _HumanFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        clock = datetime.datetime.fromtimestamp(record.created).strftime("%H:%M:%S")
        line = f"{clock} {record.levelname.lower():<7} {_text(record.getMessage())}{_tail(record)}"
        return f"{line}\n{_traceback(self.formatException(record.exc_info))}" if record.exc_info else line


class _JsonFormatter(logging.Formatter):
    def __init__(self, role: str) -> None:
        super().__init__()
        self._role = role

    def format(self, record: logging.LogRecord) -> str:
        clock = datetime.datetime.fromtimestamp(record.created, datetime.UTC).isoformat()
        line = {
            "time": clock,
            "level": record.levelname.lower(),
            "role": self._role,
            "message": _text(record.getMessage()),
            **{key: _text(value) if isinstance(value, str) else value for key, value in _fields(record).items()},
        }
        if record.exc_info:
            line["exception"] = _traceback(self.formatException(record.exc_info))
        return json.dumps(line, default=str)


_REASON_CHARS_MAX = 300  # of an exception's text, shown in a log line
_QUOTED = re.compile(r"b?(['\"])(?:.*\1|.*)", re.DOTALL)  # from the first quote to the last: there may be some within
_QUOTE_BARE = frozenset({"InvalidURLError", "TransferEncodingError"})  # their text is what the client sent, unquoted


_HEARS_CLIENTS = ("aiohttp.server", "relayline.http")  # loggers
AT_WILL = {"is_at_will": True}
"""`extra` of a line that anybody can bring about at any rate: one a minute is written of those that say the same."""


class _ClientFaults(logging.Filter):
    """Writes one line for bytes that are no HTTP, or a body that is not in its stated encoding.

    That is the client's fault and needs no traceback. What the client sent is left out, because it may be an API key.
    aiohttp's exceptions are recognised by their module, because this file does not import aiohttp.

    A probe that is never understood may go on for weeks. So these lines are AT_WILL.
    """

    def __init__(self) -> None:
        super().__init__()
        self._repeats = Repeats()

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether a record is written."""
        fault = record.exc_info[1] if record.exc_info else None
        if type(fault).__module__ in ("aiohttp.http_exceptions", "aiohttp.web_protocol"):
            whose = f"{record.args[0]}'s" if isinstance(record.args, tuple) and record.args else "a client's"
            record.msg, record.args = "%s request cannot be read: %s", (whose, _reason(fault))
            record.levelno, record.levelname = logging.WARNING, "WARNING"
            record.exc_info = record.exc_text = None
        elif not getattr(record, "is_at_will", False):
            return True
        text = record.getMessage()
        again = self._repeats.again(text, time.monotonic_ns())
        record.msg, record.args = "%s%s", (text, again)
        return again is not None


def _reason(fault: BaseException | None) -> str:
    """Return the text of aiohttp's exception without the bytes that it quotes."""
    if type(fault).__name__ in _QUOTE_BARE:
        return type(fault).__name__
    text = _QUOTED.sub("...", " ".join(str(fault).split()).removeprefix("400, message: ")).rstrip(" ^")
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text[:_REASON_CHARS_MAX])


PRINTED = {"is_printed": True}


class LogLine(NamedTuple):
    """One line of this process's log."""

    unix_ms: int
    level: str
    text: str  # one line of bounded length; of an exception only its last line


class _Recent(logging.Handler):
    """Keeps the latest lines, for those who look at this process from elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: collections.deque[LogLine] = collections.deque(maxlen=bounds.LOG_LINES_KEPT)

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a record. A thread of any kind may log; to append is atomic.

        A record that cannot be written, say for wrong arguments, raises nothing into whoever logs it.
        """
        try:
            self.lines.append(_line(record))
        except Exception:
            self.handleError(record)


def _line(record: logging.LogRecord) -> LogLine:
    cause = record.exc_info[1] if record.exc_info else None
    why = "" if cause is None else f" [{type(cause).__name__}: {_text(cause)}]"
    text = f"{_text(record.getMessage())}{_tail(record)}{why}"[: bounds.LOG_LINE_CHARS_MAX]
    return LogLine(int(record.created * 1000), record.levelname.lower(), text)


_RECENT = _Recent()


def recent_lines(limit: int = 0) -> list[LogLine]:
    """Return the latest lines of this process's log, oldest first; 0: all that are kept, at most LOG_LINES_KEPT."""
    lines = list(_RECENT.lines)
    return lines[-limit:] if limit else lines


def setup(role: str, *, as_json: bool, verbose: bool = False) -> None:
    """Send this process's logs to stderr. Call once, before anything logs.

    A record with `extra=PRINTED` goes only to log files: the user sees another line about it.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonFormatter(role) if as_json else _HumanFormatter())
    if not as_json:  # otherwise another program collects these lines, apart from the printed ones
        handler.addFilter(lambda record: not getattr(record, "is_printed", False))
    root = logging.getLogger()
    root.handlers[:] = [handler, _RECENT]
    root.setLevel(logging.DEBUG if verbose else logging.INFO)
    for chatty in ("grpc", "asyncio", "aiohttp.access"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    client_faults = _ClientFaults()
    for name in _HEARS_CLIENTS:
        filters = logging.getLogger(name).filters
        filters[:] = [*(each for each in filters if not isinstance(each, _ClientFaults)), client_faults]


def is_json() -> bool:
    """Return whether this process's logs are JSON, so that its children's are, too."""
    return any(isinstance(handler.formatter, _JsonFormatter) for handler in logging.getLogger().handlers)
