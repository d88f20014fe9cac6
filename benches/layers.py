"""Disk and traffic of a hub's model, downloaded whole and by layers: `python -m benches.layers [--quick]`.

A hub on this machine has the model. Two other hosts serve one half of its layers each; each has a cache of its own and
no way to the hub. `up` runs beside them and holds no layers. Once the pipeline answers, one layer moves from the first
host to the second.

Counted are the bytes of files that the hub's store sends, and the blocks that files take on each host's disk. Both are
the same on any machine. Goals by layers: the hub sends no more than the model and 5 %, to `up` and the hosts together;
`up` keeps less than 5 % of the model; and a move takes from the hub less than three layers' share.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import json
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from benches import interrupt, machine
from benches.models import SHAPES, Shape, model
from relayline.deploy.machine.ports import free_port
from relayline.deploy.testing.fake_hub import Hub, hub_environment, serving
from relayline.deploy.testing.slow_hosts import local_command
from relayline.wire.common.child_command import module_command

FULL, QUICK = SHAPES["llama-1b"], SHAPES["toy"]
HOSTS = ("one", "two")
NO_HUB = "http://127.0.0.1:1"
READY_S = 300.0
MARGIN = 0.05  # the goals: of the model's bytes
LAYERS_MAX = 3
MANIFEST = """
apiVersion: relayline.dev/v1alpha1
kind: Pipeline
metadata: {{name: far}}
spec:
  model: {{hf: "hf://org/repo/{name}", download: {download}}}
  context: {{tokens: 256, lanes: 2}}
  wire: {{tls: {{mode: "off"}}}}
  batching: {{calibrate: false}}
  coordinator: {{host: 127.0.0.1, joinPort: {join}, http: {{port: 0}}}}
  stages:
  - {{name: one, host: 203.0.113.1, threads: 1, port: {ports[0]}, layers: [0, {half}]}}
  - {{name: two, host: 203.0.113.2, threads: 1, port: {ports[1]}, layers: [{half}, {n_layers}]}}
"""


@dataclasses.dataclass(frozen=True, slots=True)
class Taken:
    """What has been used at one point of a run, in bytes."""

    hub_bytes: int  # sent by it so far
    disk_bytes: dict[str, int]  # by host; `up` is the one where it runs


def disk_bytes(directory: Path) -> int:
    """Return the bytes that the files of a directory take on its disk."""
    files = (path for path in directory.rglob("*") if path.is_file() and not path.is_symlink())
    return sum(path.stat().st_blocks * 512 for path in files)


class Pipeline:
    """A pipeline of `up` and two hosts, all on this machine, in one folder."""

    def __init__(self, hub: Hub, folder: Path) -> None:
        self.hub, self.folder = hub, folder
        folder.mkdir(parents=True)
        self.url = ""
        self._processes: list[asyncio.subprocess.Process] = []

    @contextlib.asynccontextmanager
    async def running(self, shape: Shape, download: str) -> AsyncIterator[None]:
        """Serve until the end of the with block."""
        (name,) = (each.rpartition("/")[2] for each in self.hub.files)
        half, ports = shape.n_layers // 2, [free_port() for _ in HOSTS]
        text = MANIFEST.format(
            name=name, download=download, join=free_port(), ports=ports, half=half, n_layers=shape.n_layers
        )
        (self.folder / "far.yaml").write_text(text)
        try:
            async with asyncio.timeout(READY_S):
                await self._start()
            yield
        finally:
            for process in reversed(self._processes):
                with contextlib.suppress(ProcessLookupError):
                    process.terminate()
            await asyncio.gather(*(process.wait() for process in self._processes))

    async def move(self, cuts: str) -> None:
        """Move layers while it serves."""
        command = module_command("relayline.deploy.cli", "move", "--cuts", cuts, "--url", self.url)
        mover = await asyncio.create_subprocess_exec(*command)
        if await mover.wait():
            raise RuntimeError("the layers could not be moved")

    def taken(self) -> Taken:
        """Return what has been used so far."""
        return Taken(self.hub.sent_bytes, {name: disk_bytes(self.folder / name) for name in ("up", *HOSTS)})

    async def _start(self) -> None:
        state = self.folder / "state"
        command = ("up", str(self.folder / "far.yaml"), "--json", "--state-dir", str(state))
        up = await self._process("up", self.hub.url, *command)
        assert up.stdout is not None
        async for line in up.stdout:
            event: dict[str, Any] = json.loads(line)
            if event["event"] == "remote":
                words = (*local_command(event["command"], state), "--always-fetch")
                await self._process(event["name"], NO_HUB, *words)
            elif event["event"] == "ready":
                self.url = event["url"]
                return
        raise RuntimeError(f"up ended with exit code {await up.wait()}: {(self.folder / 'up.log').read_text()[-2000:]}")

    async def _process(self, name: str, hub_url: str, *words: str) -> asyncio.subprocess.Process:
        """Start a command of a host, whose files are in a folder of its own."""
        environment = hub_environment(hub_url, self.folder / name) | {"XDG_STATE_HOME": str(self.folder / "xdg-state")}
        pipe = asyncio.subprocess.PIPE if name == "up" else asyncio.subprocess.DEVNULL
        with (self.folder / f"{name}.log").open("wb") as log:
            command = module_command("relayline.deploy.cli", *words)
            process = await asyncio.create_subprocess_exec(
                *command, stdout=pipe, stderr=log, env=environment, limit=1 << 20
            )
        self._processes.append(process)
        return process


async def measured(files: dict[str, bytes], shape: Shape, download: str, folder: Path) -> dict[str, Any]:
    """Return what a start takes, and then a move of one layer."""
    with serving(Hub(files)) as hub:
        pipeline = Pipeline(hub, folder)
        async with pipeline.running(shape, download):
            started = pipeline.taken()
            await pipeline.move(str(shape.n_layers // 2 - 1))
            moved = pipeline.taken()
    return {"download": download, "started": dataclasses.asdict(started), "moved": dataclasses.asdict(moved)}


def rows_of(runs: Sequence[dict[str, Any]]) -> list[tuple[str, list[int]]]:
    """Return the table's rows, bytes by way of downloading."""
    hosts = {"up": "disk where `up` runs", "one": "disk of the first host", "two": "disk of the second"}
    rows = [("from the hub, first start", [run["started"]["hub_bytes"] for run in runs])]
    rows += [(text, [run["started"]["disk_bytes"][name] for run in runs]) for name, text in hosts.items()]
    rows.append(("from the hub, a move", [run["moved"]["hub_bytes"] - run["started"]["hub_bytes"] for run in runs]))
    rows += [(f"{text}, after it", [run["moved"]["disk_bytes"][name] for run in runs]) for name, text in hosts.items()]
    return rows


def missed(run: dict[str, Any], model_bytes: int, n_layers: int) -> list[str]:
    """Return the goals that a run by layers misses."""
    started, moved = run["started"], run["moved"]
    found = []
    if started["hub_bytes"] > model_bytes * (1 + MARGIN):
        found.append("the hub sent more than the model")
    if started["disk_bytes"]["up"] > model_bytes * MARGIN:
        found.append("`up` keeps more than the headers")
    if moved["hub_bytes"] - started["hub_bytes"] > model_bytes * LAYERS_MAX / n_layers:
        found.append("a move took more than the layers that moved")
    return found


async def main(argv: Sequence[str] | None = None) -> int:
    """Run it; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benches.layers", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a small model; goals are not checked")
    parser.add_argument("--out", type=Path, default=Path("build/bench"))
    options = parser.parse_args(argv)
    shape = QUICK if options.quick else FULL
    path = model(shape, "q4_0")
    files, runs = {f"org/repo/{path.name}": path.read_bytes()}, []
    with tempfile.TemporaryDirectory(prefix="relayline-bench-") as scratch:
        for download in ("whole", "layers"):
            runs.append(await measured(files, shape, download, Path(scratch) / download))
    model_bytes = path.stat().st_size
    facts = {"shape": shape.name, "model_bytes": model_bytes, "n_layers": shape.n_layers, "runs": runs}
    machine.write_json(options.out / "layers.json", {"machine": machine.facts(), **facts})
    print(f"{shape.name}, {model_bytes / 1e6:,.1f} MB in {shape.n_layers} layers{'':14}whole     layers, MB")
    for label, values in rows_of(runs):
        print(f"{label:40}" + "".join(f"{value / 1e6:15,.1f}" for value in values))
    problems = [] if options.quick else missed(runs[1], model_bytes, shape.n_layers)
    print("\n".join(problems or ["the goals are met"] if not options.quick else []))
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(interrupt.run(main()))
