"""What the stages themselves know of a run: what their cost curves allow at most, to tell a schedule that idles from a
processor that is busy, and how much of the decode time they computed at once."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from typing import Any

from benches.simulate_world import StageModel, best_rate
from coordinator.connection import stage_cost
from coordinator.groups import CHUNK_LADDER, StageCost
from coordinator.overlap import overlap_between
from coordinator.stage_client import StageClient
from deploy.load import Request
from wire.curve import CostCurve
from wire.pb.relayline.v1 import relayline_pb2 as pb

ROWS_MAX = 512  # of one native step, unless a stage was started otherwise


def allowed_tok_s(stages: Sequence[StageCost], n_streams: int, n_prompt: int, n_tokens: int) -> float:
    """Return tokens a second of n_streams equal requests that come at once, prompts included in the time. Pure.

    All prompts go through the stages as one train of the best chunk; then decode steps, of which no schedule makes
    more (see best_rate), at the context of half an answer. Links and everything beside native steps cost nothing.
    """
    rows = [_with_context(stage.prefill, stage.context_ns * n_prompt / 2) for stage in stages]
    chunks = [chunk for chunk in CHUNK_LADDER if chunk <= min(stage.rows_max for stage in stages)]
    n_rows, n_more = n_streams * n_prompt, len(stages) - 1
    prompts_ns = min(
        (math.ceil(n_rows / chunk) + n_more) * max(curve.cost_ns(chunk) for curve in rows) for chunk in chunks
    )
    context = n_prompt + n_tokens / 2
    models = [StageModel(_with_context(s.decode, s.context_ns * context), s.prefill, s.rows_max) for s in stages]
    decode_s = n_streams * (n_tokens - 1) / best_rate(models, n_streams, 0.0)
    return n_streams * n_tokens / (prompts_ns / 1e9 + decode_s)


def _with_context(curve: CostCurve, row_ns: float) -> CostCurve:
    return CostCurve((rows, ns + rows * row_ns) for rows, ns in curve.points())


async def ask(status: dict[str, Any]) -> list[pb.StatusResponse]:
    """Ask the stages of GET /v1/pipeline for their curves and recent steps; those that do not answer are left out."""
    clients = [StageClient(stage["address"]) for stage in status.get("stages", ())]
    try:
        said = await asyncio.gather(*(client.status(with_recent=True) for client in clients))
    finally:
        await asyncio.gather(*(client.close() for client in clients))
    return [one for one in said if one is not None]


def figures(said: Sequence[pb.StatusResponse], requests: Sequence[Request], n_prompt: int) -> dict[str, float]:
    """Return `allowed_tok_s` and `overlap_decode` of a closed loop of equal requests that has just ended. Pure.

    `overlap_decode` is the overlap from the moment every stream had its first token to the first stream's end: before
    and after fewer streams run, and stages that are equal for decode are not for prompts, which need no head. Figures
    that nobody knows are left out: curves not measured, answers too short.
    """
    found: dict[str, float] = {}
    costs = [stage_cost(one, ROWS_MAX) for one in said]
    if costs and all(cost.decode.is_known and cost.prefill.is_known for cost in costs):
        found["allowed_tok_s"] = allowed_tok_s(costs, len(requests), n_prompt, requests[0].n_tokens)
    if requests and all(request.token_ns for request in requests):
        steps = [list(zip(one.step_start_ns, one.step_end_ns, strict=True)) for one in said]
        # Stages remember a bounded number of steps: before the first of them nobody can tell idle from forgotten.
        from_ns = max(*(r.token_ns[0] for r in requests), *(known[0][0] for known in steps if known), 0)
        if shares := overlap_between(steps, from_ns, min(r.token_ns[-1] for r in requests)):
            found["overlap_decode"] = shares["2+"]
    return found
