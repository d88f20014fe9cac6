"""Chats of several turns, with and without kept prefixes: `python -m benches.chats [--quick]`.

Each chat sends its whole history and a few new tokens, waits for the answer and asks again. All chats run at once. With
kept prefixes (`--prefix-lanes`) a stage reads only the new tokens, and the common beginning (`--system`) once. The two
settings take turns, each run with new processes. The bench reports the time to first token by turn. Every answer must
be complete and equal to the unsplit model's; otherwise the exit code is 1.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benches import interrupt, machine
from benches.arguments import number
from benches.models import MIXES, SHAPES, model
from benches.reference import Prompt, prompts_for
from benches.verdicts import wrong_answers
from relayline.deploy.cli import load
from relayline.deploy.cli.load import Request, Target
from relayline.deploy.launch.local import running
from relayline.deploy.manifest.smallest import StageFlags, smallest_manifest, with_stages

N_STAGES = 2


@dataclasses.dataclass(frozen=True, slots=True)
class Turn:
    """One question of one chat, with the chat's history, and its answer."""

    prefix_lanes: int
    number: int
    prompt: Prompt
    request: Request

    @property
    def ttft_s(self) -> float:
        """Time to first token; 0.0 if no token came."""
        return (self.request.token_ns[0] - self.request.due_ns) / 1e9 if self.request.token_ns else 0.0


async def talk(path: Path, texts: Sequence[Sequence[Prompt]], n_tokens: int, prefix_lanes: int) -> list[Turn]:
    """Run one pipeline and all chats; said[chat][turn] holds the user's new tokens."""
    longest = max(sum(map(len, chat)) + n_tokens * len(chat) for chat in texts)
    n_lanes = 2 * len(texts) + 1  # one for each chat's stream, one for its kept prefix, and one to copy into
    settings: dict[str, Any] = {"ctx_tokens": longest, "n_lanes": n_lanes, "prefix_lanes": prefix_lanes}
    manifest = with_stages(smallest_manifest(path, **settings), StageFlags(N_STAGES), 0)
    turns: list[Turn] = []
    async with running(manifest, lambda _, __: None) as (_, ready), load.client() as session:
        target = Target(ready["url"], "openai", ready["model"], cache_prompt=True)

        async def chat(questions: Sequence[Prompt]) -> None:
            history: Prompt = ()
            for at, question in enumerate(questions):
                history += question
                request = Request(0, n_tokens, time.monotonic_ns())
                turns.append(Turn(prefix_lanes, at, history, request))
                await load.complete(session, target, history, request)
                history += tuple(request.tokens)

        await asyncio.gather(*map(chat, texts))
    return turns


async def wrong_turns(path: Path, mix: str, turns: Sequence[Turn]) -> list[str]:
    """Return one line for each answer that differs from the unsplit model's."""
    prompts = sorted({turn.prompt for turn in turns})
    asked = [dataclasses.replace(turn.request, prompt_index=prompts.index(turn.prompt)) for turn in turns]
    return await wrong_answers(path, mix, prompts, asked)


def show(turns: Sequence[Turn]) -> None:
    """Print one line for each turn."""
    kept = sorted({turn.prefix_lanes for turn in turns})
    headings = ["first token s, " + (f"{n} lanes kept" if n else "all read anew") for n in kept]
    table = Table("turn", "tokens so far", *headings, "ratio", title="medians over chats and repeats")
    for at in range(1 + max(turn.number for turn in turns)):
        ttfts_s = [statistics.median(t.ttft_s for t in turns if (t.number, t.prefix_lanes) == (at, n)) for n in kept]
        n_tokens = statistics.median(len(turn.prompt) for turn in turns if turn.number == at)
        cells = [f"{ttft_s:.2f}" for ttft_s in ttfts_s]
        table.add_row(str(at + 1), f"{n_tokens:.0f}", *cells, f"{ttfts_s[-1] / ttfts_s[0]:.2f}")
    Console(width=120).print(table)


async def main(argv: Sequence[str] | None = None) -> int:
    """Run the chats, judge the answers, report."""
    parser = argparse.ArgumentParser(prog="python -m benches.chats", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a toy model: checks the bench itself")
    parser.add_argument("--shape", choices=SHAPES, default="llama-1b")
    parser.add_argument("--type", choices=MIXES, default="q4_0")
    parser.add_argument("--chats", type=number, default=2, help="side by side")
    parser.add_argument("--turns", type=number, default=4)
    parser.add_argument("--prompt", type=number, default=400, help="tokens of the first question of each chat")
    parser.add_argument("--system", type=number, default=0, help="tokens that all chats begin with")
    parser.add_argument("--said", type=number, default=30, help="tokens of each later question")
    parser.add_argument("--tokens", type=number, default=40, help="of each answer")
    parser.add_argument("--repeats", type=number, default=2)
    parser.add_argument("--out", type=Path, default=Path("build/bench"))
    options = parser.parse_args(argv)
    if options.quick:
        options.shape, options.repeats = "toy", 1
    path, n_vocab = model(SHAPES[options.shape], options.type), SHAPES[options.shape].n_vocab
    later = prompts_for(options.chats * options.turns, options.said, n_vocab, seed=9)
    system = prompts_for(1, options.system, n_vocab, seed=10)[0] if options.system else ()
    texts = [
        [system + first, *later[at * options.turns : (at + 1) * options.turns - 1]]
        for at, first in enumerate(prompts_for(options.chats, options.prompt, n_vocab))
    ]
    turns: list[Turn] = []
    for _ in range(options.repeats):
        for prefix_lanes in (0, options.chats):
            turns += await talk(path, texts, options.tokens, prefix_lanes)
    wrong = await wrong_turns(path, options.type, turns)
    facts = {"machine": machine.facts(), "model": path.stem, "wrong": wrong}
    rows = [
        {"prefix_lanes": turn.prefix_lanes, "turn": turn.number, "n_prompt": len(turn.prompt), "ttft_s": turn.ttft_s}
        for turn in turns
    ]
    machine.write_json(options.out / "chats.json", facts | {"turns": rows})
    show(turns)
    for line in wrong:
        print(f"wrong: {line}", file=sys.stderr)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(interrupt.run(main()))
