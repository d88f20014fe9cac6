"""Draws from rows of logits that stay where the stage computes, on the processor's backend: the host's tokens."""

from __future__ import annotations

import ctypes
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llama_cpp import llama_cpp as llama

from relayline.deploy.testing.engines import engine_config
from relayline.deploy.testing.tiny_slices import TinyShape, write_pipeline
from relayline.stage.engine.device_greedy import DeviceGreedy
from relayline.stage.engine.device_rows import GATHERED_MAX, DeviceRows
from relayline.stage.engine.ggml_functions import calls
from relayline.stage.engine.native import NativeEngine
from relayline.stage.sampling.draws import BLOCK, BLOCKS_FROM
from relayline.stage.sampling.sampler import SamplingOptions, SessionSampler
from relayline.stage.steps.picking import Picking, pick_all
from relayline.wire.common.errors import NativeError

N_LANES = 12
N_VOCAB = BLOCKS_FROM + 5 * BLOCK
OPTIONS = [
    SamplingOptions(temperature=0.7, top_p=0.9, seed=1),
    SamplingOptions(temperature=1.0, seed=2),
    SamplingOptions(temperature=0.9, min_p=0.2, seed=3),
    SamplingOptions(temperature=0.3, top_p=0.5, min_p=0.05, seed=4),
    SamplingOptions(temperature=1.2, top_k=N_VOCAB, seed=5),
    SamplingOptions(temperature=0),
    SamplingOptions(temperature=1.0, top_k=40, seed=6),
    SamplingOptions(temperature=1.0, n_logprobs=2, seed=7),
    SamplingOptions(temperature=0.7, frequency_penalty=1.0, seed=8),
]


@pytest.fixture(scope="module", name="last")
def last_fixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pipeline(tmp_path_factory.mktemp("pipeline"), TinyShape(n_layers=2, n_vocab=N_VOCAB), [1])[-1]


def opened(path: Path, way: str) -> NativeEngine:
    return NativeEngine(engine_config(path, n_lanes=N_LANES, ctx_tokens=64, max_rows=32, device_sampling=way))


@pytest.fixture(name="engines")
def engines_fixture(last: Path) -> Iterator[list[NativeEngine]]:
    """One engine that copies every row, and one that copies what draws look at."""
    both = [opened(last, way) for way in ("off", "all")]
    yield both
    for engine in both:
        engine.close()


@pytest.fixture(name="fetched")
def fetched_fixture(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rows that were fetched whole."""
    rows: list[int] = []
    fetch = DeviceGreedy.logits
    monkeypatch.setattr(DeviceGreedy, "logits", lambda device, row: rows.append(row) or fetch(device, row))
    return rows


def step(engines: list[NativeEngine], n_rows: int, scale: float, rng: np.random.Generator) -> None:
    """Let all take the same step of a row of each of so many lanes."""
    rows = rng.standard_normal((n_rows, engines[0].n_embd), np.float32) * np.float32(scale)
    for engine in engines:
        engine.positions[:n_rows] = [engine.lane_tokens(lane) for lane in range(n_rows)]
        engine.input_rows[:n_rows], engine.seq_ids[:n_rows], engine.wants[:n_rows] = rows, range(n_rows), 1
        engine.decode(n_rows)


def said(engine: NativeEngine, samplers: list[SessionSampler]) -> list[bytes]:
    """Sample the rows of a step, one of each lane."""
    pickings: list[Picking] = []
    for row, sampler in enumerate(samplers):
        frame = types.SimpleNamespace(n_rows=1, flags=0, position=engine.lane_tokens(row) - 1, session_id=row)
        item: Any = types.SimpleNamespace(frame=frame, row=row)
        pickings.append(Picking(item, engine, sampler, wants_logits=row == 11))
    pick_all(pickings)
    return [each.SerializeToString() for picking in pickings for each in picking.samples]


def samplers_of(options: list[SamplingOptions], n_rows: int = N_LANES) -> list[SessionSampler]:
    return [SessionSampler(options[row % len(options)], N_VOCAB) for row in range(n_rows)]


def test_maxima_and_tokens_of_rows_are_those_of_the_logits(engines: list[NativeEngine]) -> None:
    rng = np.random.default_rng(3)
    for n_rows in (5, 12, 1):
        step(engines[1:], n_rows, 1.0, rng)
        device = engines[1].device
        assert device is not None
        rows = [int(row) for row in rng.permutation(n_rows)][:3]
        logits = np.stack([engines[1].logits(row) for row in rows])
        assert np.array_equal(device.maxima(rows), logits.reshape(len(rows), BLOCK, -1).max(1))
        for n_wanted in (0, 7, GATHERED_MAX + 3):
            at, tokens = rng.integers(0, len(rows), n_wanted), rng.integers(0, N_VOCAB, n_wanted)
            assert np.array_equal(device.gathered(rows, at, tokens), logits[at, tokens])


def test_drawn_streams_beside_others_say_what_the_host_says(engines: list[NativeEngine], fetched: list[int]) -> None:
    host, device = engines
    rng = np.random.default_rng(5)
    kept = [samplers_of(OPTIONS) for _ in engines]
    for n_rows in (12, 12, 9, 12, 7):
        step(engines, n_rows, 1.0, rng)
        assert said(host, kept[0][:n_rows]) == said(device, kept[1][:n_rows])
    assert {6, 7, 8} <= set(fetched), "top-k, log probabilities and penalties need whole rows"
    assert not {1, 5, 10} & set(fetched), "greedy rows and draws without top-p never do"


@pytest.mark.parametrize("temperature", [0.05, 0.7, 30.0])
def test_few_rows_are_fetched_whole(engines: list[NativeEngine], fetched: list[int], temperature: float) -> None:
    host, device = engines
    rng = np.random.default_rng(6)
    options = [SamplingOptions(temperature=temperature, min_p=0.01, seed=seed) for seed in range(11)]
    kept = [samplers_of(options, 11) for _ in engines]
    for _ in range(6):
        step(engines, 11, 1.0, rng)
        assert said(host, kept[0]) == said(device, kept[1])
    assert len(fetched) < 6 * 11 / 4


def test_rows_that_are_not_finite_and_steps_of_few_rows_are_the_hosts(
    engines: list[NativeEngine], fetched: list[int]
) -> None:
    _, device = engines
    device.input_rows[:6] = 1.0
    device.input_rows[2] = np.nan
    device.seq_ids[:6], device.positions[:6], device.wants[:6] = range(6), 0, 1
    device.decode(6)
    assert len(said(device, samplers_of(OPTIONS[1:2], 6))) == 5, "and a fault"
    assert set(fetched) == {2}
    step([device], 3, 1.0, np.random.default_rng(1))
    said(device, samplers_of(OPTIONS[1:2], 3))
    assert set(fetched) == {0, 1, 2}


def test_a_device_that_cannot_do_it_gives_whole_rows(
    engines: list[NativeEngine], fetched: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    host, device = engines

    def refuse(*_: object) -> None:
        raise NativeError("no such operation")

    monkeypatch.setattr(DeviceRows, "maxima", refuse)
    rng = np.random.default_rng(7)
    kept = [samplers_of(OPTIONS[:5]) for _ in engines]
    for _ in range(2):
        step(engines, 8, 1.0, rng)
        assert said(host, kept[0][:8]) == said(device, kept[1][:8])
    assert fetched == [*range(8)] * 2
    assert device.device is not None
    assert not device.device.gives_parts


def test_a_device_without_the_operations_gives_whole_rows(
    engines: list[NativeEngine], fetched: list[int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(calls, "ggml_backend_dev_supports_op", lambda *_: False)
    step(engines[1:], 8, 1.0, np.random.default_rng(8))
    said(engines[1], samplers_of(OPTIONS[:5], 8))
    assert len(fetched) >= 6
    assert "no operation for parts of its logits" in caplog.text


@pytest.mark.parametrize(("n_vocab", "way"), [(BLOCKS_FROM + 7, "all"), (N_VOCAB, "on")])
def test_some_vocabularies_and_ways_give_no_parts(tmp_path: Path, n_vocab: int, way: str) -> None:
    path = write_pipeline(tmp_path, TinyShape(n_layers=2, n_vocab=n_vocab), [1])[-1]
    with opened(path, way) as engine:
        assert engine.device is not None
        assert not engine.device.gives_parts


def test_types_that_others_give_to_shared_functions_change_nothing(engines: list[NativeEngine]) -> None:
    shared = llama._lib.ggml_init  # an attribute, which every module of the process has alike
    before = shared.argtypes
    shared.argtypes = [ctypes.c_int]
    try:
        step(engines[1:], 8, 1.0, np.random.default_rng(9))
        said(engines[1], samplers_of(OPTIONS[:5], 8))
        assert engines[1].device is not None
        assert engines[1].device.gives_parts
    finally:
        shared.argtypes = before
