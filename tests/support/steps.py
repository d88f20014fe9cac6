"""Readers of a step's results, for tests."""

from __future__ import annotations

import copy

from relayline.stage.steps.step import StepExecutor
from relayline.stage.steps.step_types import RouteOutput, StepResult
from relayline.wire.envelopes import envelope
from relayline.wire.envelopes.envelope import EnvelopeView
from relayline.wire.envelopes.frames import Flag
from tests.support.fakes import (
    FakeEngine,
    control,
    greedy,
    new_executor,
    step_of,
)

SAMPLE, PREFILL = Flag.WANTS_SAMPLE, Flag.PREFILL


def only(result: StepResult) -> RouteOutput:
    (output,) = result.outputs
    return output


def parsed(output: RouteOutput) -> EnvelopeView:
    return envelope.parse(output.message)


def labels(result: StepResult) -> list[tuple[int, str]]:
    return [(fault.session_id, fault.label) for output in result.outputs for fault in output.faults]


def opened(engine: FakeEngine, n_sessions: int, **options: object) -> StepExecutor:
    executor = new_executor(engine)
    executor.execute(
        step_of(*(control(session_id, Flag.OPEN, options=greedy(**options)) for session_id in range(n_sessions)))
    )
    return executor


def state_of(executor: StepExecutor, engine: FakeEngine) -> object:
    table = {key: (lane.index, lane.next_position) for key, lane in executor.lanes._by_session.items()}
    return table, copy.deepcopy(engine.lanes), sorted(executor.sessions.samplers), sorted(executor.sessions.cancelled)
