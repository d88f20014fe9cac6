"""Splits a model in a separate process, so that the launcher can work in the meantime."""

from __future__ import annotations

import asyncio

from relayline.wire.common.child_command import module_command


async def split_apart(model: str, *flags: str) -> str:
    """Run `relayline split MODEL FLAGS`; returns its error, empty if there was none. Cancelling it ends the process."""
    command = module_command("relayline.deploy.cli", "split", model, *flags)
    none, pipe = asyncio.subprocess.DEVNULL, asyncio.subprocess.PIPE
    splitting = await asyncio.create_subprocess_exec(*command, stdin=none, stdout=none, stderr=pipe)
    try:
        _, errors = await splitting.communicate()
    except asyncio.CancelledError:
        splitting.kill()
        await splitting.wait()
        raise
    if not splitting.returncode:
        return ""
    lines = errors.decode(errors="replace").strip().splitlines() or [f"exit code {splitting.returncode}"]
    return lines[-1].removeprefix("relayline: error: ")
