"""What a draft model brings: `python -m benches.draft_model [--quick]`.

The served model has random weights whose blocks change little. So its first layers with its own head often say what
all of it says: they are the draft model. `--gains` sets how much blocks change, and so how often guesses are right.
With `--demo` it is the demo model that goes on with held-out text, and the demo's draft model: both are trained, so the
share of right guesses is a real one. Both are so small that nothing can be gained.

Three pipelines take turns with the same greedy requests: without drafts, with prompt lookup alone, and with the draft
model besides. On one machine the draft model takes cores from the stages, which it does not where the coordinator has
its own.

Every answer must be complete and equal to the unsplit model's. Otherwise the exit code is 1.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp
import gguf
from rich.console import Console
from rich.table import Table

from benches import interrupt, machine
from benches.arguments import number, numbers
from benches.drafts import figures_of
from benches.models import SHAPES, model
from benches.reference import Prompt, prompts_for
from benches.verdicts import wrong_answers
from relayline.coordinator.text.tokenizer import Tokenizer
from relayline.deploy.cli import load
from relayline.deploy.cli.load import Request, Target, summarise
from relayline.deploy.launch.local import running
from relayline.deploy.manifest.smallest import StageFlags, smallest_manifest, with_stages
from relayline.deploy.testing.paths import DEMO, DEMO_DRAFT_MODEL, DEMO_MODEL

KINDS = ("off", "lookup", "draft model")


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """One round of all streams on one of the pipelines."""

    kind: str
    n_streams: int
    gain: float
    requests: tuple[Request, ...]
    drafted: int
    accepted: int
    guess_ms: float
    right_share: float

    @property
    def tok_s(self) -> float:
        """Tokens a second while answers were written: without first tokens and prompts."""
        return summarise(self.requests).decode_tok_s


def first_layers(path: Path, n_layers: int) -> Path:
    """Return the first layers of a llama with its own head as a model, made if it does not exist."""
    out = path.with_name(f"{path.stem}-first-{n_layers}.gguf")
    if out.exists():
        return out
    reader = gguf.GGUFReader(path)
    unfinished = out.with_suffix(".part")
    writer = gguf.GGUFWriter(unfinished, "llama")
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name in ("general.architecture", "llama.block_count"):
            continue
        kind = field.types[0]
        inner = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(name, field.contents(), kind, inner)
    writer.add_block_count(n_layers)
    for tensor in reader.tensors:
        part = tensor.name.split(".")
        if part[0] != "blk" or int(part[1]) < n_layers:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    unfinished.rename(out)
    return out


async def ask(
    session: aiohttp.ClientSession,
    kind: str,
    ready: dict[str, str],
    prompts: Sequence[Prompt],
    n_tokens: int,
    gain: float,
) -> Run:
    """Ask all prompts at once."""
    target = Target(ready["url"], "openai", ready["model"])
    before = await figures_of(session, ready["url"])
    requests = [Request(at, n_tokens, time.monotonic_ns()) for at in range(len(prompts))]
    await asyncio.gather(*(load.complete(session, target, prompts[each.prompt_index], each) for each in requests))
    after = await figures_of(session, ready["url"])
    drafted, accepted = (after[key] - before[key] for key in ("drafted_tokens", "accepted_tokens"))
    known = after["draft_model"] or {"guess_ns": 0, "right_share": 0.0}
    return Run(
        kind, len(prompts), gain, tuple(requests), drafted, accepted, known["guess_ns"] / 1e6, known["right_share"]
    )


async def measure(path: Path, draft: Path, prompts: Sequence[Prompt], options: Any, gain: float) -> list[Run]:
    """Run the three pipelines of a model and its draft model in turns, for each number of streams."""
    context = {"ctx_tokens": options.prompt + options.tokens, "n_lanes": max(options.streams)}
    more: dict[str, dict[str, Any]] = {
        "off": {"draft": "off"},
        "lookup": {},
        "draft model": {"draft_model": str(draft), "draft_threads": options.draft_threads},
    }
    runs: list[Run] = []
    async with contextlib.AsyncExitStack() as stack:
        ready: dict[str, dict[str, str]] = {}
        for kind in KINDS:
            manifest = smallest_manifest(path, **context, **more[kind])
            manifest = with_stages(manifest, StageFlags(options.stages, n_threads=options.threads or None), 0)
            _, ready[kind] = await stack.enter_async_context(running(manifest, lambda _, __: None))
        session = await stack.enter_async_context(load.client())
        for n_streams in options.streams:
            asked = prompts[:n_streams]
            for kind in KINDS:  # learn
                await ask(session, kind, ready[kind], asked, options.tokens, gain)
            for _ in range(options.repeats):
                for kind in KINDS:
                    runs.append(await ask(session, kind, ready[kind], asked, options.tokens, gain))
    return runs


def begun_texts(n_prompts: int, n_tokens: int) -> list[Prompt]:
    """Return pieces of the text that the demo model has not seen, from places all over it."""
    tokens = Tokenizer.load(DEMO_MODEL).encode((DEMO / "heldout.txt").read_text(encoding="utf-8"), add_special=False)
    return [tuple(tokens[at : at + n_tokens]) for at in range(0, len(tokens), len(tokens) // n_prompts)][:n_prompts]


async def demo_runs(options: Any) -> tuple[list[Run], list[str]]:
    """Measure the demo's pair; return its runs, and a line for each wrong answer."""
    prompts = begun_texts(max(options.streams), options.prompt)
    runs = await measure(DEMO_MODEL, DEMO_DRAFT_MODEL, prompts, options, 0.0)
    return runs, await wrong_answers(DEMO_MODEL, "q8_0", prompts, [each for run in runs for each in run.requests])


async def random_runs(options: Any) -> tuple[list[Run], list[str]]:
    """Measure models of random weights, for each gain; return as `demo_runs`."""
    runs: list[Run] = []
    wrong: list[str] = []
    for gain in options.gains:
        shape = dataclasses.replace(SHAPES[options.shape], residual_gain=gain)
        prompts = prompts_for(max(options.streams), options.prompt, shape.n_vocab, seed=21)
        path = model(shape, options.type)
        found = await measure(path, first_layers(path, options.layers), prompts, options, gain)
        wrong += await wrong_answers(path, options.type, prompts, [each for run in found for each in run.requests])
        runs += found
    return runs, wrong


def show(runs: Sequence[Run]) -> None:
    """Print one line for each number of streams and gain."""
    table = Table("gain", "streams", *(f"tok/s {kind}" for kind in KINDS), "model / off", "drafted / token", "right",
                  "model's right", "ms a guess", title="a draft model")  # fmt: skip
    for gain, n_streams in sorted({(run.gain, run.n_streams) for run in runs}):
        of = [run for run in runs if (run.gain, run.n_streams) == (gain, n_streams)]
        speeds = [statistics.median(run.tok_s for run in of if run.kind == kind) for kind in KINDS]
        modelled = [run for run in of if run.kind == "draft model"]
        drafted, accepted = (sum(getattr(run, name) for run in modelled) for name in ("drafted", "accepted"))
        n_tokens = sum(len(request.tokens) for run in modelled for request in run.requests)
        table.add_row(f"{gain:g}", str(n_streams), *(f"{each:.1f}" for each in speeds), f"{speeds[2] / speeds[0]:.2f}",
                      f"{drafted / max(1, n_tokens):.2f}", f"{accepted / drafted:.2f}" if drafted else "-",
                      f"{modelled[-1].right_share:.2f}", f"{modelled[-1].guess_ms:.1f}")  # fmt: skip
    Console(width=120).print(table)


async def main(argv: Sequence[str] | None = None) -> int:
    """Ask, judge, report."""
    parser = argparse.ArgumentParser(prog="python -m benches.draft_model", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a toy model: checks the bench itself")
    parser.add_argument(
        "--shape", choices=[name for name in SHAPES if name.startswith(("llama", "toy"))], default="llama-8b"
    )
    parser.add_argument("--demo", action="store_true", help="the demo model and its draft model, on text")
    parser.add_argument("--type", default="q4_0")
    parser.add_argument("--layers", type=number, default=1, help="of the draft model")
    parser.add_argument("--gains", type=gains, default=(0.03, 0.1), help="how much blocks change")
    parser.add_argument("--stages", type=number, default=2)
    parser.add_argument("--threads", type=int, default=0, help="of each stage [default: the cores divided by them]")
    parser.add_argument("--draft-threads", type=number, default=1)
    parser.add_argument("--streams", type=numbers, default=(1, 2))
    parser.add_argument("--prompt", type=number, default=16, help="tokens of each prompt")
    parser.add_argument("--tokens", type=number, default=48, help="of each answer")
    parser.add_argument("--repeats", type=number, default=2)
    parser.add_argument("--out", type=Path, default=Path("build/bench"))
    options = parser.parse_args(argv)
    if options.quick:
        options.shape, options.repeats, options.streams, options.gains = "toy", 1, (1,), (0.1,)
    runs, wrong = await (demo_runs if options.demo else random_runs)(options)
    rows = [
        {"kind": run.kind, "n_streams": run.n_streams, "gain": run.gain, "tok_s": run.tok_s, "drafted": run.drafted,
         "accepted": run.accepted, "guess_ms": run.guess_ms, "right_share": run.right_share}
        for run in runs
    ]  # fmt: skip
    shape = "demo" if options.demo else options.shape
    facts = {"machine": machine.facts(), "shape": shape, "stages": options.stages, "wrong": wrong}
    machine.write_json(options.out / "draft_model.json", facts | {"runs": rows})
    show(runs)
    for line in wrong:
        print(f"wrong: {line}", file=sys.stderr)
    return int(bool(wrong))


def gains(text: str) -> tuple[float, ...]:
    """Read comma-separated positive numbers. Raises argparse.ArgumentTypeError."""
    try:
        found = tuple(float(part) for part in text.split(","))
    except ValueError:
        found = ()
    if not found or not all(each > 0 for each in found):
        raise argparse.ArgumentTypeError(f"{text!r} is no list of numbers over 0")
    return found


if __name__ == "__main__":
    sys.exit(interrupt.run(main()))
