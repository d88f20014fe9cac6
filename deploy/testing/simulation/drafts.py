"""A simulation's model: its tokens, its clients' predictions, and the sampler that checks guesses."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import cast

import numpy as np
import numpy.typing as npt

from relayline.deploy.testing.simulation.world import Request
from relayline.stage.queue_types import QueuedFrame
from relayline.stage.sampling.sampler import Sampled, SessionSampler
from relayline.stage.steps.picking import Picking, pick_all
from relayline.stage.steps.placement import Placed
from relayline.stage.steps.step_types import Engine
from relayline.wire.envelopes.frames import Flag
from relayline.wire.pb.relayline.v1 import relayline_pb2 as pb

N_VOCAB = 32_000
_LOGITS = np.zeros(0, np.float32)


def oracle(session_id: int, position: int) -> int:
    """Return the token that the model of this simulation samples at a position."""
    return (session_id * 2_654_435_761 + position * 40_503) % N_VOCAB


def prediction(request: Request, session_id: int, seed: int) -> tuple[int, ...]:
    """Return the client's prediction of the answer. The model never says one of its wrong tokens."""
    if request.predicted is None:
        return ()
    rng, begin = random.Random(f"{seed}/{session_id}"), request.n_prompt + request.n_before
    return tuple(
        oracle(session_id, begin + index) + N_VOCAB * (rng.random() >= request.predicted)
        for index in range(request.max_tokens - request.n_before)
    )


class OracleSampler:
    """Replaces stage.sampling.sampler.SessionSampler."""

    is_greedy = draws_plainly = False  # its token does not come from logits

    def __init__(self, session_id: int) -> None:
        self._session_id = session_id
        self.last: tuple[int, int] | None = None

    def sample(self, _: npt.NDArray[np.float32], position: int) -> Sampled:
        """Return the model's token."""
        token = oracle(self._session_id, position)
        self.last = (position, token)
        return Sampled(token, None, [])


class _NoEngine:
    device = None

    def logits(self, _: int) -> npt.NDArray[np.float32]:
        return _LOGITS


ENGINE = cast(Engine, _NoEngine())


def real(sampler: OracleSampler | None) -> SessionSampler | None:
    """Return it in the form that the code under test expects."""
    return cast(SessionSampler | None, sampler)


def answers(
    computed: list[Placed], pointless: list[QueuedFrame], samplers: Mapping[int, OracleSampler]
) -> pb.ReturnResponse:
    """Return the last stage's answer to a step, as stage.steps.step does."""
    message = pb.ReturnResponse()
    passed = list(pointless)
    for item in computed:
        if not item.frame.flags & Flag.WANTS_SAMPLE:
            passed.append(item.frame)
            continue
        sampler = cast(SessionSampler, samplers[item.frame.session_id])
        picking = Picking(item, ENGINE, sampler, wants_logits=False)
        pick_all([picking])
        message.samples.extend(picking.samples)
        if not picking.is_complete:
            passed.append(item.frame)
    for frame in passed:
        message.progress.add(session_id=frame.session_id, position=frame.position + frame.n_rows)
    return message
