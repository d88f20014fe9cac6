"""The gain of drafts by their acceptance rate: `python -m benches.drafts [--quick]`.

Two pipelines run side by side, one without drafts (`--draft off`) and one with them (`auto`). They take turns with the
same greedy requests. Each request carries a prediction: the answer of the pipeline without drafts, with each token made
wrong at a given probability. So the acceptance rate is set by the bench, and the model may have random weights. A rate
of 0 shows the cost of drafts. Near-ties of logits can end a right prediction early, because steps of another shape move
the last bits. The acceptance rate of real text is another question.

Every answer must be complete and equal to the unsplit model's. Otherwise the exit code is 1.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import random
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp
from rich.console import Console
from rich.table import Table

from benches import interrupt, machine
from benches.arguments import number, numbers
from benches.models import MIXES, SHAPES, model
from benches.reference import Answer, Prompt, prompts_for
from benches.verdicts import wrong_answers
from relayline.deploy.cli import load
from relayline.deploy.cli.load import Request, Target, summarise
from relayline.deploy.launch.local import running
from relayline.deploy.manifest.smallest import StageFlags, smallest_manifest, with_stages

DRAFTS = ("off", "auto")


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """One round of all streams on one of the pipelines."""

    draft: str
    n_streams: int
    share: float  # of right tokens in the predictions
    requests: tuple[Request, ...]
    drafted: int
    accepted: int

    @property
    def tok_s(self) -> float:
        """Tokens a second while answers were written: without first tokens and prompts."""
        return summarise(self.requests).decode_tok_s


def predictions(answers: Sequence[Answer], share: float, n_vocab: int) -> list[Answer]:
    """Return the answers with each token wrong with probability 1 - share."""
    rng = random.Random(f"predictions {share}")
    wrong = [
        [(token + rng.randrange(1, n_vocab)) % n_vocab if rng.random() >= share else token for token in answer]
        for answer in answers
    ]
    return [tuple(tokens) for tokens in wrong]


async def figures_of(session: aiohttp.ClientSession, url: str) -> dict[str, Any]:
    """Return what a pipeline says of itself."""
    async with session.get(url + "/v1/pipeline") as response:
        found: dict[str, Any] = await response.json()
        return found


async def ask(
    session: aiohttp.ClientSession, draft: str, ready: dict[str, str], prompts: Sequence[Prompt],
    predicted: Sequence[Answer], n_tokens: int, share: float,
) -> Run:  # fmt: skip
    """Ask all prompts at once."""
    target = Target(ready["url"], "openai", ready["model"])
    before = await figures_of(session, ready["url"])
    requests = [
        Request(at, n_tokens, time.monotonic_ns(), prediction=predicted[at] if predicted else ())
        for at in range(len(prompts))
    ]
    await asyncio.gather(*(load.complete(session, target, prompts[each.prompt_index], each) for each in requests))
    after = await figures_of(session, ready["url"])
    drafted, accepted = (after[key] - before[key] for key in ("drafted_tokens", "accepted_tokens"))
    return Run(draft, len(prompts), share, tuple(requests), drafted, accepted)


async def measure(path: Path, prompts: Sequence[Prompt], options: Any) -> list[Run]:
    """Run everything: for each number of streams and each share, both pipelines in turns."""
    n_vocab = SHAPES[options.shape].n_vocab
    context = {"ctx_tokens": options.prompt + options.tokens, "n_lanes": max(options.streams)}
    runs: list[Run] = []
    async with contextlib.AsyncExitStack() as stack:
        ready: dict[str, dict[str, str]] = {}
        for draft in DRAFTS:
            manifest = smallest_manifest(path, draft=draft, **context)
            manifest = with_stages(manifest, StageFlags(options.stages, n_threads=options.threads or None), 0)
            _, ready[draft] = await stack.enter_async_context(running(manifest, lambda _, __: None))
        session = await stack.enter_async_context(load.client())
        for n_streams in options.streams:
            asked = prompts[:n_streams]
            first = await ask(session, "off", ready["off"], asked, (), options.tokens, 0.0)
            answers = [tuple(request.tokens) for request in first.requests]
            for share in options.shares:
                predicted = predictions(answers, share, n_vocab)
                for _ in range(options.repeats):
                    for draft in DRAFTS:
                        runs.append(await ask(session, draft, ready[draft], asked, predicted, options.tokens, share))
    return runs


def show(runs: Sequence[Run]) -> None:
    """Print one line for each number of streams and share."""
    table = Table("streams", "share right", "tok/s off", "auto", "ratio", "drafted / token", "right", title="drafts")
    for n_streams, share in sorted({(run.n_streams, run.share) for run in runs}, key=lambda key: (key[0], -key[1])):
        of = [run for run in runs if (run.n_streams, run.share) == (n_streams, share)]
        off, auto = (statistics.median(run.tok_s for run in of if run.draft == draft) for draft in DRAFTS)
        drafted, accepted = (sum(getattr(run, name) for run in of) for name in ("drafted", "accepted"))
        n_tokens = sum(len(request.tokens) for run in of if run.draft == "auto" for request in run.requests)
        right = f"{accepted / drafted:.2f}" if drafted else "-"
        table.add_row(str(n_streams), f"{share:.2f}", f"{off:.1f}", f"{auto:.1f}", f"{auto / off:.2f}",
                      f"{drafted / max(1, n_tokens):.2f}", right)  # fmt: skip
    Console(width=120).print(table)


async def main(argv: Sequence[str] | None = None) -> int:
    """Ask, judge, report."""
    parser = argparse.ArgumentParser(prog="python -m benches.drafts", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a toy model: checks the bench itself")
    parser.add_argument("--shape", choices=SHAPES, default="llama-1b")
    parser.add_argument("--type", choices=MIXES, default="q4_0")
    parser.add_argument("--stages", type=number, default=2)
    parser.add_argument("--threads", type=int, default=0, help="of each stage [default: the cores divided by them]")
    parser.add_argument("--streams", type=numbers, default=(1, 2, 4))
    parser.add_argument("--shares", type=shares, default=(1.0, 0.8, 0.5, 0.0), help="of right tokens")
    parser.add_argument("--prompt", type=number, default=16, help="tokens of each prompt")
    parser.add_argument("--tokens", type=number, default=64, help="of each answer")
    parser.add_argument("--repeats", type=number, default=2)
    parser.add_argument("--out", type=Path, default=Path("build/bench"))
    options = parser.parse_args(argv)
    if options.quick:
        options.shape, options.repeats, options.streams, options.shares = "toy", 1, (1, 2), (1.0, 0.0)
    path, n_vocab = model(SHAPES[options.shape], options.type), SHAPES[options.shape].n_vocab
    prompts = prompts_for(max(options.streams), options.prompt, n_vocab, seed=21)
    runs = await measure(path, prompts, options)
    wrong = await wrong_answers(path, options.type, prompts, [each for run in runs for each in run.requests])
    facts = {"machine": machine.facts(), "model": path.stem, "stages": options.stages, "wrong": wrong}
    rows = [
        {"draft": run.draft, "n_streams": run.n_streams, "share": run.share, "tok_s": run.tok_s,
         "drafted": run.drafted, "accepted": run.accepted}
        for run in runs
    ]  # fmt: skip
    machine.write_json(options.out / "drafts.json", facts | {"runs": rows})
    show(runs)
    for line in wrong:
        print(f"wrong: {line}", file=sys.stderr)
    return int(bool(wrong))


def shares(text: str) -> tuple[float, ...]:
    """Read comma-separated numbers from 0 to 1. Raises argparse.ArgumentTypeError."""
    try:
        found = tuple(float(part) for part in text.split(","))
    except ValueError:
        found = ()
    if not found or not all(0 <= share <= 1 for share in found):
        raise argparse.ArgumentTypeError(f"{text!r} is no list of numbers from 0 to 1")
    return found


if __name__ == "__main__":
    sys.exit(interrupt.run(main()))
