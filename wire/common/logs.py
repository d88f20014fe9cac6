"""Structured logs for every process: human lines by default, one JSON object per line with --log-json.

Fields go in `extra={"fields": {...}}`; both formats print them. Logs go to stderr: stdout belongs to results.

One record is one line of bounded length, except for a traceback of ours. A terminal obeys nothing in it.
"""

from __future__ import annotations

import datetime
import json
import logging
import sys
from typing import Any

from relayline.wire.common import bounds
from relayline.wire.common.texts import printable


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    return getattr(record, "fields", {})


def _text(value: object) -> str:
    return printable(str(value), bounds.LOG_VALUE_CHARS_MAX)


def _traceback(text: str) -> str:
    """Each of its lines is made printable, since the last one may quote what a client sent."""
    return "\n".join(map(_text, text.split("\n")))


class _HumanFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        fields = _fields(record)
        clock = datetime.datetime.fromtimestamp(record.created).strftime("%H:%M:%S")
        tail = "".join(f" {key}={_text(value)}" for key, value in fields.items())
        line = f"{clock} {record.levelname.lower():<7} {_text(record.getMessage())}{tail}"
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


_REASON_CHARS_MAX = 300  # of a client's bytes, shown in a log line


class _ClientFaults(logging.Filter):
    """Writes one line for bytes that are no HTTP, or a body that is not in its stated encoding.

    That is the client's fault and needs no traceback. aiohttp's exceptions are recognised by their module, because this
    file does not import aiohttp.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        """Keep every record."""
        fault = record.exc_info[1] if record.exc_info else None
        if type(fault).__module__ in ("aiohttp.http_exceptions", "aiohttp.web_protocol"):
            whose = f"{record.args[0]}'s" if isinstance(record.args, tuple) and record.args else "a client's"
            text = " ".join(str(fault).split()).removeprefix("400, message: ")[:_REASON_CHARS_MAX]
            reason = "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)
            record.msg, record.args = f"{whose} request cannot be read: {reason}", ()
            record.levelno, record.levelname = logging.WARNING, "WARNING"
            record.exc_info = record.exc_text = None
        return True


_CLIENT_FAULTS = _ClientFaults()


PRINTED = {"is_printed": True}


def setup(role: str, *, as_json: bool, verbose: bool = False) -> None:
    """Send this process's logs to stderr. Call once, before anything logs.

    A record with `extra=PRINTED` goes only to log files: the user sees another line about it.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonFormatter(role) if as_json else _HumanFormatter())
    if not as_json:  # otherwise another program collects these lines, apart from the printed ones
        handler.addFilter(lambda record: not getattr(record, "is_printed", False))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.DEBUG if verbose else logging.INFO)
    for chatty in ("grpc", "asyncio", "aiohttp.access"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    logging.getLogger("aiohttp.server").addFilter(_CLIENT_FAULTS)  # once, however often
