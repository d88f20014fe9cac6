"""The known state of every process of a launched pipeline, kept in state.json for `status`, `logs` and `down`. Event
loop only.
"""

from __future__ import annotations

import asyncio
import logging
import time
from pathlib import Path
from typing import Any

import msgspec

from relayline.deploy.launch.process_id import ProcessId, identify
from relayline.deploy.launch.state import STATE_VERSION, LaunchState, ProcessRecord, StateDir
from relayline.wire.common.phase import HostState, Phase
from relayline.wire.common.texts import file_error_text

log = logging.getLogger("relayline.up")


AGAIN_S = 5.0  # between two tries to store the state, as on a full disk
WHOLE = (HostState.READY, HostState.SLEEPING, HostState.SPARE, HostState.DRAINED)  # of a process in its desired state


class Board:
    """The current LaunchState; every change is stored at once, or as soon as the disk takes it."""

    def __init__(
        self,
        directory: StateDir,
        name: str,
        manifest: str,
        supervisor: ProcessId,
        processes: tuple[ProcessRecord, ...],
        certificate: Path | None = None,
    ) -> None:
        self._directory = directory
        self._again: asyncio.TimerHandle | None = None  # while what is stored is older
        self.state = LaunchState(
            STATE_VERSION,
            name,
            manifest,
            Phase.STARTING,
            supervisor.pid,
            supervisor.start_ticks,
            processes=processes,
            phase_since_ns=time.monotonic_ns(),
            certificate=str(certificate.absolute()) if certificate is not None else "",
        )
        directory.store(self.state)

    def __getitem__(self, name: str) -> ProcessRecord:
        """Return the record of a process. Raises KeyError for an unknown name."""
        for record in self.state.processes:
            if record.name == name:
                return record
        raise KeyError(name)

    def names(self) -> tuple[str, ...]:
        """Return the names of all processes."""
        return tuple(record.name for record in self.state.processes)

    def has(self, name: str) -> bool:
        """Return whether a process of that name belongs to this pipeline."""
        return name in self.names()

    def set_process(self, name: str, **changes: Any) -> ProcessRecord:
        """Change fields of a process's record; the phase follows from all of them."""
        changed = msgspec.structs.replace(self[name], **changes)
        records = tuple(changed if record.name == name else record for record in self.state.processes)
        phase = self.state.phase
        if phase.is_up:
            is_whole = all(record.state in WHOLE for record in records)
            phase = Phase.READY if is_whole else Phase.RECOVERING
        self._store(processes=records, phase=phase)
        return changed

    def note_start(self, name: str, pid: int, **changes: Any) -> None:
        """A process was started."""
        process = identify(pid) or ProcessId(0, 0)  # it may have ended since
        self.set_process(name, state=HostState.STARTING, pid=process.pid, start_ticks=process.start_ticks, **changes)

    def note_end(self, name: str, state: HostState, **changes: Any) -> None:
        """A process runs no more."""
        self.set_process(name, state=state, pid=0, start_ticks=0, **changes)

    def add(self, record: ProcessRecord) -> None:
        """Take one more process."""
        self._store(processes=(*self.state.processes, record))

    def remove(self, name: str) -> None:
        """Forget a process, if it is known."""
        self._store(processes=tuple(record for record in self.state.processes if record.name != name))

    def unlike_manifest(self) -> frozenset[str]:
        """As `unlike_manifest`, of the present state."""
        return unlike_manifest(self.state)

    def set_phase(self, phase: Phase, reason: str = "") -> None:
        """Enter a phase."""
        self._store(phase=phase, reason=reason)

    def set_addresses(self, url: str, join: str, enrol: str = "") -> None:
        """Note where clients and stages connect, and where hosts get their certificates."""
        self._store(url=url, join=join, enrol=enrol)

    def set_starts_again(self, starts_again: bool) -> None:
        """Note whether `relayline restart` may have the supervisor start again."""
        self._store(starts_again=starts_again)

    def _store(self, **changes: Any) -> None:
        if changes.get("phase", self.state.phase) != self.state.phase:
            changes["phase_since_ns"] = time.monotonic_ns()
        state = msgspec.structs.replace(self.state, **changes)
        if state != self.state:
            self.state = state
            self._write()

    def _write(self) -> None:
        was_behind, self._again = self._again, None
        if was_behind is not None:
            was_behind.cancel()
        try:
            self._directory.store(self.state)
        except OSError as error:
            # The pipeline keeps running; only `status` sees an older state until there is room again.
            if was_behind is None:
                log.warning("the state cannot be stored, which is tried again: %s", file_error_text(error))
            self._again = asyncio.get_running_loop().call_later(AGAIN_S, self._write)
        else:
            if was_behind is not None:
                log.info("the state is stored again")


def unlike_manifest(state: LaunchState) -> frozenset[str]:
    """Return a gateway's pipelines, by their own names, that are not as the manifest says: they could not start, or run
    as an earlier one said.
    """
    unlike = (record for record in state.processes if record.state is HostState.FAILED or record.is_behind)
    return frozenset(record.name.removeprefix(f"{state.name}-") for record in unlike)
