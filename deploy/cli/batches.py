"""How far the batches are that a coordinator keeps, in `relayline status` and `top`. Pure."""

from __future__ import annotations

from relayline.wire.common.texts import counted


def batches_line(batches: dict[str, int]) -> str:
    """Return how far the batches are that a coordinator keeps; empty where none run or wait. Pure."""
    if not batches.get("running") and not batches.get("waiting"):
        return ""
    n_done, n_failed = batches["requests_done"], batches["requests_failed"]
    failed = f", {n_failed:,} of them failed" if n_failed else ""
    return (
        f"batches: {batches['running']} running, {batches['waiting']} waiting, "
        f"{counted(n_done, 'request')} done{failed}, {batches['requests_waiting']:,} to do"
    )
