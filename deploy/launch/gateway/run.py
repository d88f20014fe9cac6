"""`relayline up` of a gateway's manifest: its processes run until it gets a signal."""

from __future__ import annotations

import asyncio
import os
import signal

from relayline.deploy.launch.gateway.keeper import Echo, Keeper
from relayline.deploy.launch.gateway.plan import GatewayPlan
from relayline.deploy.launch.leftovers import end_leftovers
from relayline.deploy.launch.log_files import SUPERVISOR
from relayline.deploy.launch.run import log_file
from relayline.deploy.launch.state import StateDir, register
from relayline.deploy.launch.supervisor import Emit
from relayline.deploy.manifest.gateway import write_gateway
from relayline.wire.common.errors import StartError
from relayline.wire.common.process import may_hang_up, run
from relayline.wire.links.ports import port_problem


def launch_gateway(plan: GatewayPlan, directory: StateDir, emit: Emit, *, echo: Echo | None = None) -> None:
    """Run a gateway and its pipelines until SIGINT or SIGTERM, or until its terminal closes.

    Raises UsageError and StartError before anything is started, StartError when a pipeline cannot be kept alive.
    """
    with directory.locked(plan.name), log_file(directory.log(SUPERVISOR)):
        register(directory.path)
        end_leftovers(directory.load())
        listener = plan.config.http
        if listener.port and (problem := port_problem(listener.host, listener.port)) is not None:
            raise StartError(f"the HTTP API: {problem}; end what holds it or name another port")
        directory.keys.unlink(missing_ok=True)
        if listener.api_keys_file is not None:
            directory.keys.write_bytes(os.fsencode(listener.api_keys_file.absolute()))

        write_gateway(plan.manifest, directory.manifest)
        for left in (directory.more, directory.restart):  # of a run before
            left.unlink(missing_ok=True)

        async def main(stopping: asyncio.Event) -> None:
            if may_hang_up():  # with API keys, `serving_gateway` has another handler
                asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, stopping.set)
            else:
                signal.signal(signal.SIGHUP, signal.SIG_IGN)
            await Keeper(plan, directory, emit, echo).run(stopping)

        run(main)
