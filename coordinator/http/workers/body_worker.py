"""The forked child: it answers one request after another, within bounds of processor time and memory. Over its bounds
it dies, and with it one request; the next one gets a new child. Frames to it: two u32 sizes, then the request and the
body. Frames from it: one byte for the kind of content, a u32 size, and the content.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import socket
import struct

import msgspec

from relayline.coordinator.http.workers.prepared import Asked, Enter, Phase, Setting
from relayline.coordinator.http.workers.preparing import Preparer
from relayline.coordinator.text.tokenizer import Tokenizer
from relayline.wire.common.errors import InternalError, OverloadedError, RelaylineError
from relayline.wire.common.limits import lower_limit
from relayline.wire.common.memory import address_space_bytes

CPU_S_MAX = 10.0  # of one request; a million tokens take 3 s
TEMPLATE_CPU_S_MAX = 1.0  # of its template; a chat of 128,000 tokens takes 0.1 s
QUICK_CPU_S_MAX = 0.25  # of a short body; one that takes longer goes to workers with more time
MEMORY_BYTES_MAX = 128 * 1024 * 1024  # on top of its memory at the fork

TO_WORKER = struct.Struct("<II")
FROM_WORKER = struct.Struct("<cI")
ENTERED, ANSWERED, FAILED, EXHAUSTED = b"P", b"A", b"E", b"M"
_PHASES: dict[Phase, bytes] = {"reading": b"r", "template": b"t", "tokens": b"k"}
PHASE_OF = {code: phase for phase, code in _PHASES.items()}
_PR_SET_PDEATHSIG = 1


class Terms(msgspec.Struct):
    """On which terms a worker works."""

    cpu_s_max: float  # of one request
    niceness: int = 0
    template_cpu_s_max: float = TEMPLATE_CPU_S_MAX  # of these for the model's template


class Failure(msgspec.Struct):
    """A RelaylineError on its way to the coordinator."""

    label: str
    message: str
    param: str | None = None
    retry_after_s: int = 1


def serve(pipe: socket.socket, tokenizer: Tokenizer) -> None:
    """Answer until the coordinator closes its end. The first frame has the worker's terms, and the application."""
    first = _read_frame(pipe)
    if first is None:
        return
    terms = msgspec.msgpack.decode(first[0], type=Terms)
    _limit_self(terms.niceness)
    preparer = Preparer(msgspec.msgpack.decode(first[1], type=Setting), tokenizer)
    cpu_s_max, decoder = terms.cpu_s_max, msgspec.msgpack.Decoder(Asked)
    while frame := _read_frame(pipe):
        asked = decoder.decode(frame[0])
        signal.setitimer(signal.ITIMER_PROF, cpu_s_max)  # the signal ends a process, whatever code runs

        def enter(phase: Phase) -> None:
            pipe.sendall(FROM_WORKER.pack(ENTERED, 1) + _PHASES[phase])
            limit_s = min(terms.template_cpu_s_max, cpu_s_max) if phase == "template" else cpu_s_max
            signal.setitimer(signal.ITIMER_PROF, limit_s)

        kind, answer = _answer(preparer, asked, frame[1], enter)
        del frame
        signal.setitimer(signal.ITIMER_PROF, 0)
        pipe.sendall(FROM_WORKER.pack(kind, len(answer)))
        pipe.sendall(answer)
        if kind == EXHAUSTED:
            return


def _answer(preparer: Preparer, asked: Asked, raw: bytearray, enter: Enter) -> tuple[bytes, bytes]:
    try:
        return ANSWERED, preparer.answer(asked, raw, enter)
    except MemoryError:
        return EXHAUSTED, b""
    except RelaylineError as error:
        failure = Failure(error.label, error.message, getattr(error, "param", None))
        if isinstance(error, OverloadedError) and error.retry_after_s is not None:
            failure.retry_after_s = error.retry_after_s
    except Exception as error:
        failure = Failure(InternalError.label, f"reading the body failed: {type(error).__name__}: {error}"[:500])
    return FAILED, msgspec.msgpack.encode(failure)


def end_with_parent(parent: int) -> None:
    """From now on this process ends with its parent; at once, where that has ended before."""
    with contextlib.suppress(AttributeError):  # macOS has none: there a child ends when its socket does
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def _limit_self(niceness: int) -> None:
    for number in (signal.SIGCHLD, signal.SIGPROF, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    os.nice(niceness)
    lower_limit(resource.RLIMIT_CORE, 0)
    now_bytes = address_space_bytes()
    if now_bytes is not None:
        lower_limit(resource.RLIMIT_AS, now_bytes + MEMORY_BYTES_MAX)


def _read_frame(pipe: socket.socket) -> tuple[bytearray, bytearray] | None:
    sizes = _read(pipe, TO_WORKER.size)
    if sizes is None:
        return None
    n_asked, n_raw = TO_WORKER.unpack(sizes)
    asked, raw = _read(pipe, n_asked), _read(pipe, n_raw)
    return None if asked is None or raw is None else (asked, raw)


def _read(pipe: socket.socket, size: int) -> bytearray | None:
    data = bytearray(size)
    view, at = memoryview(data), 0
    while at < size:
        n_read = pipe.recv_into(view[at:])
        if not n_read:
            return None
        at += n_read
    return data
