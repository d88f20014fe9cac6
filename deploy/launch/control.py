"""Looking at launched pipelines and ending them from outside, through their state directories."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any, cast

import msgspec

from relayline.deploy.launch.leftovers import end_leftovers
from relayline.deploy.launch.process_id import age_s, is_running, send_signal, wait_ended
from relayline.deploy.launch.state import LaunchState, StateDir, find_running, state_root
from relayline.wire.common.errors import RelaylineError, StartError, UsageError

ANSWER_TIMEOUT_S = 2.0  # of the coordinator, for what runs now
ANSWER_BYTES_MAX = 4 << 20
KILL_WAIT_S = 10.0


@dataclasses.dataclass(frozen=True, slots=True)
class Launched:
    """One pipeline that was launched on this machine, running or not."""

    directory: StateDir
    """Its files."""
    state: LaunchState
    """What its supervisor noted last."""

    @property
    def is_running(self) -> bool:
        """Whether its supervisor lives."""
        return is_running(self.state.supervisor)

    @property
    def phase(self) -> str:
        """The phase, or `dead` where the supervisor ended without noting so."""
        if self.is_running or self.state.phase in ("stopped", "failed"):
            return self.state.phase
        return "dead"


def launched(state_dir: Path | None, asked: str = "") -> list[Launched]:
    """Return every pipeline that was launched on this machine, by name; `state_dir` alone where it is given.

    Raises UsageError where the state in `state_dir`, or of the pipeline `asked`, cannot be read.
    """
    return [Launched(directory, state) for directory, state in find_running(state_dir, asked)]


def name_of(given: str) -> str:
    """Return the pipeline that a command line means: a name, or a manifest file, whose name it takes."""
    path = Path(given)
    if path.suffix in (".yaml", ".yml", ".json") or path.is_file():
        from relayline.deploy.manifest import load_manifest  # not loaded where a name is enough

        return load_manifest(path).name
    return given


def find(given: str | None, state_dir: Path | None) -> Launched | None:
    """Return the pipeline that is meant; without a name the one that runs, None if none does.

    Raises UsageError for a name that was never launched here or whose state cannot be read, and where several run and
    none is named.
    """
    name = None if given is None else name_of(given)
    found = launched(state_dir, name or "")
    if name is None:
        running = [pipeline for pipeline in found if pipeline.is_running]
        if len(running) > 1:
            names = ", ".join(pipeline.state.name for pipeline in running)
            raise UsageError(f"several pipelines run here; name one of {names}")
        return running[0] if running else None
    for pipeline in found:
        if pipeline.state.name == name:
            return pipeline
    known = ", ".join(pipeline.state.name for pipeline in found) or "none"
    raise UsageError(
        f"no pipeline {name!r} was launched here (known: {known}); state is kept in {state_dir or state_root()}"
    )


def describe(pipeline: Launched) -> dict[str, Any]:
    """Return what `relayline status --json` prints of one pipeline. Times in seconds."""
    state = pipeline.state
    running = pipeline.is_running
    processes = []
    for record in state.processes:
        process = record.process
        lives = process is not None and is_running(process)
        entry = cast(dict[str, Any], msgspec.to_builtins(record))
        del entry["start_ticks"]
        entry["uptime_s"] = round(age_s(process), 1) if process is not None and lives else None
        if not lives:
            entry["pid"] = None
            if not running and record.state != "failed":
                entry["state"] = "stopped"
        processes.append(entry)
    live, problem = _live(state) if running and state.url else (None, "")
    return {
        "name": state.name,
        "phase": pipeline.phase,
        "reason": state.reason,
        "url": state.url if running else "",
        "join": state.join if running else "",
        "manifest": state.manifest,
        "state_dir": str(pipeline.directory.path),
        "pid": state.supervisor_pid if running else None,
        "uptime_s": round(age_s(state.supervisor), 1) if running else None,
        "requests": {key: live.get(key) for key in ("running", "waiting")} if live is not None else None,
        "serving": live.get("phase") if live is not None else None,
        "problem": problem,
        "processes": processes,
    }


def _live(state: LaunchState) -> tuple[dict[str, Any] | None, str]:
    """Ask the coordinator what it does now; (None, why) if it does not say."""
    request = urllib.request.Request(f"{state.url}/v1/pipeline", headers=_credentials(state))
    try:
        # Never through a proxy: the coordinator is on this machine.
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(
            request, timeout=ANSWER_TIMEOUT_S
        ) as answer:
            found = json.loads(answer.read(ANSWER_BYTES_MAX))
    except urllib.error.HTTPError as error:
        error.close()
        return None, f"the coordinator answers {error.code}" + (": an API key is needed" if error.code == 401 else "")
    except (OSError, ValueError) as error:
        return None, f"the coordinator does not answer: {getattr(error, 'reason', error)}"
    return (found, "") if isinstance(found, dict) else (None, "the coordinator answers something else")


def _credentials(state: LaunchState) -> dict[str, str]:
    """Return the header with an API key: RELAYLINE_API_KEY, or one of the manifest's file if this user may read it."""
    if own := os.environ.get("RELAYLINE_API_KEY"):
        return {"Authorization": f"Bearer {own}"}
    from relayline.deploy.manifest import load_manifest

    try:
        manifest = load_manifest(Path(state.manifest))
        path = manifest.spec.coordinator.api_keys_file
        if path is None:
            return {}
        lines = manifest.resolve(path).read_text(encoding="utf-8").splitlines()
    except (RelaylineError, OSError, UnicodeDecodeError):
        return {}
    key = next((line.split()[-1] for line in lines if line.strip() and not line.startswith("#")), "")
    return {"Authorization": f"Bearer {key}"} if key else {}


def end(pipeline: Launched, timeout_s: float, *, force: bool) -> None:
    """End a pipeline in order and wait for it. Raises StartError if it has not ended within `timeout_s`.

    With `force` it is killed then. Processes left behind by a supervisor that died are ended too.
    """
    name, supervisor = pipeline.state.name, pipeline.state.supervisor
    began_s = time.monotonic()
    if send_signal(supervisor, signal.SIGTERM) and not wait_ended(supervisor, timeout_s):
        if not force:
            waited_s = time.monotonic() - began_s
            raise StartError(f"{name} has not ended after {waited_s:.0f} s; wait for its requests, or use --force")
        send_signal(supervisor, signal.SIGKILL)
        wait_ended(supervisor, KILL_WAIT_S)
    left = pipeline.directory.load()
    if left is not None and left.phase not in ("stopped", "failed"):
        end_leftovers(left)
        gone = tuple(
            msgspec.structs.replace(record, state="stopped", pid=0, start_ticks=0) for record in left.processes
        )
        pipeline.directory.store(msgspec.structs.replace(left, phase="stopped", processes=gone))
