"""The state directory of one launched pipeline: its lock, its processes, its logs.

It is NAME in `~/.local/state/relayline`, or in `$XDG_STATE_HOME/relayline` where that is set. Beside it, `.elsewhere/`
has a file for each pipeline that was given another directory. It holds:

* `lock`: held with flock by the supervisor for as long as it lives.
* `state.json`: what runs. It is replaced whole at every change.
* `manifest.json`: the manifest with every choice made. The coordinator reads it.
* `layers.json`: the layers after a move.
* `plan.json`: who got which layers and why.
* `more.json`: the manifest with stages that were added while it served.
* `restart.json`: the order to start again; of a gateway, its pipelines that are to, one after the other.
* `before.json`: the manifest until that order, as flags changed it. It goes once the new start serves. Behind a gateway
  it is the manifest of what served last, since another process may take its place.
* `keys`: of a gateway, where its file of API keys is.
* `tls/`: material of a manifest that needs TLS and names no directory.
* `join/`: join tokens that the launcher made.
* `logs/PROCESS.log`: one rotated log for each process, `up.log` for the supervisor.

A lock without a holder is stale, whatever the file's content: the kernel releases it when its holder ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import click
import msgspec

from relayline.deploy.launch.process_id import ProcessId, age_s, is_running
from relayline.wire.common.errors import StartError, UsageError
from relayline.wire.common.files import naming, write_again
from relayline.wire.common.phase import HostState, Phase
from relayline.wire.common.places import state_dir
from relayline.wire.common.texts import not_text

log = logging.getLogger("relayline.up")

STATE_VERSION = 1
STATE_FILE = "state.json"
LAYERS_FILE = "layers.json"
PLAN_FILE = "plan.json"
MORE_FILE = "more.json"
RESTART_FILE = "restart.json"
BEFORE_FILE = "before.json"
MORE_SIGNAL = signal.SIGUSR1  # tells a supervisor that such a file exists
ELSEWHERE = ".elsewhere"  # no pipeline can have this name
ANOTHER = "XDG_STATE_HOME=DIRECTORY keeps all state elsewhere, --state-dir that of one pipeline"
NOT_SEEN = "another host"  # the host of a stage that was added while serving, until it joins
ENTRY_CHARS = 16  # of the name of a note, from the hash of the path that it holds


class ProcessRecord(msgspec.Struct, frozen=True):
    """One process of the pipeline. `pid` is 0 where it does not run on this machine or not now."""

    name: str
    role: Literal["coordinator", "stage", "pipeline"]
    host: str
    state: HostState
    pid: int = 0
    start_ticks: int = 0
    n_restarts: int = 0
    address: str = ""
    metrics: str = ""
    """host:port of its Prometheus endpoint; empty for none, or where it is another host's to say."""
    detail: str = ""
    """Why it is not ready, or how it last died."""
    command: str = ""
    """What to run on its own host; empty for what `relayline up` starts itself."""
    has_joined: bool = False
    """Of a stage on another host: it has joined before, and comes back by itself as long as its process runs."""
    is_behind: bool = False
    """Of a gateway: it runs as an earlier manifest said, because one that was changed before it did not come up."""

    @property
    def process(self) -> ProcessId | None:
        """Identity of the process; None if it does not run here."""
        return ProcessId(self.pid, self.start_ticks) if self.pid else None


class LaunchState(msgspec.Struct, frozen=True):
    """The whole of state.json."""

    version: int
    name: str
    manifest: str
    """The manifest file that was given, absolute."""
    phase: Phase
    """The supervisor's view; the coordinator knows the state for clients better."""
    supervisor_pid: int
    supervisor_start_ticks: int
    url: str = ""
    join: str = ""
    reason: str = ""
    """Why it failed, in one line."""
    processes: tuple[ProcessRecord, ...] = ()
    enrol: str = ""
    """host:port where other hosts get their certificates; empty: nowhere."""
    phase_since_ns: int = 0
    """When it entered the phase, on the machine's monotonic clock; 0: not known."""
    certificate: str = ""
    """The file of the certificate that its API shows, absolute; empty: no HTTPS."""
    starts_again: bool = False
    """Whether its supervisor knows `relayline restart`: that of an older relayline does not, nor do other commands."""

    @property
    def shown_url(self) -> str:
        """The URL of its API that people are shown."""
        records = (record for record in self.processes if record.role == "coordinator")
        return url_to_show(self.url, next((record.address for record in records), ""))

    @property
    def supervisor(self) -> ProcessId:
        """Identity of the `relayline up` process."""
        return ProcessId(self.supervisor_pid, self.supervisor_start_ticks)


def state_root() -> Path:
    """Return where the state of all pipelines is kept."""
    return state_dir()


def register(directory: Path) -> None:
    """Note a state directory that is not among the others, so that it is found without its path.

    Where that cannot be noted, as in a container whose home is read-only, only its path finds it.
    """
    root, path = state_root(), directory.absolute()
    if path.parent == root.absolute():
        return
    place = root / ELSEWHERE
    try:
        place.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_again(place / hashlib.sha256(os.fsencode(path)).hexdigest()[:ENTRY_CHARS], os.fsencode(path))
    except OSError as error:
        log.warning("%s: cannot be written: %s; other commands find this pipeline with --state-dir %s",
                    place, error.strerror, path)  # fmt: skip


def _candidates(root: Path) -> list[Path]:
    """Return every directory that may hold state. Notes of those that are gone are removed."""
    found = sorted(path for path in root.iterdir() if path.is_dir() and path.name != ELSEWHERE) if root.is_dir() else []
    notes = sorted((root / ELSEWHERE).iterdir()) if (root / ELSEWHERE).is_dir() else []
    for note in notes:
        if note.name.startswith("."):  # it is being written
            continue
        with contextlib.suppress(FileNotFoundError):  # another command has removed it just now
            path = Path(os.fsdecode(note.read_bytes()))
            if (path / STATE_FILE).exists():
                found.append(path)
            elif not StateDir(path).is_held():  # else it starts for the first time, and may be splitting its model
                note.unlink()
    return found


class StateDir:
    """The files of one pipeline's state. `path` need not exist yet."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.logs = path / "logs"
        self.manifest = path / "manifest.json"
        self.layers = path / LAYERS_FILE
        self.plan = path / PLAN_FILE
        self.more = path / MORE_FILE
        self.restart = path / RESTART_FILE
        self.before = path / BEFORE_FILE
        self.tls = path / "tls"
        self.keys = path / "keys"
        self._state = path / STATE_FILE
        self._lock = path / "lock"

    @contextlib.contextmanager
    def locked(self, name: str) -> Iterator[None]:
        """Hold the lock of this directory. Raises StartError if a live supervisor holds it, or if it cannot be made."""
        if problem := not_text(self.path.absolute()):  # the manifest in it names files beside it
            raise StartError(f"{self.path}: cannot keep state here: {problem}; {ANOTHER}")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            # Logs and settings say who asked for what, and tls/ holds keys: this user's alone.
            self.path.mkdir(mode=0o700, exist_ok=True)
            self.logs.mkdir(exist_ok=True)
            handle = os.open(self._lock, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise StartError(f"{self.path}: cannot keep state here: {error.strerror}; {ANOTHER}") from error
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise StartError(self._running_text(name)) from None
            yield
        finally:
            os.close(handle)

    def is_held(self) -> bool:
        """Return whether a supervisor holds the lock, also one on another machine that shares the directory."""
        try:
            handle = os.open(self._lock, os.O_RDWR)
        except OSError:
            return False
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(handle)
        return False

    def _running_text(self, name: str) -> str:
        state, another = self.load(), "start another one with `relayline up --name`"
        if state is None or not is_running(state.supervisor):
            return (
                f"{name} is being started by another `relayline up`, or runs on another machine that shares "
                f"{self.path}; wait for it, or {another}"
            )
        return (
            f"{name} is already running (pid {state.supervisor_pid}, for {age_s(state.supervisor):.0f} s); see "
            f"`relayline status {name}`, end it with `relayline down {name}`, or {another}"
        )

    def load(self) -> LaunchState | None:
        """Return the last stored state; None if there is none. Raises UsageError for a file of another version."""
        try:
            raw = self._state.read_bytes()
        except OSError:
            return None
        try:
            state = msgspec.json.decode(raw, type=LaunchState)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise UsageError(f"{self._state}: not a state file of this version ({error}); remove it") from error
        if state.version != STATE_VERSION:
            raise UsageError(f"{self._state}: version {state.version} is unknown; use the relayline that wrote it")
        return state

    def store(self, state: LaunchState) -> None:
        """Replace the stored state in one step, on the disk: half of it, as after a power cut, would keep `up` out.

        Raises OSError.
        """
        partial = self._state.with_suffix(".partial")
        with naming(self._state), partial.open("wb") as file:
            file.write(msgspec.json.format(msgspec.json.encode(state), indent=2) + b"\n")
            file.flush()
            os.fsync(file.fileno())
        partial.replace(self._state)

    @property
    def stored_ns(self) -> int:
        """When the state was stored last, on the file system's clock; 0: there is none."""
        try:
            return self._state.stat().st_mtime_ns
        except OSError:
            return 0

    def keys_named(self) -> Path | None:
        """Return the file of API keys of a gateway; None for none, and for a pipeline, whose manifest names it."""
        try:
            return Path(os.fsdecode(self.keys.read_bytes()))
        except OSError:
            return None

    def log(self, process: str) -> Path:
        """Return the log file of a process."""
        return self.logs / f"{process}.log"


def still_starting(name: str) -> str:
    """Return what to say where a pipeline is asked whose API does not listen yet."""
    return f"{name} is still starting; `relayline status` shows what it waits for"


def url_to_show(url: str, reached: str) -> str:
    """Return the URL to connect to: `reached` if that is known, for one of every interface is none."""
    return reached or url.replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:")


def find_running(state_dir: Path | None, asked: str) -> list[tuple[StateDir, LaunchState]]:
    """Return every pipeline with stored state, oldest name first; only `state_dir` where it is given.

    Raises UsageError for state that cannot be read in `state_dir`, or of the pipeline `asked`. That of any other is
    left out with a warning on stderr: it must not hide those that run.
    """
    candidates = [state_dir] if state_dir is not None else _candidates(state_root())
    found = []
    for path in candidates:
        directory = StateDir(path)
        try:
            state = directory.load()
        except UsageError as error:
            if state_dir is not None or path.name == asked:
                raise
            click.echo(f"relayline: warning: {path.name} is ignored: {' '.join(error.message.split())}", err=True)
            continue
        if state is not None:
            found.append((directory, state))
    return found
