"""Pipelines of this machine for programs: `running` goes the way of `relayline up`, without a command line."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

from relayline.coordinator.engine.roster import default_names
from relayline.deploy.launch.child import Child, child_environment
from relayline.deploy.launch.restarts import RestartPolicy
from relayline.deploy.launch.run import Launch, plan_of
from relayline.deploy.launch.state import StateDir
from relayline.deploy.launch.supervisor import STAGE_STOP_TIMEOUT_S, Supervisor
from relayline.deploy.manifest import Manifest
from relayline.wire.common.usable_cores import computing_cores
from relayline.wire.links import role_tokens
from relayline.wire.links.roles import Identity, Role
from relayline.wire.settings.setting import argument
from relayline.wire.settings.table import EngineSettings

__all__ = ["STAGE_STOP_TIMEOUT_S", "local_identity", "print_prefixed", "running", "stage_child", "threads_per_stage"]

OnLine = Callable[[str, str], None]


def threads_per_stage(n_stages: int) -> int:
    """Return this process's cores divided by the stages on it: two stages that spin on all cores ruin each other."""
    return max(1, len(computing_cores()) // n_stages)


def print_prefixed(name: str, text: str) -> None:
    """Show a child's line on stderr."""
    print(f"[{name}] {text}", file=sys.stderr, flush=True)


def stage_child(
    index: int, artifact: Path, arguments: Sequence[str], on_line: OnLine, *, n_threads: int, root: str = ""
) -> Child:
    """Return one stage of a split as a child that has not been started; `arguments` are passed on.

    `root`: the coordinator's join token, from which the stage gets its own; empty: it takes work from everyone on this
    machine.
    """
    token = role_tokens.token_for(root, local_identity(index), 0) if root else ""
    return Child(
        f"stage-{index}",
        ("stage", "--artifact", str(artifact), "--listen", "127.0.0.1:0",
         *argument(EngineSettings, "n_threads", n_threads), "--json", "--exit-with-stdin", *arguments),
        on_line,
        environment=child_environment(token),
    )  # fmt: skip


def local_identity(index: int) -> Identity:
    """Return the coordinator's name for a stage on its own machine that has no name."""
    return Identity(Role.STAGE, "localhost", default_names(index + 1)[index])


@contextlib.asynccontextmanager
async def running(
    manifest: Manifest,
    on_line: OnLine = print_prefixed,
    *,
    directory: StateDir | None = None,
    policy: RestartPolicy | None = None,
) -> AsyncIterator[tuple[Supervisor, dict[str, Any]]]:
    """Run a pipeline for the length of a with block; yields its supervisor and the ready event.

    Raises StartError. `on_line(name, text)` gets its processes' output. Without `directory` its state is deleted at the
    end.
    """
    with contextlib.ExitStack() as stack:
        if directory is None:
            directory = StateDir(Path(stack.enter_context(tempfile.TemporaryDirectory())) / manifest.name)
        stack.enter_context(directory.locked(manifest.name))
        to_start = Launch(manifest, directory.manifest)
        plan, mend = await asyncio.to_thread(plan_of, to_start, directory)
        supervisor = Supervisor(plan, directory, lambda _: None, policy=policy, echo=on_line, mend=mend)
        try:
            yield supervisor, await supervisor.start()
        finally:
            await supervisor.stop()
