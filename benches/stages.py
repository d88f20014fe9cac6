"""The stages' own figures of a run: what their cost curves allow, how much they overlapped, and why others waited.

The rate that the curves allow tells an idle schedule from a busy processor. The overlap is the share of the decode time
in which several stages computed at once.
"""

from __future__ import annotations

import asyncio
import bisect
import dataclasses
import itertools
import math
import statistics
from collections.abc import Sequence
from typing import Any

from relayline.coordinator.engine.descriptions import stage_cost
from relayline.coordinator.engine.stage_client import StageClient
from relayline.coordinator.observe.overlap import Interval, overlap_between
from relayline.coordinator.schedule.cycles import CHUNK_LADDER
from relayline.coordinator.schedule.stage_cost import StageCost
from relayline.deploy.cli.load import Request
from relayline.deploy.launch.local import local_identity
from relayline.deploy.testing.simulation.world import StageModel, best_rate, stage_rates
from relayline.wire.common.curve import CostCurve
from relayline.wire.links import role_tokens
from relayline.wire.links.security import LinkSecurity
from relayline.wire.pb.relayline.v1 import relayline_pb2 as pb

TOKEN = role_tokens.new_root()  # id of the pipelines that a bench starts, so that it can ask their stages

ROWS_MAX = 512  # of one native step, unless a stage has other settings


@dataclasses.dataclass(frozen=True, slots=True)
class Allowed:
    """Tokens per second of equal requests that come at once, if only native steps took time."""

    tok_s: float  # prompts included in the time
    decode_tok_s: float  # while all of them decode


def allowed(stages: Sequence[StageCost], n_streams: int, n_prompt: int, n_tokens: int) -> Allowed:
    """Return the largest rates that the curves allow n_streams. Pure.

    Every stage reads all prompts in chunks of its best size. It then makes all decode steps at the best rate of any
    schedule (see stage_rates), at the context of half an answer. It begins when a chunk has passed the earlier stages,
    and its last step is followed by those of the later ones. The slowest stage decides.

    This is close to a bound, but not a strict one. A prompt's rows may fill up a decode step, and scratch rows are
    charged for context here. Rows of many streams in tiles of attention cost more than counted here.
    """
    rows = [dataclasses.replace(stage, prompt_tokens=n_prompt // 2) for stage in stages]
    chunks = [chunk for chunk in CHUNK_LADDER if chunk <= min(stage.rows_max for stage in stages)]
    n_rows, n_decoded = n_streams * n_prompt, n_streams * (n_tokens - 1)
    context = n_prompt + n_tokens / 2
    models = [StageModel(_with_context(s.decode, s.context_ns * context), s.prefill, s.rows_max) for s in stages]
    rates = stage_rates(models, n_streams, 0.0)
    first_ns = [min(stage.prefill_ns(chunk) for chunk in chunks) for stage in rows]
    last_ns = first_ns if n_tokens == 1 else [model.decode.cost_ns(1) for model in models]
    busy_s = [
        (min(math.ceil(n_rows / chunk) * stage.prefill_ns(chunk) for chunk in chunks)
         + sum(first_ns[:at]) + sum(last_ns[at + 1 :])) / 1e9 + n_decoded / rates[at]
        for at, stage in enumerate(rows)
    ]  # fmt: skip
    decode_tok_s = best_rate(models, n_streams, 0.0)
    return Allowed(n_streams * n_tokens / max(*busy_s, n_decoded / decode_tok_s), decode_tok_s)


def _with_context(curve: CostCurve, row_ns: float) -> CostCurve:
    return CostCurve((rows, ns + rows * row_ns) for rows, ns in curve.points())


async def ask(status: dict[str, Any]) -> list[pb.StatusResponse]:
    """Ask the stages of GET /v1/pipeline for their curves and recent steps; those that do not answer are left out."""
    asked = list(enumerate(status.get("stages", ())))
    clients = [StageClient(stage["address"], LinkSecurity(token=TOKEN), local_identity(at)) for at, stage in asked]
    try:
        statuses = await asyncio.gather(*(client.status(with_recent=True) for client in clients))
    finally:
        await asyncio.gather(*(client.close() for client in clients))
    return [one for one in statuses if one is not None]


def idle(stages: Sequence[Sequence[Interval]], from_ns: int, to_ns: int) -> dict[str, float]:
    """Return the reasons why stages did not compute between two moments, as shares of that time, averaged over stages.
    Pure. `stages` holds their steps in pipeline order, known from `from_ns` on. The last stage precedes the first, by
    way of the coordinator. The first part of a pause is `idle_elsewhere`: it lasts until the previous stage's last step
    before the pause's end has ended. The rest of the pause is `idle_way`: work of other stages, links and the
    coordinator outside native steps, and the stage's own work between two. Empty without steps.
    """
    if not stages or not all(stages) or to_ns <= from_ns:
        return {}
    elsewhere_ns = way_ns = 0
    for at, steps in enumerate(stages):
        ends = [end_ns for _, end_ns in stages[at - 1]] if len(stages) > 1 else []
        for (_, ended_ns), (started_ns, _) in itertools.pairwise((*steps, (to_ns, to_ns))):
            begin_ns, end_ns = max(ended_ns, from_ns), min(started_ns, to_ns)
            if begin_ns < end_ns:
                before = bisect.bisect_right(ends, started_ns) - 1
                came_ns = min(max(ends[before], begin_ns), end_ns) if before >= 0 else begin_ns
                elsewhere_ns += came_ns - begin_ns
                way_ns += end_ns - came_ns
    whole_ns = (to_ns - from_ns) * len(stages)
    return {"idle_elsewhere": elsewhere_ns / whole_ns, "idle_way": way_ns / whole_ns}


def work(
    stages: Sequence[Sequence[Interval]], tokens_ns: Sequence[int], window: Interval, most: float
) -> dict[str, float]:
    """Return decode's rate and step times between two moments, compared with `most` tokens per second. Pure.

    `decode_reached`: tokens a second of that many. `step_work`: the busiest stage's time in steps per token, relative
    to the least by its curve. Above 1 its steps took longer than the curve says, or did not have the best number of
    rows. The product of both is the share of the time in which that stage computed. Empty without tokens.
    """
    from_ns, to_ns = window
    n_tokens = sum(1 for at_ns in tokens_ns if from_ns < at_ns <= to_ns)
    if not n_tokens or not stages:
        return {}
    return {
        "decode_reached": n_tokens / (to_ns - from_ns) * 1e9 / most,
        "step_work": max(_in_steps_ns(stages, window)) / 1e9 / n_tokens * most,
    }


def evenness(stages: Sequence[Sequence[Interval]], window: Interval) -> dict[str, float]:
    """Return `step_evenness`: the least busy stage's time in steps, as a share of the busiest one's, in a window. Pure.
    Two stages cannot compute at once for longer than the less busy one computes, and one of them computes for at least
    as long as the busier one. So no schedule of two stages has more overlap than this. Empty without steps.
    """
    in_steps_ns = _in_steps_ns(stages, window)
    return {"step_evenness": min(in_steps_ns) / max(in_steps_ns)} if any(in_steps_ns) else {}


def _in_steps_ns(stages: Sequence[Sequence[Interval]], window: Interval) -> list[int]:
    from_ns, to_ns = window
    return [sum(max(0, min(end, to_ns) - max(start, from_ns)) for start, end in steps) for steps in stages]


def ways(stages: Sequence[Sequence[Interval]], window: Interval) -> dict[str, list[float]]:
    """Return where the time of a token goes between two moments, as medians in milliseconds. Pure.

    `step_ms`: of each stage's steps. `way_ms`: from the end of a step to the next step of the following stage. The last
    one's leads to the first stage, by way of the coordinator. Such pairs are a token's way only while one flight is
    under way. Empty if some stage had no step.
    """
    from_ns, to_ns = window
    within = [[each for each in steps if from_ns <= each[0] and each[1] <= to_ns] for steps in stages]
    if not within or not all(within):
        return {}
    step_ms = [statistics.median(end_ns - start_ns for start_ns, end_ns in steps) / 1e6 for steps in within]
    way_ms: list[float] = []
    for at, steps in enumerate(within):
        starts = [start_ns for start_ns, _ in within[(at + 1) % len(within)]]
        found = [
            starts[following] - end_ns
            for _, end_ns in steps
            if (following := bisect.bisect_left(starts, end_ns)) < len(starts)
        ]
        if not found:
            return {}
        way_ms.append(statistics.median(found) / 1e6)
    return {"step_ms": step_ms, "way_ms": way_ms}


def figures(statuses: Sequence[pb.StatusResponse], requests: Sequence[Request], n_prompt: int) -> dict[str, Any]:
    """Return `allowed_tok_s`, `allowed_decode_tok_s`, `overlap_decode` and figures of `evenness`, `idle`, `ways` and
    `work`. Pure. For streams that asked once. All but the first two cover the time in which all streams decode: from
    the last first token to the first last one. (None of them is valid for streams that ask again, since prompts are
    read all the time then.) Unknown figures are left out, if curves were not measured or answers were too short.
    """
    found: dict[str, Any] = {}
    costs = [stage_cost(one, ROWS_MAX, host_ns=0) for one in statuses]
    if costs and all(cost.decode.is_known and cost.prefill.is_known for cost in costs):
        most = allowed(costs, len(requests), n_prompt, requests[0].n_tokens)
        found |= {"allowed_tok_s": most.tok_s, "allowed_decode_tok_s": most.decode_tok_s}
    if all(request.token_ns for request in requests):
        steps = [list(zip(one.step_start_ns, one.step_end_ns, strict=True)) for one in statuses]
        # Stages remember a bounded number of steps: before the first of them idle and forgotten look the same.
        firsts = [*(request.token_ns[0] for request in requests), *(known[0][0] for known in steps if known)]
        window = (max(firsts), min(request.token_ns[-1] for request in requests))
        if shares := overlap_between(steps, *window):
            found |= {"overlap_decode": shares["2+"], **evenness(steps, window), **idle(steps, *window)}
            found |= ways(steps, window)
            if most_tok_s := found.get("allowed_decode_tok_s"):
                tokens_ns = [at_ns for request in requests for at_ns in request.token_ns]
                found |= work(steps, tokens_ns, window, most_tok_s)
    return found
