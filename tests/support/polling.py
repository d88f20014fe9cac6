"""For tests that ask a server again and again, where nothing tells of the change that they wait for."""

from __future__ import annotations

import asyncio

PAUSE_S = 0.02


async def pause() -> None:
    """Wait before the next look: asking without a pause takes the processor from those that are waited for."""
    await asyncio.sleep(PAUSE_S)
