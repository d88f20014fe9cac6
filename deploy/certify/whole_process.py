"""Runs the unsplit model in a separate process, since llama.cpp ends the process when one of its assertions fails.

The child reads one request after another from its input and answers each on its output: a length of 8 bytes, then one
msgpack value. It ends with its input, so it never outlives `certify`.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import struct
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import numpy as np
import numpy.typing as npt

from relayline.deploy.certify.whole_model import Row, WholeConfig, WholeModel
from relayline.deploy.models.trial import why_it_ended
from relayline.wire.common.child_command import module_command
from relayline.wire.common.errors import InternalError, ModelFileError, NativeError, RelaylineError
from relayline.wire.common.rope_factors import LongRope
from relayline.wire.settings.table import EngineSettings

END_TIMEOUT_S = 10.0  # of a child whose input has ended: it still frees the model
_LENGTH = struct.Struct("<Q")
_ERRORS: dict[str, type[RelaylineError]] = {
    each.__name__: each for each in (InternalError, ModelFileError, NativeError)
}


class WholeProcess:
    """A WholeModel elsewhere. Not thread-safe; one decode at a time."""

    def __init__(self, config: WholeConfig) -> None:
        """Start the child and load the model. Raises ModelFileError or NativeError with llama.cpp's own reason."""
        self.config = config
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `close`
        # Without this ggml starts a debugger on itself to print where it aborted.
        self._child = subprocess.Popen(
            module_command("relayline.deploy.certify.whole_process"),
            env={**os.environ, "GGML_NO_BACKTRACE": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
        )
        try:
            settings = dataclasses.asdict(config) | {"path": os.fsencode(config.path)}
            found = self._ask({"open": settings})
        except BaseException:
            self.close()
            raise
        self.n_ctx, self.n_vocab = int(found["n_ctx"]), int(found["n_vocab"])

    def decode(self, rows: Sequence[Row]) -> npt.NDArray[np.float32]:
        """As WholeModel.decode. Raises NativeError where llama.cpp aborts, too."""
        found = self._ask({"decode": [tuple(row) for row in rows]})
        logits = np.frombuffer(found["logits"], np.float32)
        return logits.reshape(-1, self.n_vocab).copy()

    def clear(self) -> None:
        """As WholeModel.clear."""
        self._ask({"clear": True})

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        try:
            _write(self._child.stdin, request)
            answer = _read(self._child.stdout)
        except BrokenPipeError:
            answer = None
        if answer is None:
            raise NativeError(f"the unsplit model ended: {self._last_words()}")
        if "error" in answer:
            raise _ERRORS[answer["error"]](answer["message"])
        return answer

    def _last_words(self) -> str:
        returncode = self._child.wait()
        self._stderr.seek(0)
        return why_it_ended(returncode, self._stderr.read())

    def close(self) -> None:
        """End the child. May be called twice."""
        for pipe in (self._child.stdin, self._child.stdout):
            if pipe is not None and not pipe.closed:
                try:
                    pipe.close()
                except BrokenPipeError:
                    pass
        try:
            self._child.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()
        self._stderr.close()

    def __enter__(self) -> WholeProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _write(stream: BinaryIO | Any, value: dict[str, Any]) -> None:
    body = msgspec.msgpack.encode(value)
    stream.write(_LENGTH.pack(len(body)))
    stream.write(body)
    stream.flush()


def _read(stream: BinaryIO | Any) -> dict[str, Any] | None:
    """Return the next value, or None at the end."""
    head = stream.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    (n_bytes,) = _LENGTH.unpack(head)
    body = stream.read(n_bytes)
    found: dict[str, Any] | None = msgspec.msgpack.decode(body) if len(body) == n_bytes else None
    return found


def _opened(settings: dict[str, Any]) -> WholeModel:
    rope = settings["long_rope"]
    path, long_rope = Path(os.fsdecode(settings["path"])), None if rope is None else LongRope(**rope)
    engine = EngineSettings(**settings["settings"])
    return WholeModel(WholeConfig(**settings | {"path": path, "settings": engine, "long_rope": long_rope}))


def _answer(model: WholeModel | None, request: dict[str, Any]) -> dict[str, Any]:
    if model is None:
        raise InternalError("the unsplit model is asked before it is opened")
    if "clear" in request:
        model.clear()
        return {}
    return {"logits": model.decode([Row(*row) for row in request["decode"]]).tobytes()}


def main() -> None:
    """Answer requests until there are no more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it ends with its parent
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # a library's own output must not mix with the answers
    model: WholeModel | None = None
    answer: dict[str, Any]
    while (request := _read(sys.stdin.buffer)) is not None:
        try:
            if "open" in request:
                model = _opened(request["open"])
                answer = {"n_ctx": model.n_ctx, "n_vocab": model.n_vocab}
            else:
                answer = _answer(model, request)
        except tuple(_ERRORS.values()) as error:
            answer = {"error": type(error).__name__, "message": error.message}
        _write(answers, answer)
    if model is not None:
        model.close()


if __name__ == "__main__":
    main()
