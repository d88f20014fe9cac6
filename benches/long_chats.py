"""More chats than lanes, one after the other, twice: `python -m benches.long_chats [--quick]`.

Between a chat's two turns other chats take its lane. So the second turn starts from the prefixes that stages have
stored, or with `--prefix-memory-bytes 0` reads everything again. The bench runs both. The report
has medians over the chats: the time to the first token, and the tokens that came from kept prefixes.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benches import interrupt, machine
from benches.arguments import number
from benches.models import MIXES, SHAPES, model
from benches.reference import prompts_for
from relayline.deploy.cli import load
from relayline.deploy.cli.load import Request, Target
from relayline.deploy.launch.local import running
from relayline.deploy.manifest.smallest import StageFlags, smallest_manifest, with_stages
from relayline.wire.settings.table import PREFIX_MEMORY_AUTO

N_STAGES, N_LANES, N_SAID = 2, 2, 30


async def talk(path: Path, first: Sequence[Any], additions: Sequence[Any], n_tokens: int, tier_bytes: int) -> list[Any]:
    """Run one pipeline and two rounds of all chats; returns one entry for each request."""
    ctx_tokens = len(first[0]) + N_SAID + 2 * n_tokens
    settings: dict[str, Any] = {"ctx_tokens": ctx_tokens, "n_lanes": N_LANES, "prefix_memory_bytes": tier_bytes}
    manifest = with_stages(smallest_manifest(path, **settings), StageFlags(N_STAGES), 0)
    results: list[Any] = []
    async with running(manifest, lambda _, __: None) as (_, ready), load.client() as session:
        target = Target(ready["url"], "openai", ready["model"], cache_prompt=True)
        histories = list(first)
        for round_ in range(2):
            for chat, history in enumerate(histories):
                request = Request(0, n_tokens, time.monotonic_ns())
                await load.complete(session, target, history, request)
                ttft_s = (request.token_ns[0] - request.due_ns) / 1e9 if request.token_ns else 0.0
                results.append({"round": round_ + 1, "chat": chat, "n_prompt": len(history), "ttft_s": ttft_s})
                histories[chat] = (*history, *request.tokens, *additions[chat])
                await asyncio.sleep(0)
        async with session.get(f"{ready['url']}/v1/pipeline") as answer:
            described = await answer.json()
        results.append(
            {"tiers": [stage["tier"] for stage in described["stages"]], "stored": described["stored_prefixes"]}
        )
    return results


async def main(argv: Sequence[str] | None = None) -> int:
    """Run the chats with stored prefixes and without; report."""
    parser = argparse.ArgumentParser(prog="python -m benches.long_chats", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a toy model: checks the bench itself")
    parser.add_argument("--shape", choices=SHAPES, default="llama-1b")
    parser.add_argument("--type", choices=MIXES, default="q4_0")
    parser.add_argument("--chats", type=number, default=4, help="one after the other, on two lanes")
    parser.add_argument("--prompt", type=number, default=4_000, help="tokens of the first question of each chat")
    parser.add_argument("--tokens", type=number, default=16, help="of each answer")
    parser.add_argument("--out", type=Path, default=Path("build/bench"))
    options = parser.parse_args(argv)
    if options.quick:
        options.shape, options.prompt = "toy", min(options.prompt, 400)
    path, n_vocab = model(SHAPES[options.shape], options.type), SHAPES[options.shape].n_vocab
    first = prompts_for(options.chats, options.prompt, n_vocab)
    additions = prompts_for(options.chats, N_SAID, n_vocab, seed=9)
    runs = {}
    for name, tier_bytes in (("tier", PREFIX_MEMORY_AUTO), ("none", 0)):
        *asked, tiers = runs[name] = await talk(path, first, additions, options.tokens, tier_bytes)
        rounds = [statistics.median(one["ttft_s"] for one in asked if one["round"] == at) for at in (1, 2)]
        print(f"{name}: first token after {rounds[0]:.3f} s, in the second round after {rounds[1]:.3f} s; {tiers}")
    machine.write_json(options.out / "long_chats.json", {"machine": machine.facts(), "model": path.stem, "runs": runs})
    return 0


if __name__ == "__main__":
    sys.exit(interrupt.run(main()))
