"""Lets `subprocess` and `asyncio` start relayline's processes as forks, see zygote.py. Others start as usual."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator, Mapping
from typing import Any

import uvloop

from relayline.deploy.testing.zygote import Zygote

_Popen = subprocess.Popen
_exec = asyncio.create_subprocess_exec
_LIMIT_BYTES = 1 << 16  # asyncio's default limit of a line

_zygote: Zygote | None = None
_n_off = 0


def install(zygote: Zygote) -> None:
    """From now on processes are forks of `zygote` if possible."""
    global _zygote
    _zygote = zygote
    subprocess.Popen = _Forked  # type: ignore[misc]
    asyncio.create_subprocess_exec = _create


@contextlib.contextmanager
def own_processes() -> Iterator[None]:
    """Start every process as a new interpreter during a with block."""
    global _n_off
    _n_off += 1
    try:
        yield
    finally:
        _n_off -= 1


class _Forked(_Popen):  # type: ignore[type-arg]
    """A process that is a fork if it can be. Only the making of the process differs from subprocess.Popen."""

    def _execute_child(
        self,
        args: Any,
        executable: Any,
        preexec_fn: Any,
        close_fds: bool,
        pass_fds: tuple[int, ...],
        cwd: Any,
        env: Mapping[str, str] | None,
        startupinfo: Any,
        creationflags: int,
        shell: bool,
        *pipes: Any,
    ) -> None:
        *ends, _restore_signals, gid, gids, uid, umask, start_new_session, process_group = pipes
        p2cread, _, _, c2pwrite, _, errwrite = ends
        is_plain = not (executable or preexec_fn or shell or gid or gids or uid) and (umask, process_group) == (-1, -1)
        standard = [own if own != -1 else number for number, own in enumerate((p2cread, c2pwrite, errwrite))]
        pid = None
        if is_plain and _zygote is not None and not _n_off and not isinstance(args, str | bytes | os.PathLike):
            words = [os.fsdecode(word) for word in args]
            namespace, words, environment = _unwrapped(words, dict(os.environ if env is None else env))
            directory = os.path.abspath(os.fsdecode(cwd or "."))
            if _zygote.fits(words, environment) and os.path.isdir(directory):
                request = {
                    "words": words,
                    "environment": environment,
                    "directory": directory,
                    "namespace": namespace,
                    "targets": [0, 1, 2, *pass_fds],
                    "is_session": bool(start_new_session),
                }
                pid = _zygote.fork(request, [*standard, *pass_fds])
        if pid is None:
            begin = (args, executable, preexec_fn, close_fds, pass_fds, cwd, env, startupinfo, creationflags, shell)
            super()._execute_child(*begin, *pipes)  # type: ignore[misc]
            return
        self.pid, self._child_created = pid, True
        self._close_pipe_fds(*ends)  # type: ignore[attr-defined]


def _unwrapped(words: list[str], environment: dict[str, str]) -> tuple[str, list[str], dict[str, str]]:
    """Split `ip netns exec NAME env A=B ... COMMAND` into network namespace, command and environment; "" for none."""
    if words[:3] != ["ip", "netns", "exec"] or words[4:5] != ["env"]:
        return "", words, environment
    n_set = next((number for number, word in enumerate(words[5:]) if "=" not in word), len(words[5:]))
    assigned = dict(word.split("=", 1) for word in words[5 : 5 + n_set])
    return words[3], words[5 + n_set :], environment | assigned


async def _create(*words: Any, limit: int = _LIMIT_BYTES, **settings: Any) -> Any:
    """Replaces asyncio.create_subprocess_exec. uvloop starts processes without subprocess; other loops use it."""
    loop = asyncio.get_running_loop()
    if not isinstance(loop, uvloop.Loop) or _zygote is None or _n_off:
        return await _exec(*words, limit=limit, **settings)
    process = _Process(_Forked(words, bufsize=0, **settings), limit)
    await process.connect()
    return process


class _Process:
    """asyncio's interface of a process, as far as this package uses it."""

    def __init__(self, begun: subprocess.Popen[bytes], limit: int) -> None:
        self._begun, self._limit = begun, limit
        self._ended = asyncio.Event()
        self.stdout: asyncio.StreamReader | None = None
        self.stderr: asyncio.StreamReader | None = None
        self.stdin = begun.stdin  # unbuffered: good for lines that fit a pipe
        self.pid = begun.pid

    async def connect(self) -> None:
        loop, handle = asyncio.get_running_loop(), os.pidfd_open(self.pid)  # type: ignore[attr-defined, unused-ignore]

        def ended() -> None:
            loop.remove_reader(handle)
            os.close(handle)
            self._begun.wait()
            if self._begun.stdin is not None:
                self._begun.stdin.close()
            self._ended.set()

        loop.add_reader(handle, ended)
        self.stdout = await self._reader(self._begun.stdout)
        self.stderr = await self._reader(self._begun.stderr)

    async def _reader(self, pipe: Any) -> asyncio.StreamReader | None:
        if pipe is None:
            return None
        reader = asyncio.StreamReader(limit=self._limit)
        await asyncio.get_running_loop().connect_read_pipe(lambda: _Closing(reader), pipe)
        return reader

    @property
    def returncode(self) -> int | None:
        """Exit code, negative for a signal; None while it runs."""
        return self._begun.returncode

    async def wait(self) -> int:
        """Return the exit code once it has ended."""
        await self._ended.wait()
        return int(self._begun.returncode)

    async def communicate(self) -> tuple[bytes, bytes]:
        """Return its output once it has ended."""
        out, err = await asyncio.gather(*(_all(stream) for stream in (self.stdout, self.stderr)))
        await self.wait()
        return out, err

    def send_signal(self, number: int) -> None:
        """Signal it. Raises ProcessLookupError if it has ended."""
        if self._begun.returncode is not None:
            raise ProcessLookupError
        self._begun.send_signal(number)

    def terminate(self) -> None:
        """Ask it to end."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it."""
        self.send_signal(signal.SIGKILL)


class _Closing(asyncio.StreamReaderProtocol):
    """Closes a pipe that was read to its end."""

    def eof_received(self) -> bool:
        super().eof_received()
        return False


async def _all(stream: asyncio.StreamReader | None) -> bytes:
    return b"" if stream is None else await stream.read()
