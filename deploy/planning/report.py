"""A plan as JSON-ready values and as tables. Pure: nothing is measured or asked here."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from rich.markup import escape

from relayline.coordinator.planner.instance import Instance
from relayline.coordinator.planner.memory import StageMemory, kv_cells, window_kv_cells
from relayline.coordinator.planner.predict import PROMPT_TOKENS, ROWS_SHOWN, Prediction, RatePlan, StagePlan
from relayline.coordinator.planner.search import Best
from relayline.deploy.planning.plan_description import limit_text
from relayline.deploy.tables import Trimmed, console_of_stdout, fitted
from relayline.wire.common.texts import counted, layer_range
from relayline.wire.common.units import GIB

NAMES = {"stage": 10, "host": 9}  # columns of names, and cells that they have at least; longer ones take more lines
WORDS_CELLS = 11  # of reasons likewise


@dataclasses.dataclass(frozen=True, slots=True)
class Variant:
    """The plan with one more machine."""

    like: str
    """Stage whose host was copied."""
    after: str
    """Stage behind which the new one would stand."""
    why: str
    """limiting or fastest."""
    tokens_per_s: float
    gain: float
    """tokens_per_s against the plan's, minus 1."""
    cuts: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Draft:
    """A draft model beside the coordinator."""

    name: str
    ctx_tokens: int
    """Tokens that it holds."""
    memory: StageMemory
    gpus_bytes: int = 0
    """Memory of all GPUs of this machine, of which it takes part; 0: of none."""


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """Everything that `relayline plan` shows."""

    name: str
    model: str
    instance: Instance
    best: Best
    prediction: Prediction
    variants: tuple[Variant, ...]
    notes: tuple[str, ...]
    advice: tuple[str, ...] = ()
    """Whether spanning pays, and what would fit, in plain sentences."""
    draft: Draft | None = None


def as_json(plan: Plan) -> dict[str, Any]:
    """Return the plan as stable JSON values: bytes, milliseconds, tokens per second.

    Keys, with those of nested objects in parentheses:

    * name, model, cuts, exact, lanes, ctx_tokens, streams, ttft_ms, ttft_prompt_tokens, advice, notes
    * reachable_tok_s: at `streams`, if the coordinator found the best way to group; `rates` has what it would choose
    * stages (index, name, host, layers [start, end), threads, step_ms by rows, speed_source)
    * of each stage in its host's memory: weights_bytes, kv_bytes, kv_tokens, compute_bytes, process_bytes,
      prefix_bytes, memory_bytes, memory_limit_bytes or null
    * of each stage in its GPU's memory: gpu or null (name, weights_bytes, kv_bytes, compute_bytes, memory_bytes,
      memory_limit_bytes or null)
    * rates (streams, tok_s, groups, group_rows, limit)
    * links (from, to, bytes_per_token, one_way_ms)
    * draft_model or null: name, ctx_tokens, and of the coordinator's machine weights_bytes, kv_bytes, compute_bytes,
      process_bytes, memory_bytes, gpu_bytes
    * one_more (like, after, why, tok_s, gain, cuts)
    """
    instance, prediction = plan.instance, plan.prediction
    return {
        "name": plan.name,
        "model": plan.model,
        "cuts": [start for start, _ in plan.best.edges[1:]],
        "exact": plan.best.is_exact,
        "lanes": instance.load.n_lanes,
        "ctx_tokens": instance.load.ctx_tokens,
        "streams": instance.load.streams,
        "reachable_tok_s": round(plan.best.reachable * 1e9, 3),
        "stages": [_stage_json(plan, index, stage) for index, stage in enumerate(prediction.stages)],
        "rates": [_rate_json(rate) for rate in prediction.rates],
        "ttft_ms": round(prediction.ttft_ns / 1e6, 3),
        "ttft_prompt_tokens": min(PROMPT_TOKENS, instance.load.ctx_tokens - 1),
        "links": links_json(plan),
        "one_more": [
            {
                "like": variant.like,
                "after": variant.after,
                "why": variant.why,
                "tok_s": round(variant.tokens_per_s, 3),
                "gain": round(variant.gain, 4),
                "cuts": list(variant.cuts),
            }
            for variant in plan.variants
        ],
        "draft_model": None if plan.draft is None else _draft_json(plan.draft),
        "advice": list(plan.advice),
        "notes": list(plan.notes),
    }


def _stage_json(plan: Plan, index: int, stage: StagePlan) -> dict[str, Any]:
    memory = stage.memory
    return {
        "index": index,
        "name": stage.name,
        "host": stage.machine,
        "layers": list(stage.layers),
        "threads": stage.threads,
        "weights_bytes": memory.weights_bytes,
        "kv_bytes": memory.kv_bytes,
        "kv_tokens": kv_cells(plan.instance.load),
        "window_kv_tokens": window_kv_cells(plan.instance.model, plan.instance.load),
        "compute_bytes": memory.compute_bytes,
        "process_bytes": memory.process_bytes,
        "prefix_bytes": memory.prefix_bytes,
        "memory_bytes": memory.total_bytes,
        "memory_limit_bytes": stage.limit_bytes,
        "gpu": None
        if memory.gpu is None
        else {
            "name": stage.gpu,
            "weights_bytes": memory.gpu.weights_bytes,
            "kv_bytes": memory.gpu.kv_bytes,
            "compute_bytes": memory.gpu.compute_bytes,
            "memory_bytes": memory.gpu.total_bytes,
            "memory_limit_bytes": stage.gpu_limit_bytes,
        },
        "step_ms": {str(rows): round(ns / 1e6, 3) for rows, ns in stage.step_ns.items()},
        "speed_source": stage.source,
    }


def _draft_json(draft: Draft) -> dict[str, Any]:
    memory = draft.memory
    return {
        "name": draft.name,
        "ctx_tokens": draft.ctx_tokens,
        "weights_bytes": memory.weights_bytes,
        "kv_bytes": memory.kv_bytes,
        "compute_bytes": memory.compute_bytes,
        "process_bytes": memory.process_bytes,
        "memory_bytes": memory.total_bytes,
        "gpu_bytes": 0 if memory.gpu is None else memory.gpu.total_bytes,
    }


def _rate_json(rate: RatePlan) -> dict[str, Any]:
    return {
        "streams": rate.n_streams,
        "tok_s": round(rate.tokens_per_s, 3),
        "groups": rate.n_groups,
        "group_rows": rate.group_rows,
        "limit": rate.limit,
    }


def links_json(plan: Plan) -> list[dict[str, Any]]:
    """Return the links from the coordinator through all stages and back."""
    names = ["coordinator", *(stage.name for stage in plan.prediction.stages), "coordinator"]
    sizes, links = plan.prediction.link_bytes_per_token, plan.instance.links
    return [
        {
            "from": names[at],
            "to": names[at + 1],
            "bytes_per_token": size,
            "one_way_ms": round(link.one_way_ns(size) / 1e6, 4),
        }
        for at, (size, link) in enumerate(zip(sizes, links, strict=True))
    ]


def show(plan: Plan) -> None:
    """Print the plan as tables."""
    console, load = console_of_stdout(), plan.instance.load
    console.print(
        f"{plan.name}: {plan.model}, {counted(plan.instance.model.n_layers, 'layer')} over "
        f"{counted(len(plan.best.edges), 'stage')}; "
        f"{counted(load.n_lanes, 'lane')} of {load.ctx_tokens:,} tokens, {load.kv_type} cache, {load.kv_layout}",
        highlight=False,
        soft_wrap=True,
    )
    console.print(_memory_table(plan.prediction.stages, console.width))
    console.print()
    console.print(_step_table(plan.prediction.stages, console.width))
    console.print()
    console.print(_rate_table(plan, console.width))
    console.print()
    for line in _lines(plan):
        console.print(line, highlight=False, soft_wrap=True)


def _memory_table(stages: Sequence[StagePlan], width: int) -> Trimmed:
    stores = any(stage.memory.prefix_bytes for stage in stages)
    prefixes = ("prefixes",) if stores else ()
    rows = []
    for stage in stages:
        memory = stage.memory
        rows.append(
            [
                escape(stage.name),
                escape(stage.machine),
                layer_range(*stage.layers),
                f"{memory.weights_bytes / GIB:.2f}",
                f"{memory.kv_bytes / GIB:.2f}",
                *((f"{memory.prefix_bytes / GIB:.2f}",) if stores else ()),
                f"{(memory.compute_bytes + memory.process_bytes) / GIB:.2f}",
                f"{memory.total_bytes / GIB:.2f}",
                _limit(stage.limit_bytes),
            ]
        )
        if memory.gpu is not None:
            rows.append(
                [
                    "",
                    escape(stage.gpu),
                    "",
                    f"{memory.gpu.weights_bytes / GIB:.2f}",
                    f"{memory.gpu.kv_bytes / GIB:.2f}",
                    *(("",) if stores else ()),
                    f"{memory.gpu.compute_bytes / GIB:.2f}",
                    f"{memory.gpu.total_bytes / GIB:.2f}",
                    _limit(stage.gpu_limit_bytes),
                ]
            )
    columns = ("stage", "host", "layers", "weights", "KV cache", *prefixes, "buffers", "GiB in all", "of")
    left_out = ("buffers", *prefixes, "KV cache", "weights")
    return fitted(width, columns, rows, left_out=left_out, folds=NAMES, left=NAMES)


def _limit(limit_bytes: int | None) -> str:
    return "unknown" if limit_bytes is None else f"{limit_bytes / GIB:.2f}"


def _step_table(stages: Sequence[StagePlan], width: int) -> Trimmed:
    rows = []
    for stage in stages:
        steps = (f"{stage.step_ns[rows] / 1e6:.1f}" if rows in stage.step_ns else "" for rows in ROWS_SHOWN)
        rows.append([escape(stage.name), str(stage.threads), *steps, escape(stage.source)])
    columns = ("stage", "threads", "ms per step of 1 row", "8 rows", "32 rows", "speed is")
    folds = {"stage": NAMES["stage"], "speed is": WORDS_CELLS}
    return fitted(width, columns, rows, left_out=("threads",), folds=folds, left=folds)


def _rate_table(plan: Plan, width: int) -> Trimmed:
    rows = [
        [
            str(rate.n_streams),
            f"{rate.tokens_per_s:.1f}",
            f"{rate.tokens_per_s / rate.n_streams:.1f}",
            f"{rate.n_groups} x {rate.group_rows}",
            escape(limit_text(rate.limit)),
        ]
        for rate in plan.prediction.rates
    ]
    columns, folds = ("streams", "tok/s", "tok/s each", "groups", "limited by"), {"limited by": WORDS_CELLS}
    return fitted(width, columns, rows, left_out=("groups",), folds=folds, left=folds)


def _draft_text(draft: Draft) -> str:
    memory, gpu = draft.memory, draft.memory.gpu
    kv_bytes = memory.kv_bytes + (0 if gpu is None else gpu.kv_bytes)
    where = "" if gpu is None else f" and {gpu.total_bytes / GIB:.2f} of its GPU's"
    return (
        f"draft model {draft.name}: {memory.total_bytes / GIB:.2f} GiB of the coordinator's machine{where}, with "
        f"{kv_bytes / GIB:.2f} for {draft.ctx_tokens:,} tokens; the rates are those without "
        "it, for how often it guesses right is not known before it runs"
    )


def _cells_text(plan: Plan) -> str:
    model, load = plan.instance.model, plan.instance.load
    n_cells, n_windowed = kv_cells(load), window_kv_cells(model, load)
    text = f"{n_cells:,} cells"
    return text if n_windowed == n_cells else f"{text} ({n_windowed:,} in layers with a sliding window)"


def _variant_text(variant: Variant, streams: str) -> str:
    if round(variant.gain, 2) <= 0:
        return f"one more machine like {variant.like}'s ({variant.why}) would not make more tok/s at {streams}"
    return (
        f"one more machine like {variant.like}'s ({variant.why}), after {variant.after}: "
        f"{variant.tokens_per_s:.1f} tok/s at {streams} ({variant.gain:+.0%})"
    )


def _lines(plan: Plan) -> list[str]:
    prediction, load = plan.prediction, plan.instance.load
    links = ", ".join(f"{link['from']} → {link['to']} {link['bytes_per_token']:,}" for link in links_json(plan))
    tokens = min(PROMPT_TOKENS, load.ctx_tokens - 1)
    lines = [
        f"room: {counted(load.n_lanes, 'stream')} of {load.ctx_tokens:,} tokens, "
        f"{_cells_text(plan)} in every stage's cache",
        f"first token of a prompt of {tokens} tokens: {prediction.ttft_ns / 1e9:.2f} s if nothing else runs",
        f"bytes per token: {links}",
    ]
    lines += [] if plan.draft is None else [_draft_text(plan.draft)]
    for variant in plan.variants:
        lines.append(_variant_text(variant, counted(load.streams, "stream")))
    lines += plan.advice
    if not plan.best.is_exact:
        lines.append("note: there are too many ways to cut for an exact search; this is the best split of a wide one")
    return [*lines, *(f"note: {note}" for note in plan.notes)]
