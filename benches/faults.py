"""Are answers the same alone, in a crowd and after a kill? `python -m benches.faults [--cases greedy,seeded] [--keep]`.

Every prompt of a case is asked alone first. Then all are asked at once, once without a fault and once for each kill. A
kill is SIGKILL to one stage after the other, each at a random share of the tokens that the round brings. An answer
counts as complete with all its tokens and no error, and as equal with exactly the tokens that it had alone. A pause is
the longest time that any client of the round waited for its next token, the first included.

The prefix cache is off, so that every answer is computed. `--keep` puts the figures into benches/results/faults.json.
The exit code is 1 where an answer is not complete, or fewer are equal than the case's goal asks for.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import dataclasses
import datetime
import itertools
import json
import os
import random
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import aiohttp
from rich.console import Console
from rich.table import Table

from benches import interrupt, machine
from benches.arguments import number, some_of
from benches.reference import Prompt
from benches.tables import RESULTS
from relayline.deploy.cli import load
from relayline.deploy.cli.load import Request, Target
from relayline.deploy.launch.demo_run import MODEL
from relayline.deploy.launch.local import running
from relayline.deploy.launch.restarts import RestartPolicy
from relayline.deploy.launch.supervisor import Supervisor
from relayline.deploy.manifest.smallest import StageFlags, smallest_manifest, with_stages
from relayline.wire.common.process import first_of

N_STAGES, CTX_TOKENS = 3, 2_048  # of a lane: from 1,024 on each has separate KV cells
# The launcher restarts a stage as often as the bench kills it, and soon.
RESTARTS = RestartPolicy(max_s=2.5, deaths_max=1_000, healthy_s=5.0)
READY_MAX_S, POLL_S = 60.0, 0.02
KILL_SHARES = (0.02, 0.9)  # of a round's tokens, or of its time where prompts are long, at which a stage is killed


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    """The requests of one case."""

    label: str
    fields: Mapping[str, Any]  # of the request's body
    goal: float  # share of answers that must be equal
    n_prompt: int = 24
    n_tokens: int = 150


GREEDY: Mapping[str, Any] = MappingProxyType({"temperature": 0})
CASES: dict[str, Case] = {
    "greedy": Case("greedy", GREEDY, 0.995),
    "seeded": Case("seeded, temperature 0.8", {"temperature": 0.8}, 0.95),
    "filtered": Case(
        "seeded, `top_k` 40, `top_p` 0.9, `min_p` 0.02, penalties",
        {"temperature": 1.0, "top_k": 40, "top_p": 0.9, "min_p": 0.02, "frequency_penalty": 0.3},
        0.95,
    ),
    "bound": Case(
        "seeded, bound to a grammar",
        {"temperature": 0.9, "guided_regex": "([a-z]{2,9} ){20}end", "ignore_eos": False},
        0.95,
    ),
    "long": Case("greedy, prompts of 600 tokens", GREEDY, 0.995, n_prompt=600, n_tokens=60),
}


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """The outcome of all answers of one case, with or without kills. JSON-ready."""

    case: str
    n_kills: int
    n_streams: int
    n_complete: int
    n_equal: int
    pause_s: float
    parted_at: tuple[int, ...]  # of each complete answer that is not equal, the first token that differs
    errors: tuple[str, ...]  # of incomplete answers


def pause_s(request: Request) -> float:
    """Return the longest time that a client waited for its next token, the first included. Pure."""
    times_ns = [request.due_ns, *request.token_ns]
    return max((later - earlier for earlier, later in itertools.pairwise(times_ns)), default=0) / 1e9


def row_of(case: str, n_kills: int, requests: Sequence[Request], alone: Sequence[Request]) -> Row:
    """Compare answers with those that the same prompts had alone. Pure."""
    complete = [request for request in requests if is_complete(request)]
    parted = [
        next(
            (at for at, (one, other) in enumerate(zip(request.tokens, expected, strict=False)) if one != other),
            min(len(request.tokens), len(expected)),
        )
        for request in complete
        if request.tokens != (expected := alone[request.prompt_index].tokens)
    ]
    return Row(
        case=case,
        n_kills=n_kills,
        n_streams=len(requests),
        n_complete=len(complete),
        n_equal=len(complete) - len(parted),
        pause_s=round(max(map(pause_s, requests), default=0.0), 2),
        parted_at=tuple(parted),
        errors=tuple(
            sorted(
                {request.error or f"{len(request.tokens)} tokens" for request in requests if not is_complete(request)}
            )
        ),
    )


def is_complete(request: Request) -> bool:
    """Return whether an answer has all its tokens; one that a grammar bounds ends where it does."""
    return request.is_complete or ("guided_regex" in request.fields and bool(request.tokens) and not request.error)


def misses(rows: Sequence[Row]) -> list[str]:
    """Return one line for each row in which an answer is not complete, or too few are equal. Pure."""
    found: list[str] = []
    for row in rows:
        if row.n_complete < row.n_streams:
            found.append(f"{row.case}: {row.n_complete} of {row.n_streams} complete: {'; '.join(row.errors)}")
        elif row.n_equal < CASES[row.case].goal * row.n_streams:
            goal = f"{100 * CASES[row.case].goal:g} %"
            found.append(f"{row.case}: {row.n_equal} of {row.n_streams} equal, the goal is {goal}")
    return found


class Progress:
    """Counts the tokens of a round; `reached` is set once there are n_wanted."""

    def __init__(self, n_wanted: int) -> None:
        self._n_left = n_wanted
        self.reached = asyncio.Event()

    def came(self, _: Request) -> None:
        """A token has come."""
        self._n_left -= 1
        if self._n_left <= 0:
            self.reached.set()


class Rounds:
    """Rounds of streams on one pipeline."""

    def __init__(self, pipeline: Supervisor, session: aiohttp.ClientSession, target: Target, seed: int) -> None:
        self._pipeline, self._session, self._target, self._rng = pipeline, session, target, random.Random(seed)

    async def measure(self, name: str, n_streams: int, n_kills: int) -> list[Row]:
        """Ask alone, then in a crowd, then in crowds whose stages are killed; returns a row for each of the last two.

        Raises SystemExit where an answer fails that was asked alone.
        """
        case = CASES[name]
        prompts = [tuple(self._rng.randrange(256, 450) for _ in range(case.n_prompt)) for _ in range(n_streams)]
        alone = requests_of(case, n_streams)
        for request in alone:
            await self._ask(prompts, [request], Progress(0))
        if failed := next((request for request in alone if not is_complete(request)), None):
            raise SystemExit(f"{name}: {failed.error or failed.tokens}")
        began_s = time.monotonic()
        crowd = await self._ask(prompts, requests_of(case, n_streams), Progress(0))
        took_s = time.monotonic() - began_s
        after: list[Request] = []
        for at in range(n_kills):
            await self._until_ready()
            share = self._rng.uniform(*KILL_SHARES)
            after += await self._killed(case, prompts, at % N_STAGES, share, took_s)
            print(f"{name}: {row_of(name, at + 1, after, alone)}", file=sys.stderr, flush=True)
        return [row_of(name, 0, crowd, alone), *([row_of(name, n_kills, after, alone)] if after else [])]

    async def _ask(self, prompts: Sequence[Prompt], requests: list[Request], progress: Progress) -> list[Request]:
        for request in requests:
            request.due_ns = time.monotonic_ns()
        asking = asyncio.gather(
            *(
                load.complete(self._session, self._target, prompts[request.prompt_index], request, progress.came)
                for request in requests
            )
        )
        await first_of(asking, self._pipeline.failed)
        if self._pipeline.failed.done():
            asking.cancel()
            self._pipeline.failed.result()
        return requests

    async def _killed(
        self, case: Case, prompts: Sequence[Prompt], stage: int, share: float, took_s: float
    ) -> list[Request]:
        """Ask all at once, and kill the stage at a share of the tokens, or of the time where most of it is reading."""
        is_read = case.n_prompt > case.n_tokens
        progress = Progress(1 + int(share * case.n_tokens * len(prompts)))
        asking = asyncio.create_task(self._ask(prompts, requests_of(case, len(prompts)), progress))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(share * took_s if is_read else None):
                reached = asyncio.create_task(progress.reached.wait())
                await first_of(reached, asking)
        reached.cancel()
        os.kill(self._pipeline.stage(stage).pid, signal.SIGKILL)
        return await asking

    async def _until_ready(self) -> None:
        async with asyncio.timeout(READY_MAX_S):
            while True:
                async with self._session.get(self._target.url + "/health") as reply:
                    if reply.status == 200:
                        return
                await asyncio.sleep(POLL_S)


def requests_of(case: Case, n_streams: int) -> list[Request]:
    """Return the requests of a round: the same prompts and seeds each time. Pure but for their clock."""
    is_drawn = bool(case.fields["temperature"])
    return [
        Request(at, case.n_tokens, 0, fields={**case.fields, **({"seed": at + 1} if is_drawn else {})})
        for at in range(n_streams)
    ]


def kept(measured: Mapping[str, Any], rows: Sequence[Row], commit: str, date: str) -> dict[str, Any]:
    """Return the content of faults.json with these rows in place of those of the same cases, or behind all. Pure.

    Raises SystemExit where two rows would have the same label: a reader of the table could not tell them apart.
    """
    entries = list(measured["rows"])
    for row in rows:
        row_id = f"{row.case}_{'killed' if row.n_kills else 'crowd'}"
        known = next((at for at, entry in enumerate(entries) if entry.get("id") == row_id), None)
        what = "stage killed" if row.n_kills else "in a crowd, nothing killed"
        new = {"id": row_id, "label": f"{what}: {CASES[row.case].label}", "seen with": "`python -m benches.faults`"}
        figures = {
            "values": [row.n_kills or None, row.n_streams, row.n_complete, row.n_equal],
            "longest pause": f"{row.pause_s:.1f} s",
            "measured": f"{date}, {commit}",
        }
        if known is None:
            entries.append(new | figures)
        else:
            entries[known] = entries[known] | figures
    labels = collections.Counter(entry["label"] for entry in entries)
    if twice := [label for label, n_rows in labels.items() if n_rows > 1]:
        raise SystemExit(f"benches/results/faults.json: two rows are labelled {twice[0]!r}; give each its own label")
    return {**measured, "rows": entries}


def show(rows: Sequence[Row]) -> None:
    """Print one line for each row."""
    table = Table("case", "kills", "streams", "complete", "equal to alone", "longest pause s", "parted at")
    for row in rows:
        parted = ", ".join(map(str, row.parted_at[:12]))
        cells = (row.n_kills, row.n_streams, row.n_complete, row.n_equal, row.pause_s)
        table.add_row(row.case, *map(str, cells), parted)
    Console(width=120).print(table)


def store(rows: Sequence[Row], options: argparse.Namespace, facts: Mapping[str, object]) -> None:
    """Write the results so far. `facts`: from before the first row was kept, which changes the checkout."""
    results = {"machine": facts, "model": options.model.stem, "ctx": options.ctx, "seed": options.seed}
    machine.write_json(options.out / "faults.json", results | {"rows": [dataclasses.asdict(row) for row in rows]})
    if options.keep:
        path, today = RESULTS / "faults.json", datetime.datetime.now(datetime.UTC).date().isoformat()
        measured = kept(json.loads(path.read_text()), rows, str(facts["commit"]), today)
        path.write_text(json.dumps(measured, indent=1) + "\n")


async def main(argv: Sequence[str] | None = None) -> int:
    """Ask, kill, judge, report."""
    parser = argparse.ArgumentParser(prog="python -m benches.faults", description=__doc__)
    parser.add_argument("--cases", type=some_of(CASES), default=tuple(CASES))
    parser.add_argument("--streams", type=number, default=16, help="at once")
    parser.add_argument("--kills", type=int, default=9, help="of each case")
    parser.add_argument("--seed", type=int, default=1, help="of prompts and kills")
    parser.add_argument(
        "--ctx", type=number, default=CTX_TOKENS, help="tokens of a lane; lanes share cells below 1,024"
    )
    parser.add_argument("--model", type=Path, default=MODEL, help="a GGUF file; the demonstration model by default")
    parser.add_argument("--keep", action="store_true", help="put the figures into benches/results/faults.json")
    parser.add_argument("--out", type=Path, default=Path("build/bench"))
    options = parser.parse_args(argv)
    settings: dict[str, Any] = {"ctx_tokens": options.ctx, "n_lanes": options.streams, "share": False}
    manifest = with_stages(smallest_manifest(options.model, **settings), StageFlags(N_STAGES, n_threads=1), 0)
    rows, facts = list[Row](), machine.facts()
    async with running(manifest, lambda _, __: None, policy=RESTARTS) as (pipeline, ready), load.client() as session:
        rounds = Rounds(pipeline, session, Target(ready["url"], "openai", ready["model"]), options.seed)
        for name in options.cases:
            rows += await rounds.measure(name, options.streams, options.kills)
            store(rows, options, facts)  # keeps the figures so far if the rest is interrupted
    show(rows)
    missed = misses(rows)
    for line in missed:
        print(f"missed: {line}", file=sys.stderr)
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(interrupt.run(main()))
