"""For tests that must ask a server repeatedly, because nothing notifies them of the change."""

from __future__ import annotations

import asyncio

PAUSE_S = 0.02


async def pause() -> None:
    """Wait before the next look: asking without a pause takes the processor from those that are waited for."""
    await asyncio.sleep(PAUSE_S)
