"""Looking at launched pipelines and ending them from outside, through their state directories."""

from __future__ import annotations

import dataclasses
import datetime
import http.client
import json
import os
import signal
import ssl
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any, cast

import click
import msgspec

from relayline.deploy.launch.leftovers import end_leftovers
from relayline.deploy.launch.plan_file import read_plan
from relayline.deploy.launch.process_id import age_s, is_running, send_signal, wait_ended
from relayline.deploy.launch.state import NOT_SEEN, LaunchState, ProcessRecord, StateDir, find_running, state_root
from relayline.deploy.launch.trust import pinned, refused
from relayline.deploy.launch.waiting import fetched_text, waits_text
from relayline.wire.common.errors import RelaylineError, StartError, UsageError
from relayline.wire.common.phase import HostState, Phase
from relayline.wire.common.texts import file_error_text, system_reason

ANSWER_TIMEOUT_S = 5.0  # of the coordinator, for the running state; it asks its stages for up to two seconds
ANSWER_BYTES_MAX = 4 << 20
REFUSED = "the coordinator answers"  # and without some of the requested parts
UNTRUSTED = "its certificate "  # begins the reason if it answers, but is not trusted
KILL_WAIT_S = 10.0
BEGINNING = (HostState.STARTING, HostState.MEASURING, HostState.FETCHING, HostState.LOADING)


@dataclasses.dataclass(frozen=True, slots=True)
class Launched:
    """One pipeline that was launched on this machine, running or not."""

    directory: StateDir
    """Its files."""
    state: LaunchState
    """The supervisor's last record of it."""

    @property
    def is_running(self) -> bool:
        """Whether its supervisor lives."""
        return is_running(self.state.supervisor)

    @property
    def phase(self) -> Phase:
        """The phase as the supervisor sees it, or DEAD where that ended without noting so.

        It is STARTING from the end of a pipeline that `relayline restart` starts again, though a large model is split,
        or though the new start failed.
        """
        if self.state.phase.has_ended and self.is_running and self.directory.restart.exists():
            return Phase.STARTING
        return self.state.phase if self.is_running or self.state.phase.has_ended else Phase.DEAD


def launched(state_dir: Path | None, asked: str = "") -> list[Launched]:
    """Return every pipeline that was launched on this machine, by name; `state_dir` alone where it is given.

    Raises UsageError where the state in `state_dir`, or of the pipeline `asked`, cannot be read.
    """
    return [Launched(directory, state) for directory, state in find_running(state_dir, asked)]


def name_of(given: str) -> str:
    """Return the pipeline that a command line means: a name, or a manifest or model file, whose name it has."""
    path = Path(given)
    if path.suffix == ".gguf":
        from relayline.deploy.manifest.starter import pipeline_name

        return pipeline_name(path.name)
    if path.suffix in (".yaml", ".yml", ".json") or path.is_file():
        # Not loaded where a name is enough.
        from relayline.deploy.manifest import load_manifest
        from relayline.deploy.manifest.gateway import is_gateway, load_gateway

        return load_gateway(path).name if is_gateway(path) else load_manifest(path).name
    return given


def find(given: str | None, state_dir: Path | None, *, by_url: bool = False) -> Launched | None:
    """Return the pipeline that is meant: without a name the one in `state_dir`, or the one that runs; None if there is
    none. A gateway's pipelines do not count beside it. Of several with one name it is the one that runs, or else the
    one that ran last.

    Raises UsageError for a name that was never launched here or whose state cannot be read, and where several run and
    it does not say which one is meant. `by_url`: the command tells them apart by --url, not by --state-dir.
    """
    try:
        name = None if given is None else name_of(given)
    except UsageError:  # a mistake in the manifest does not keep what it has started from being looked after
        if len(begun := _begun_with(str(given), launched(state_dir))) == 1:
            return begun[0]
        raise
    found = launched(state_dir, name or "")
    if name is None and state_dir is not None:
        return next(iter(found), None)
    if name is None:
        running = _outermost([pipeline for pipeline in found if pipeline.is_running])
        if len(running) > 1:
            names = ", ".join(_told_apart(running, by_url=by_url))
            raise UsageError(f"several pipelines run here; name one of {names}")
        return running[0] if running else None
    called_so = [pipeline for pipeline in found if pipeline.state.name == name]
    running = [pipeline for pipeline in called_so if pipeline.is_running]
    if len(running) > 1:
        flags = " or ".join(_told_apart(running, by_url=by_url)) + (", not the name" if by_url else "")
        raise UsageError(f"several pipelines named {name!r} run here; give {flags}")
    if called_so:
        return running[0] if running else max(called_so, key=lambda pipeline: pipeline.directory.stored_ns)
    known = ", ".join(dict.fromkeys(pipeline.state.name for pipeline in found)) or "none"
    raise UsageError(
        f"no pipeline {name!r} was launched here (known: {known}); state is kept in {state_dir or state_root()}"
    )


def _told_apart(running: list[Launched], *, by_url: bool) -> list[str]:
    """Return the names of pipelines, and for those that share one the flag that tells them apart."""
    names = [pipeline.state.name for pipeline in running]
    return [
        _flag_of(pipeline, by_url=by_url) if names.count(name) > 1 else name
        for name, pipeline in zip(names, running, strict=True)
    ]


def _flag_of(pipeline: Launched, *, by_url: bool) -> str:
    url, path = pipeline.state.shown_url, pipeline.directory.path
    if not by_url:
        return f"--state-dir {path}"
    return f"--url {url}" if url else f"--url of the one in {path}, once it has one"


def _begun_with(given: str, found: list[Launched]) -> list[Launched]:
    """Return those that run and were started with this manifest."""
    return [each for each in found if each.is_running and each.state.manifest == str(Path(given).absolute())]


def by_name(manifest: Path) -> dict[str, Launched]:
    """Return the pipelines of this machine by name. Of several with one name it is the one that runs and was started
    with this manifest, else one that runs, else the one that ran last.
    """
    own = str(manifest.absolute())
    found = sorted(launched(None), key=lambda one: (one.is_running, one.state.manifest == own, one.directory.stored_ns))
    return {one.state.name: one for one in found}


def gateway_over(pipeline: Launched) -> str | None:
    """Return the name of the gateway that runs a pipeline, None for none."""
    own = pipeline.state.supervisor_pid
    for each in launched(None):
        if each.is_running and any(record.role == "pipeline" and record.pid == own for record in each.state.processes):
            return each.state.name
    return None


def _outermost(running: list[Launched]) -> list[Launched]:
    """Leave out the pipelines that a gateway among them has started."""
    behind = {record.name for each in running for record in each.state.processes if record.role == "pipeline"}
    return [each for each in running if each.state.name not in behind]


def ended_unexpectedly() -> list[Launched]:
    """Return the pipelines of this machine that no supervisor runs, though none of them was ended."""
    return _outermost([pipeline for pipeline in launched(None) if pipeline.phase is Phase.DEAD])


def describe(pipeline: Launched) -> dict[str, Any]:
    """Return what `relayline status --json` prints of one pipeline. Times in seconds.

    `phase` is what clients get, in the coordinator's own word if it answers.
    """
    state = pipeline.state
    running = pipeline.is_running
    live, problem = _live(pipeline) if running and state.url else (None, "")
    phase, phase_s = _phase(pipeline, live, is_answering=not problem or problem.startswith(UNTRUSTED))
    if problem.startswith(REFUSED) and (word := _health(state)) is not None:  # /health asks for no key
        phase, phase_s = word, None
    known = [*live["stages"], *live.get("idle", ())] if live is not None else []
    stages = {stage.get("name"): stage for stage in known}
    if live is not None and phase is Phase.READY:
        stages["coordinator"] = {"state": HostState.READY.value}
    for name, fetch in (_move_of(live).get("fetches") or {}).items():
        if name in stages:
            stages[name]["next_layers"] = fetch
    return {
        "name": state.name,
        "phase": phase.value,
        "phase_s": round(phase_s, 1) if phase_s is not None else None,
        "reason": state.reason,
        "url": state.url if running else "",
        "join": state.join if running else "",
        "manifest": state.manifest,
        "state_dir": str(pipeline.directory.path),
        "pid": state.supervisor_pid if running else None,
        "uptime_s": round(age_s(state.supervisor), 1) if running else None,
        "imbalance": live.get("imbalance") if live is not None else None,
        "planned": _planned(read_plan(pipeline.directory.plan), live),
        "stages": [_held(stage) for stage in live["stages"]] if live is not None else None,
        "requests": {key: live.get(key) for key in ("running", "waiting")} if live is not None else None,
        "batches": live.get("batches") or None if live is not None else None,
        "prefixes": _prefixes(live) if live is not None else None,
        "problem": problem,
        "pipelines": live.get("pipelines") if live is not None else None,
        "processes": [
            _process(_with_host(pipeline, record), stages.get(record.name), is_supervised=running)
            | _joining(pipeline, record, is_supervised=running)
            for record in state.processes
        ],
    }


def _with_host(pipeline: Launched, record: ProcessRecord) -> ProcessRecord:
    """Return a record with the host that its stage was invited from, if it was added while serving and never came."""
    if record.host != NOT_SEEN:
        return record
    from relayline.deploy.launch.inviting import added_host

    return msgspec.structs.replace(record, host=added_host(pipeline, record.name) or NOT_SEEN)


def _joining(pipeline: Launched, record: ProcessRecord, *, is_supervised: bool) -> dict[str, Any]:
    """Return the newest join line of a stage that is awaited, and its short form, while that is good.

    `revoked`: only such a line lets its host join again.
    """
    none = {"short": "", "short_until_unix_s": None, "revoked": False}
    if not is_supervised or record.host == "localhost" or record.state not in (HostState.WAITING, HostState.LOST):
        return none
    from relayline.deploy.launch.inviting import has_lost_credentials, open_line

    none["revoked"] = is_revoked = has_lost_credentials(pipeline, record.name)
    found = open_line(pipeline, record.name, datetime.datetime.now(datetime.UTC))
    if found is None:
        return none | {"command": ""} if is_revoked else none
    return none | {"command": found.line, "short": found.short, "short_until_unix_s": found.expires_unix_s}


def _prefixes(live: dict[str, Any]) -> dict[str, int] | None:
    """Return what the stages have stored for prompts to come, bytes of all of them together; None if they do not."""
    stored, tiers = live.get("stored_prefixes"), [stage["tier"] for stage in live["stages"] if stage.get("tier")]
    if not stored or not tiers:
        return None
    found: dict[str, int] = dict(stored)
    return found | {key: sum(tier[key] for tier in tiers) for key in ("memory_bytes", "disk_bytes")}


def _move_of(live: dict[str, Any] | None) -> dict[str, Any]:
    """Return the latest change of layers; empty for none."""
    return ((live or {}).get("layers") or {}).get("move") or {}


def _held(stage: dict[str, Any]) -> dict[str, Any]:
    """Return which layers a stage holds."""
    return {"name": stage.get("name"), "layers": stage.get("layers")}


def _planned(kept: dict[str, Any] | None, live: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return which stage got which layers and why, if that is the running state; None for an outdated plan."""
    planned = (live.get("planned") if live is not None else None) or kept
    if planned is None or live is None:
        return planned
    running = [_held(stage) for stage in live["stages"]]
    return planned if [_held(stage) for stage in planned["stages"]] == running else None


def _phase(pipeline: Launched, live: dict[str, Any] | None, *, is_answering: bool) -> tuple[Phase, float | None]:
    """Return the state for clients and its age in seconds; None if that is not known."""
    state = pipeline.state
    begins = pipeline.phase is Phase.STARTING and live is not None and live.get("phase") == Phase.UNREACHABLE
    if live is not None and live.get("phase") in set(Phase) and not begins:  # a gateway has not reached any so far
        return Phase(live["phase"]), live.get("phase_s")
    since_s = (time.monotonic_ns() - state.phase_since_ns) / 1e9 if state.phase_since_ns else None
    if pipeline.phase.is_up and not is_answering:
        coordinator = next((record for record in state.processes if record.role == "coordinator"), None)
        if coordinator is None or coordinator.state is HostState.READY:
            return Phase.UNREACHABLE, None
        return Phase.RECOVERING, since_s  # it is being started again
    return pipeline.phase, since_s if pipeline.is_running else None


def _process(record: ProcessRecord, live: dict[str, Any] | None, *, is_supervised: bool) -> dict[str, Any]:
    """Return one process; `live` is the coordinator's view of a stage."""
    process = record.process
    lives = process is not None and is_running(process)
    entry = cast(dict[str, Any], msgspec.to_builtins(record))
    del entry["start_ticks"]
    entry["uptime_s"] = round(age_s(process), 1) if process is not None and lives else None
    entry["layers"] = live.get("layers") if live is not None else None
    entry["last_heard_s"] = _last_heard_s(live) if live is not None else None
    if not lives:
        entry["pid"] = None
        if not is_supervised and record.state is not HostState.FAILED:
            entry["state"] = HostState.STOPPED.value
    if live is not None and live.get("state") == HostState.READY and record.state in BEGINNING:
        entry["state"], entry["detail"] = live["state"], ""  # the supervisor hears of it a moment later
    if live is not None and live.get("silent") and record.state is HostState.READY:
        entry["state"] = HostState.SILENT.value
        entry["detail"] = f"has not answered for {live['last_heard_s']:.0f} s"
    if live is not None and live.get("state") in (HostState.SLEEPING, HostState.LOADING) and lives:
        entry["state"] = live["state"]
    if live is not None and live.get("state") in (HostState.SPARE, HostState.DRAINED):
        entry["state"] = live["state"]
        entry["detail"] = entry["detail"] if live.get("here", True) else "not here"
    elif live is not None and live.get("fetch_total_bytes"):
        entry["detail"] = f"has {fetched_text(live['fetched_bytes'], live['fetch_total_bytes'])} of its layers"
        if trouble := live.get("fetch_trouble"):
            entry["detail"] += f"; {waits_text(trouble)}"
    elif live is not None and (fetch := live.get("next_layers")):
        entry["detail"] = f"has {fetched_text(fetch['done_bytes'], fetch['total_bytes'])} of its next layers"
        if fetch["trouble"]:
            entry["detail"] += f"; {waits_text(fetch['trouble'])}"
    elif live is not None and (away := _away_text(live)):
        entry["detail"] = away
    elif live is not None and (relay := live.get("relay")) is not None and not entry["detail"]:
        entry["detail"] = "through the relay" if relay["connected"] else "its tunnel to the relay is broken"
    return entry


def _last_heard_s(live: dict[str, Any]) -> float | None:
    """Return how long ago a stage was heard. One without layers has no heartbeats, but a moment at which it left."""
    heard_s: float | None = live.get("last_heard_s")
    return live.get("state_s") if heard_s is None and live.get("state") == HostState.LOST else heard_s


def _away_text(live: dict[str, Any]) -> str:
    """Return what comes of the layers of a stage that is away, and why it left if it said so; empty for neither."""
    parts = []
    if live.get("takeover_in_s") is not None:
        parts.append(f"other stages take over its layers in {live['takeover_in_s']:.0f} s")
    if failure := live.get("failure"):
        parts.append(f"it ended: {failure}")
    return "; ".join(parts)


def _live(pipeline: Launched) -> tuple[dict[str, Any] | None, str]:
    """Ask the coordinator for its present state; (None, why) if it does not answer."""
    key = key_of(pipeline)
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    status, found, problem = _asked(pipeline.state, "/v1/pipeline", headers)
    if problem.startswith(UNTRUSTED):
        return None, problem
    if problem:
        return None, f"the coordinator does not answer: {problem}"
    if status != 200:
        return None, f"{REFUSED} {status}" + (": an API key is needed" if status == 401 else "")
    return (found, "") if isinstance(found, dict) and "stages" in found else (None, f"{REFUSED} something else")


def _health(state: LaunchState) -> Phase | None:
    """Return the coordinator's public description of itself, None if it does not answer."""
    status, found, _ = _asked(state, "/health", {})
    if status == 200:
        return Phase.READY
    word = found.get("status") if isinstance(found, dict) else None
    return Phase(word) if word in set(Phase) else None


def _asked(state: LaunchState, path: str, headers: dict[str, str]) -> tuple[int, Any, str]:
    """GET a path of a pipeline; returns status, JSON (None if it is not JSON), and the reason if there is no answer."""
    request = urllib.request.Request(f"{state.url}{path}", headers=headers)
    # Never through a proxy: the coordinator is on this machine.
    opener = urllib.request.build_opener(
        urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=pinned(state))
    )
    try:
        with opener.open(request, timeout=ANSWER_TIMEOUT_S) as answer:
            return answer.status, _json(answer.read(ANSWER_BYTES_MAX)), ""
    except urllib.error.HTTPError as error:
        with error:
            return error.code, _json(error.read(ANSWER_BYTES_MAX)), ""
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", error)
        if isinstance(reason, ssl.SSLCertVerificationError):
            return 0, None, refused(reason)
        return 0, None, (isinstance(reason, OSError) and system_reason(reason)) or str(reason)


def _json(raw: bytes) -> Any:
    try:
        return json.loads(raw)
    except ValueError:
        return None


def key_of(pipeline: Launched) -> str:
    """Return an API key: RELAYLINE_API_KEY, or one of the pipeline's file if this user may read it; empty for none."""
    if own := os.environ.get("RELAYLINE_API_KEY"):
        return own
    from relayline.deploy.manifest import load_manifest

    try:
        if keys := pipeline.directory.keys_named():
            return first_key(keys)
        manifest = load_manifest(pipeline.directory.manifest)  # with what flags changed
        path = manifest.spec.coordinator.api_keys_file
        if path is None:
            return ""
        return first_key(manifest.resolve(path))
    except (RelaylineError, OSError, UnicodeDecodeError):
        return ""


def first_key(path: Path, *, of_gateway: bool = False) -> str:
    """Return the first key of a file of API keys, or the first that is for gateways; empty for none.

    Raises OSError, UnicodeDecodeError.
    """
    from relayline.coordinator.http.edge import key_file  # which most commands have no use for

    return key_file.first_key(path.read_text(encoding="utf-8"), of_gateway=of_gateway)


def end(pipeline: Launched, timeout_s: float, *, force: bool) -> None:
    """End a pipeline in order and wait for it. Raises StartError if it has not ended within `timeout_s`.

    With `force` it is killed then. Processes left behind by a supervisor that died are ended too. Raises StartError
    also if another supervisor has it: one that starts it just now, or on a machine that shares the directory.
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
    if left is not None and not left.phase.has_ended:
        if pipeline.directory.is_held():
            path = pipeline.directory.path
            raise StartError(f"{name} starts just now, or runs on another machine that shares {path}: end it there")
        end_leftovers(left)
        gone = tuple(
            msgspec.structs.replace(record, state=HostState.STOPPED, pid=0, start_ticks=0) for record in left.processes
        )
        try:
            pipeline.directory.store(msgspec.structs.replace(left, phase=Phase.STOPPED, processes=gone))
        except OSError as error:  # as of a full disk: it has ended all the same
            text = f"that {name} has ended cannot be noted: {file_error_text(error)}"
            click.echo(f"relayline: warning: {text}", err=True)
