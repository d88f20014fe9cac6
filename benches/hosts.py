"""Four hosts, 1x, 1x, 2x and 4x as fast: a plan from their own measurements, compared with equal shares. `python -m
benches.hosts`.

`relayline up` gets a manifest with four hosts and no layer ranges. This program starts the stages as a person on each
host would. All run on this machine. Their native steps are lengthened (benches/slowed): a step takes a set number of
milliseconds per layer, independent of the load.

The plan's tokens per second are compared with those of 8 streams in a closed loop. Then `relayline move` gives all
hosts equal shares while the pipeline serves, and the same streams run again. Goals: within 15 % of the prediction, and
at least 1.5 times as many tokens as with equal shares.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from benches import interrupt, machine
from benches.models import SHAPES, Shape, model
from benches.plan_accuracy import steady_rate
from benches.reference import prompts_for
from relayline.deploy.cli import load
from relayline.deploy.cli.load import Target, client
from relayline.deploy.testing.slow_hosts import SLOWED, local_command, manifest_text
from relayline.wire.common.child_command import module_command

GOAL_MISS, GOAL_GAIN = 0.15, 1.5
LAYER_MS = {"laptop": 40.0, "old": 40.0, "desk": 20.0, "server": 10.0}  # 1x, 1x, 2x, 4x
SHAPE = Shape("toy16", "llama", 256, 16, 4, 2, 64, 768, 4_096)
N_STREAMS, N_PROMPT = 8, 16
READY_S = 180.0


class Hosts:
    """A pipeline of `relayline up` and the stages started for it."""

    def __init__(self, logs: Path, layer_ms: dict[str, float]) -> None:
        self.logs, self.layer_ms = logs, layer_ms
        self.planned: dict[str, Any] = {}
        self._stages: list[asyncio.subprocess.Process] = []

    async def start(self, up: asyncio.subprocess.Process, state: Path) -> dict[str, Any]:
        """Run the commands that `up` prints until it is ready; returns the ready event."""
        assert up.stdout is not None
        async for line in up.stdout:
            event: dict[str, Any] = json.loads(line)
            if event["event"] == "remote":
                await self._stage(event["name"], local_command(event["command"], state))
            elif event["event"] == "planned":
                self.planned = event["plan"]
                print(event["message"], flush=True)
            elif event["event"] == "ready":
                return event
        raise RuntimeError(f"up ended with exit code {await up.wait()}; see {self.logs}")

    async def _stage(self, name: str, words: Sequence[str]) -> None:
        environment = {**os.environ, "SLOWED_LAYER_MS": str(self.layer_ms[name]), "PYTHONPATH": str(SLOWED)}
        # Each host has its own disk: hosts share neither fetched layers nor measurements.
        environment["XDG_CACHE_HOME"] = str(self.logs / f"{name}-cache")
        with (self.logs / f"{name}.log").open("wb") as log:
            command = module_command("relayline.deploy.cli", *words, "--always-fetch")
            self._stages.append(await asyncio.create_subprocess_exec(*command, stdout=log, stderr=log, env=environment))

    async def stop(self) -> None:
        """End the stages."""
        for stage in self._stages:
            with contextlib.suppress(ProcessLookupError):
                stage.terminate()
        await asyncio.gather(*(stage.wait() for stage in self._stages))


@contextlib.asynccontextmanager
async def unequal_hosts(
    path: Path, logs: Path, layer_ms: dict[str, float], n_lanes: int
) -> AsyncIterator[tuple[Hosts, dict[str, Any]]]:
    """Run a pipeline over hosts of these speeds, planned from their measurements; yields it and its ready event."""
    (logs / "manifest.yaml").write_text(manifest_text(path, list(layer_ms), n_lanes))
    state, hosts = logs / "state", Hosts(logs, layer_ms)
    environment = {**os.environ, "XDG_STATE_HOME": str(logs / "xdg-state"), "XDG_CACHE_HOME": str(logs / "cache")}
    command = module_command("relayline.deploy.cli", "up", str(logs / "manifest.yaml"), "--json", "--state-dir",
                             str(state))  # fmt: skip
    with (logs / "up.log").open("wb") as log:
        up = await asyncio.create_subprocess_exec(
            *command, stdout=asyncio.subprocess.PIPE, stderr=log, env=environment, limit=1 << 20
        )
    try:
        async with asyncio.timeout(READY_S):
            ready = await hosts.start(up, state)
        yield hosts, ready
    finally:
        with contextlib.suppress(ProcessLookupError):
            up.terminate()
        await asyncio.gather(up.wait(), hosts.stop())


async def measured(target: Target, n_vocab: int, n_tokens: int) -> float:
    """Return the tokens per second of the streams while all of them decode."""
    prompts = prompts_for(N_STREAMS, N_PROMPT, n_vocab)
    async with client() as session:
        await load.closed_loop(session, target, prompts, n_streams=N_STREAMS, n_tokens=8)
        return steady_rate(await load.closed_loop(session, target, prompts, n_streams=N_STREAMS, n_tokens=n_tokens))


async def compared(logs: Path, n_tokens: int) -> dict[str, Any]:
    """Return the planned and the measured rates."""
    path = model(SHAPE, "q4_0")
    async with unequal_hosts(path, logs, LAYER_MS, N_STREAMS) as (hosts, ready):
        target = Target(ready["url"], "openai", ready["model"])
        rate = await measured(target, SHAPE.n_vocab, n_tokens)
        cuts = [SHAPE.n_layers * at // len(LAYER_MS) for at in range(1, len(LAYER_MS))]
        move = module_command("relayline.deploy.cli", "move", "--cuts", ",".join(map(str, cuts)), "--url", ready["url"])
        mover = await asyncio.create_subprocess_exec(*move)
        if await mover.wait():
            raise RuntimeError("the layers could not be moved")
        equal = await measured(target, SHAPE.n_vocab, n_tokens)
    planned = hosts.planned
    return {
        "layer_ms": LAYER_MS,
        "streams": N_STREAMS,
        "layers": {stage["name"]: stage["layers"] for stage in planned["stages"]},
        "relative_speed": {stage["name"]: stage["relative_speed"] for stage in planned["stages"]},
        "survey_s": planned["survey_s"],
        "predicted_tok_s": planned["tok_s"],
        "measured_tok_s": round(rate, 2),
        "miss": round(rate / planned["tok_s"] - 1, 4),
        "equal_predicted_tok_s": planned["equal_tok_s"],
        "equal_measured_tok_s": round(equal, 2),
        "gain": round(rate / equal, 3),
    }


async def main(argv: Sequence[str] | None = None) -> int:
    """Run it; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benches.hosts", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few tokens; goals are not checked")
    parser.add_argument("--logs", type=Path, default=None, help="folder for all logs")
    parser.add_argument("--out", type=Path, default=Path("build/bench"))
    options = parser.parse_args(argv)
    assert SHAPE.name not in SHAPES
    with tempfile.TemporaryDirectory(prefix="relayline-bench-") as scratch:
        logs = options.logs or Path(scratch)
        logs.mkdir(parents=True, exist_ok=True)
        found = await compared(logs, 12 if options.quick else 40)
    machine.write_json(options.out / "hosts.json", {"machine": machine.facts(), **found})
    print(
        f"predicted {found['predicted_tok_s']:.1f} tok/s, measured {found['measured_tok_s']:.1f} ({found['miss']:+.0%})"
        f"; equal shares {found['equal_measured_tok_s']:.1f} (predicted {found['equal_predicted_tok_s']:.1f}): "
        f"{found['gain']:.2f} times as many tokens"
    )
    is_good = abs(found["miss"]) <= GOAL_MISS and found["gain"] >= GOAL_GAIN
    return int(not options.quick and not is_good)


if __name__ == "__main__":
    sys.exit(interrupt.run(main()))
