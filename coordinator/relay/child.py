"""The coordinator's end of the relay's process: starts it once a stage asks for it, and again after it has died."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Mapping

import msgspec

from relayline.coordinator.relay.config import RelayConfig
from relayline.coordinator.relay.process import Event, Start
from relayline.wire.common import bounds
from relayline.wire.common.backoff import Backoff
from relayline.wire.common.child_command import module_command
from relayline.wire.common.errors import NotReadyError
from relayline.wire.common.logs import is_json
from relayline.wire.common.tasks import end_task, set_within
from relayline.wire.common.texts import named_stage
from relayline.wire.links.security import LinkSecurity

log = logging.getLogger("relayline.coordinator")

AGAIN_FIRST_S, AGAIN_MAX_S = 0.5, 15.0
END_S = 5.0  # for the process to end in order
FIGURES_S = 3.0  # for the relay to say what has changed, which it does about every second
LINE_BYTES_MAX = 256 * 1024  # figures of all stages


class RelayChild:
    """The relay's process. Event loop only."""

    def __init__(self, config: RelayConfig, security: LinkSecurity) -> None:
        self.config = config
        self._security = security
        self._port = config.port
        self._is_listening = False
        self._is_known = asyncio.Event()  # whether it listens, or why it does not
        self._watch: asyncio.Task[None] | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._problem = ""
        self._figures: dict[str, dict[str, int]] = {}
        self._told = asyncio.Event()  # replaced each time that the figures are other ones
        self._ports: dict[str, int] = {}  # of the stages, by name; also while the process does not run

    async def port(self) -> int:
        """Return the port where tunnels end, once the process listens. Raises NotReadyError where it does not."""
        if self._watch is None:
            self._watch = asyncio.create_task(self._keep_running())
        await set_within(self._is_known, bounds.RELAY_START_S)
        if not self._is_listening:
            why = self._problem or f"it has not started within {bounds.RELAY_START_S:.0f} s"
            raise NotReadyError(f"the relay of this coordinator does not run: {why}")
        return self._port

    def figures(self) -> Mapping[str, Mapping[str, int]]:
        """Return what the relay carries for each stage, by name, as it said last; empty while it does not run."""
        return self._figures

    async def check_port(self, name: str, port: int) -> None:
        """Raise NotReadyError where the relay says that it is reached at another port in this stage's place.

        Figures come late: one that differs gets a moment to become the same. Where there is none, nothing is compared.
        """
        try:
            async with asyncio.timeout(FIGURES_S):
                while (known := self.figures().get(name)) is not None and known["port"] != port:
                    await self._told.wait()
        except TimeoutError as error:
            at = self.figures().get(name, {}).get("port", 0)
            text = f"{named_stage(name)} says that it is reached at port {port}, but the relay has port {at} for it"
            raise NotReadyError(text) from error

    @property
    def process_id(self) -> int | None:
        """The process that runs; None for none."""
        return self._process.pid if self._process is not None else None

    async def close(self) -> None:
        """End the process."""
        if self._watch is not None:
            await end_task(self._watch)

    async def _keep_running(self) -> None:
        backoff = Backoff(AGAIN_FIRST_S, AGAIN_MAX_S)
        while True:
            try:
                await self._run()
            except OSError as error:
                self._problem = str(error.strerror or error)
            except Exception as error:  # a bug of ours, which stages are told of rather than left to wait
                log.exception("the relay's process was given up")
                self._problem = f"{type(error).__name__}: {error}"
            if self._is_listening:
                backoff.reset()
            self._is_listening = False
            self._have(figures={})
            self._problem = self._problem or "it ended, and is started again"
            self._is_known.set()
            log.warning("the relay does not run: %s", self._problem)
            await asyncio.sleep(backoff.next_s())

    async def _run(self) -> None:
        pipe = asyncio.subprocess.PIPE
        command = module_command("relayline.coordinator.relay.process")
        # In a session of its own: Ctrl-C is the coordinator's, which drains first.
        process = await asyncio.create_subprocess_exec(
            *command, stdin=pipe, stdout=pipe, limit=LINE_BYTES_MAX, start_new_session=True
        )
        assert process.stdin is not None
        assert process.stdout is not None
        self._process = process
        try:
            process.stdin.write(msgspec.json.encode(self._start()) + b"\n")
            async for line in process.stdout:
                self._take(msgspec.json.decode(line, type=Event))
            await process.wait()
        except (BrokenPipeError, ConnectionResetError, msgspec.MsgspecError, ValueError) as error:
            self._problem = str(error)
        finally:
            self._process = None
            await _end(process)

    def _start(self) -> Start:
        security, root = self._security, logging.getLogger()
        return Start(
            self.config.host,
            self._port,
            dict(self.config.ports),
            self._ports,
            [str(path) for path in security.files] if security.is_tls else [],
            security.token,
            str(security.token_file or ""),
            security.insecure,
            is_json(),
            root.isEnabledFor(logging.DEBUG),
        )

    def _take(self, event: Event) -> None:
        if event.port:
            self._port = event.port  # the same one for its successors, which stages still know
            self._is_listening, self._problem = True, ""
            self._is_known.set()
            log.info("relay runs", extra={"fields": {"host": self.config.host, "port": event.port}})
        elif event.problem:
            self._problem = event.problem
        else:
            self._have(event.stages)
            ports = {name: figures["port"] for name, figures in event.stages.items()}
            for name, port in self._ports.items():  # those that have not come back yet
                if len(ports) < bounds.RELAYED_STAGES_MAX and port not in ports.values():
                    ports.setdefault(name, port)
            self._ports = ports

    def _have(self, figures: dict[str, dict[str, int]]) -> None:
        self._figures = figures
        self._told.set()
        self._told = asyncio.Event()


async def _end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        assert process.stdin is not None
        process.stdin.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(END_S):
                await process.wait()
    if process.returncode is None:
        process.kill()
        await process.wait()
