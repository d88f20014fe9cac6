"""The GPU bench for a machine that is available for some minutes only. The most valuable parts come first, and results
are written after each part. A part begins only if the time left is likely to be enough. A part that fails does not stop
the others. The figures of streams are those of `relayline bench`: answers to prompts of random tokens, always of full
length, greedy unless a part says otherwise.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from types import MappingProxyType
from typing import Any

from benches import machine, parts, stages
from benches.gpu import steps
from benches.gpu.what import MANY_STREAMS
from benches.models import SHAPES, model
from benches.peers import Peers
from benches.servers import RELAYLINE, Setup, llama_rpc, llama_server, relayline_up
from relayline.deploy.cli import load
from relayline.deploy.cli.load import Target
from relayline.deploy.models.splits import split_for

CTX_TOKENS, PROMPT_TOKENS = 256, 32
CERTIFY_S = 120.0
DEVICE_SAMPLES, HOST_SAMPLES = ("--device-sampling", "on"), ("--device-sampling", "off")
WAITS = ("--run-ahead", "off")
UNIFIED, PER_LANE = ("--kv-layout", "unified"), ("--kv-layout", "per-lane")
OF_PEERS = ("unsplit", "rpc")  # parts that need llama.cpp's programs
DEVICE_DRAWS = ("--device-sampling", "all")
DRAWN: Mapping[str, Any] = MappingProxyType({"temperature": 0.7, "top_p": 0.9})
PROFILE_S = 2


class Notebook:
    """Results of a run, written after every part. They list the parts that would end too late and are left out."""

    def __init__(self, path: Path, deadline_ns: int, about: dict[str, Any]) -> None:
        """`deadline_ns` is on the monotonic clock."""
        self._path, self._deadline_ns = path, deadline_ns
        self.results: dict[str, Any] = {**about, "parts": {}}

    def left_s(self, now_ns: int) -> float:
        """Return the seconds until the deadline."""
        return (self._deadline_ns - now_ns) / 1e9

    async def part(self, name: str, needs_s: float, measure: Callable[[], Awaitable[Any]]) -> None:
        """Run one part, unless less than `needs_s` is left. Write its result, or the reason why it has none."""
        began_ns = time.monotonic_ns()
        left_s = self.left_s(began_ns)
        if left_s < needs_s:
            self._keep(name, {"left_out": f"{max(0.0, left_s):.0f} s were left, and it needs about {needs_s:.0f}"})
            return
        try:
            async with asyncio.timeout(left_s):
                found = {"found": await measure()}
        except TimeoutError:
            found = {"failed": "the time was up"}
        except Exception as error:
            found = {"failed": f"{type(error).__name__}: {error}"[:500]}
        self._keep(name, found | {"took_s": round((time.monotonic_ns() - began_ns) / 1e9, 1)})

    def _keep(self, name: str, found: dict[str, Any]) -> None:
        self.results["parts"][name] = found
        machine.write_json(self._path, self.results)
        outcome = found.get("failed") or found.get("left_out") or _brief(found["found"])
        print(
            f"[{max(0.0, self.left_s(time.monotonic_ns())):.0f} s left] {name}: {outcome}", file=sys.stderr, flush=True
        )


def _brief(found: Any) -> str:
    if isinstance(found, list) and found and "streams" in found[0]:
        return ", ".join(map(_brief_point, found))
    return json.dumps(load.json_ready(found))[:600]


def _brief_point(point: Mapping[str, Any]) -> str:
    """Say what streams gave and, of several stages, where the time of a token goes."""
    found = f"{point['streams']}: {point['decode_tok_s']:.0f} tok/s"
    steps_ms, ways_ms = point.get("step_ms", ()), point.get("way_ms", ())
    if len(steps_ms) < 2:
        return found
    steps, ways = (" + ".join(f"{each:.2f}" for each in times) for times in (steps_ms, ways_ms))
    return f"{found} (steps {steps} ms, ways {ways} ms)"


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """The parameters of a short run."""

    shape: str
    mix: str
    streams: tuple[int, ...]
    n_tokens: int  # of every answer
    repeats: int
    gpu_layers: int  # -1 on a GPU, 0 without
    out: Path
    many: tuple[int, ...] = MANY_STREAMS  # streams with which the layouts of KV cells are compared


class Short:
    """One short run: its set-up, and a method for each part."""

    def __init__(self, plan: Plan, peers: Peers | None, log_dir: Path) -> None:
        self.plan, self.peers = plan, peers
        cores = tuple(sorted(os.sched_getaffinity(0)))
        self.model = model(SHAPES[plan.shape], plan.mix)
        self.setup = Setup(self.model, 1, max(plan.streams), CTX_TOKENS, cores, log_dir, gpu_layers=plan.gpu_layers)
        draw, n_vocab = random.Random(1), SHAPES[plan.shape].n_vocab
        n_prompts = max(*plan.streams, *plan.many)
        self.prompts = [[draw.randrange(3, n_vocab) for _ in range(PROMPT_TOKENS)] for _ in range(n_prompts)]

    async def engine(self) -> list[dict[str, float]]:
        """A step of the whole model by its rows, compared with llama-batched-bench."""
        plan, rows = self.plan, self.plan.streams
        artifact = split_for(self.model, 1, None, None) / "stage-0.gguf"
        n_threads = len(self.setup.cores)
        command = None
        if self.peers:
            command = steps.bare_command(self.peers, self.model, rows, n_threads, plan.gpu_layers)

        def measured() -> list[dict[str, float]]:
            with steps.open_engine(artifact, max(rows), n_threads, plan.gpu_layers) as engine:
                return steps.measure(engine, command, rows, plan.repeats)

        return await asyncio.to_thread(measured)

    async def halves(self) -> list[dict[str, float]]:
        """A step of each half of the model by its rows, without a second process on the device."""
        plan, directory = self.plan, split_for(self.model, 2, None, None)
        artifacts = [directory / f"stage-{at}.gguf" for at in range(2)]
        more = len(self.setup.cores), plan.gpu_layers, plan.repeats
        return await asyncio.to_thread(steps.halves, artifacts, plan.streams, *more)

    async def streams(
        self,
        server: AbstractAsyncContextManager[Target],
        *,
        profiled: str = "",
        fields: Mapping[str, Any] = MappingProxyType({}),
        counts: Sequence[int] = (),
    ) -> list[dict[str, Any]]:
        """Load one server with streams, in turns. `profiled` names the output files of py-spy, if it is installed.

        `fields` are those of a request that is not greedy. `counts`: numbers of streams, other than the run's own.
        """
        found: list[dict[str, Any]] = []
        counts = counts or self.plan.streams
        async with server as target, load.client() as session:
            warm = min(8, max(counts))
            await load.closed_loop(session, target, self.prompts, n_streams=warm, n_tokens=8, fields=fields)
            for repeat in range(self.plan.repeats):
                for n_streams in counts:
                    async with _profiles(self.plan.out, f"{profiled}-{n_streams}" if profiled else ""):
                        found.append(await self._point(session, target, n_streams, repeat, fields))
        return found

    async def _point(
        self, session: Any, target: Target, n_streams: int, repeat: int, fields: Mapping[str, Any]
    ) -> dict[str, Any]:
        before = await parts.pipeline_status(session, target)
        n_tokens = self.plan.n_tokens
        requests = await load.closed_loop(
            session, target, self.prompts, n_streams=n_streams, n_tokens=n_tokens, fields=fields
        )
        summary = load.summarise(requests)
        after = await parts.pipeline_status(session, target, before)
        point = {"streams": n_streams, "repeat": repeat, **dataclasses.asdict(summary)}
        if after:
            point |= parts.pipeline_figures(before, after, summary.wall_s)
            point |= stages.figures(await stages.ask(after), requests, PROMPT_TOKENS)
        return point

    def relayline(self, name: str, n_stages: int, *flags: str, n_lanes: int = 0) -> AbstractAsyncContextManager[Target]:
        """Return a pipeline of so many stages, all on the one GPU, with a lane for each of the run's streams."""
        setup = dataclasses.replace(self.setup, n_stages=n_stages, n_lanes=n_lanes or self.setup.n_lanes)
        return relayline_up(name, ["--draft", "off", "--trace-level", "off", *flags], setup)

    def unsplit(self) -> AbstractAsyncContextManager[Target]:
        """Return llama-server with the whole model."""
        assert self.peers is not None
        flags = ["--n-gpu-layers", "all" if self.plan.gpu_layers < 0 else str(self.plan.gpu_layers)]
        return llama_server("unsplit", flags, self.setup, self.peers, n_threads=len(self.setup.cores))

    @contextlib.asynccontextmanager
    async def rpc(self) -> AsyncIterator[Target]:
        """Run llama-server over two RPC workers, both on the one GPU."""
        assert self.peers is not None
        async with llama_rpc("rpc", dataclasses.replace(self.setup, n_stages=2), self.peers) as (target, _):
            yield target

    async def certify(self) -> dict[str, Any]:
        """Compare the split model with the whole one, both on the GPU."""
        command = [*RELAYLINE, "certify", str(self.model), "--stages", "2", "--ctx", "512", "--json",
                   "--gpu-layers", str(self.plan.gpu_layers)]  # fmt: skip
        child = await asyncio.create_subprocess_exec(
            *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
        )
        try:
            out, errors = await child.communicate()
        finally:
            if child.returncode is None:
                child.terminate()
        if not out:
            raise RuntimeError(errors.decode(errors="replace").strip().splitlines()[-1])
        report: dict[str, Any] = json.loads(out)
        return {"exit_code": child.returncode, "tolerance": report.get("tolerance"), "cuts": report.get("cuts")}


@contextlib.asynccontextmanager
async def _profiles(out: Path, name: str) -> AsyncIterator[None]:
    """Let py-spy watch the processes that this one has started, if py-spy is there and the output has a name."""
    spies: list[subprocess.Popen[bytes]] = []
    if name and (program := shutil.which("py-spy")):
        for pid in _below(os.getpid()):
            command = [program, "record", "--pid", str(pid), "--duration", str(PROFILE_S), "--rate", "400",
                       "--format", "raw", "--nonblocking", "--output", str(out / f"spy-{name}-{pid}.txt")]  # fmt: skip
            spies.append(_started(command))
    try:
        yield
    finally:
        for spy in spies:
            with contextlib.suppress(subprocess.TimeoutExpired):
                await asyncio.to_thread(spy.wait, 4 * PROFILE_S)
            spy.kill()
            spy.wait()


def _started(command: Sequence[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def _below(pid: int) -> list[int]:
    """Return the processes that a process and its children have started, by /proc."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in map(int, task.read_text().split()):
                found += [child, *_below(child)]
    return found


async def measure(notebook: Notebook, short: Short, only: Sequence[str]) -> int:
    """Run the parts; exit code 1 if one of them failed."""
    quick = short.plan.gpu_layers == 0  # a rehearsal: every part is short

    def streams(
        make: Callable[[], AbstractAsyncContextManager[Target]], fields: Mapping[str, Any] = MappingProxyType({})
    ) -> Callable[[], Awaitable[Any]]:
        return lambda: short.streams(make(), fields=fields)

    def many(name: str, *flags: str) -> Callable[[], Awaitable[Any]]:
        counts = short.plan.many
        return lambda: short.streams(short.relayline(name, 1, *flags, n_lanes=max(counts)), counts=counts)

    parts_of: list[tuple[str, float, Callable[[], Awaitable[Any]]]] = [
        ("engine", 40, short.engine),
        ("one-stage", 45, streams(lambda: short.relayline("one-stage", 1, *DEVICE_SAMPLES))),
        ("many-unified", 60, many("many-unified", *DEVICE_SAMPLES, *UNIFIED)),
        ("many-per-lane", 60, many("many-per-lane", *HOST_SAMPLES, *PER_LANE)),
        ("two-stages", 45, streams(lambda: short.relayline("two-stages", 2, *DEVICE_SAMPLES))),
        ("two-halves", 25, short.halves),
        ("one-stage-drawn", 45, streams(lambda: short.relayline("drawn", 1, *DEVICE_DRAWS), DRAWN)),
        ("one-stage-drawn-host", 45, streams(lambda: short.relayline("drawn-host", 1, *HOST_SAMPLES), DRAWN)),
        ("one-stage-drawn-rows", 45, streams(lambda: short.relayline("drawn-rows", 1, *DEVICE_SAMPLES), DRAWN)),
        ("unsplit", 30, streams(short.unsplit)),
        ("one-stage-waits", 45, streams(lambda: short.relayline("waits", 1, *DEVICE_SAMPLES, *WAITS))),
        ("one-stage-host", 45, streams(lambda: short.relayline("one-stage-host", 1, *HOST_SAMPLES))),
        ("one-stage-per-lane", 45, streams(lambda: short.relayline("per-lane", 1, *HOST_SAMPLES, *PER_LANE))),
        ("one-stage-profiled", 45, lambda: short.streams(short.relayline("profiled", 1), profiled="one-stage")),
        ("certify", CERTIFY_S, short.certify),
        ("rpc", 45, streams(short.rpc)),
    ]
    for name, needs_s, part in parts_of:
        if (not only or name in only) and (short.peers or name not in OF_PEERS):
            await notebook.part(name, 0 if quick else needs_s, part)
    return int(any("failed" in part for part in notebook.results["parts"].values()))


async def run(plan: Plan, peers: Peers | None, about: dict[str, Any], deadline_ns: int, only: Sequence[str]) -> int:
    """Run all parts until the deadline and write gpu-short.json."""
    about |= {"machine": machine.facts(), "shape": plan.shape, "type": plan.mix, "n_tokens": plan.n_tokens}
    notebook = Notebook(plan.out / "gpu-short.json", deadline_ns, about)
    with tempfile.TemporaryDirectory(prefix="relayline-gpu-") as logs:
        try:
            return await measure(notebook, Short(plan, peers, Path(logs)), only)
        finally:
            _keep_logs(Path(logs), plan.out / "gpu-logs.txt")


def _keep_logs(logs: Path, path: Path) -> None:
    """Write the last lines of the servers' logs."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as out:
        for log in sorted(logs.glob("*.log")):
            lines = log.read_text(errors="replace").splitlines()[-40:]
            out.writelines(f"[{log.stem}] {line}\n" for line in lines)
