"""Largest logits found on the computing device, here the processor's backend: the same as found on the host."""

from __future__ import annotations

import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from relayline.deploy.testing.engines import engine_config
from relayline.deploy.testing.tiny_slices import TinyShape, write_pipeline
from relayline.stage.engine.device_greedy import DeviceGreedy
from relayline.stage.engine.native import NativeEngine
from relayline.stage.sampling.sampler import SamplingOptions, SessionSampler
from relayline.stage.steps.picking import Picking, pick_all
from relayline.wire.common.errors import InternalError

N_LANES = 6


@pytest.fixture(scope="module", name="last")
def last_fixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pipeline(tmp_path_factory.mktemp("pipeline"), TinyShape(n_layers=2), [1])[-1]


@pytest.fixture(name="engines")
def engines_fixture(last: Path) -> Iterator[list[NativeEngine]]:
    """One engine that copies every row and one that does not."""
    both = [
        NativeEngine(engine_config(last, n_lanes=N_LANES, ctx_tokens=64, max_rows=24, device_sampling=way))
        for way in ("off", "on")
    ]
    yield both
    for engine in both:
        engine.close()


def token_of(engine: NativeEngine, row: int) -> int | None:
    return None if engine.device is None else engine.device.token(row)


def step(engines: list[NativeEngine], lanes: list[int], wants: list[int], rng: np.random.Generator) -> list[int]:
    """Let both take the same step; returns its wanted rows."""
    n_rows = len(lanes)
    rows = rng.standard_normal((n_rows, engines[0].n_embd), np.float32)
    for engine in engines:
        seen: dict[int, int] = {}
        for row, lane in enumerate(lanes):
            engine.positions[row] = engine.lane_tokens(lane) + seen.get(lane, 0)
            seen[lane] = seen.get(lane, 0) + 1
        engine.input_rows[:n_rows], engine.seq_ids[:n_rows], engine.wants[:n_rows] = rows, lanes, wants
        engine.decode(n_rows)
    return [row for row in range(n_rows) if wants[row]]


def test_tokens_and_rows_are_those_of_the_host(engines: list[NativeEngine]) -> None:
    host, device = engines
    rng = np.random.default_rng(1)
    n_compared = 0
    for number in range(24):
        # Prompts, drafts (several wanted rows of a lane) and single rows, in changing order; steps that want nothing.
        lanes = [int(lane) for lane in rng.permutation(N_LANES)[: 2 + number % 5]]
        lanes += [lanes[-1]] * (number % 3)
        wants = [0] * len(lanes) if number % 6 == 5 else [int(rng.random() < 0.7) for _ in lanes]
        for row in step(engines, lanes, wants, rng):
            expected = host.logits(row)
            assert token_of(host, row) is None
            assert token_of(device, row) == int(expected.argmax())
            if row % 2:  # rows that the host needs are fetched between those that it does not
                np.testing.assert_array_equal(device.logits(row), expected)
            n_compared += 1
    assert n_compared > 50


def test_repeated_steps_reuse_a_graph_and_still_give_their_own_tokens(engines: list[NativeEngine]) -> None:
    host, device = engines
    rng = np.random.default_rng(2)
    for _ in range(12):
        for row in step(engines, [0, 1, 2], [1, 0, 1], rng):
            assert token_of(device, row) == int(host.logits(row).argmax())
        step(engines, [3, 4], [0, 0], rng)


def test_greedy_streams_among_others_match_the_host(
    engines: list[NativeEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = [
        SamplingOptions(temperature=0),
        SamplingOptions(temperature=0.8, seed=7),
        SamplingOptions(temperature=0, n_logprobs=2),
        SamplingOptions(temperature=0, frequency_penalty=1.0),
        SamplingOptions(temperature=0, logit_bias=((5, 100.0),)),
        SamplingOptions(temperature=0),
    ]
    sampled: list[list[bytes]] = []
    fetched: list[int] = []
    fetch = DeviceGreedy.logits
    monkeypatch.setattr(DeviceGreedy, "logits", lambda greedy, row: fetched.append(row) or fetch(greedy, row))
    rng = np.random.default_rng(5)
    samplers = [[SessionSampler(each, engine.n_vocab) for each in options] for engine in engines]
    for _ in range(5):
        step(engines, list(range(N_LANES)), [1] * N_LANES, rng)
        for engine, those in zip(engines, samplers, strict=True):
            pickings: list[Picking] = []
            for row, sampler in enumerate(those):
                frame = types.SimpleNamespace(n_rows=1, flags=0, position=engine.lane_tokens(row) - 1, session_id=row)
                item: Any = types.SimpleNamespace(frame=frame, row=row)
                pickings.append(Picking(item, engine, sampler, wants_logits=row == 5))
            pick_all(pickings)
            sampled.append([each.SerializeToString() for picking in pickings for each in picking.samples])
    assert sampled[::2] == sampled[1::2]
    assert set(fetched) == {1, 2, 3, 4, 5}, "the row of a bare greedy stream never leaves the device"
    assert all(sampler.last is not None for sampler in samplers[1])


def test_rows_that_are_not_finite_are_left_to_the_host(engines: list[NativeEngine]) -> None:
    device = engines[1]
    device.input_rows[:2] = 1.0
    device.input_rows[1] = np.nan
    device.seq_ids[:2], device.positions[:2], device.wants[:2] = [0, 1], 0, 1
    device.decode(2)
    assert token_of(device, 0) == int(device.logits(0).argmax())
    assert token_of(device, 1) is None
    assert not np.isfinite(device.logits(1)).any()


def test_a_row_that_was_not_wanted_is_refused(engines: list[NativeEngine]) -> None:
    device = engines[1]
    step([device], [0, 1], [0, 1], np.random.default_rng(3))
    for row in (0, 2, -1):
        with pytest.raises(InternalError, match="did not keep the logits"):
            token_of(device, row)
        with pytest.raises(InternalError, match="did not keep the logits"):
            device.logits(row)


@pytest.mark.parametrize(
    ("way", "layout", "is_on"), [("on", "unified", True), ("auto", "unified", False), ("on", "per-lane", False)]
)
def test_the_device_picks_where_it_is_on(last: Path, way: str, layout: str, is_on: bool) -> None:
    config = engine_config(last, n_lanes=2, ctx_tokens=32, max_rows=8, device_sampling=way, kv_layout=layout)
    with NativeEngine(config) as engine:
        engine.input_rows[0] = np.random.default_rng(4).standard_normal(engine.n_embd, np.float32)
        engine.positions[0] = engine.seq_ids[0] = 0
        engine.decode(1)
        found = token_of(engine, 0)
        row: npt.NDArray[np.float32] = engine.logits(0)
        assert found == (int(row.argmax()) if is_on else None)
