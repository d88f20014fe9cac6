"""Calibration: a slice's curves are measured and remembered, and the engine is left as it was."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from relayline.deploy.testing.engines import engine_config
from relayline.deploy.testing.processes import relayline
from relayline.deploy.testing.tiny_slices import TinyShape, write_pipeline
from relayline.stage.engine import ggml
from relayline.stage.engine.kv_cache import takes_lanes_apart
from relayline.stage.engine.loading import Load, LoadStoppedError
from relayline.stage.engine.native import NativeEngine
from relayline.stage.speed import calibrate as calibration
from relayline.stage.speed.calibrate import StepTimes, cached_curves, calibrate, curves_of, fresh_curves
from relayline.stage.speed.curves import shape_of
from relayline.wire.common import remembered
from relayline.wire.common.curve import ATTENTION_TILE_ROWS, LADDER, further_ns
from relayline.wire.envelopes.frames import Flag
from tests.support.fakes import rows_frame


@pytest.fixture
def artifacts(tmp_path: Path) -> list[Path]:
    return write_pipeline(tmp_path, TinyShape(), [2])


@pytest.fixture(params=["on", "off", "q8_0"])
def lane_engine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[NativeEngine]:
    """Lanes with separate cells, with flash attention (also over quantised cells) and without."""
    artifacts = write_pipeline(tmp_path, TinyShape(n_heads=2, n_kv_heads=1), [2])
    kind = {"kv_type": "q8_0"} if request.param == "q8_0" else {"flash_attn": request.param}
    config = engine_config(artifacts[1], n_lanes=5, ctx_tokens=256, max_rows=32, kv_layout="per-lane", **kind)
    with NativeEngine(config) as engine:
        yield engine


@pytest.fixture(params=[0, 1], ids=["first", "last"])
def engine(request: pytest.FixtureRequest, artifacts: list[Path]) -> Iterator[NativeEngine]:
    config = engine_config(artifacts[request.param], n_lanes=4, ctx_tokens=16, max_rows=32, max_wanted=8, spare_lanes=1)
    with NativeEngine(config) as engine:
        yield engine


def test_rows_that_are_measured_differ_and_are_the_same_each_time(
    engine: NativeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Equal rows would all choose the same experts, and a step of them would be too quick."""
    seen: list[bytes] = []
    decode = engine.decode

    def noted(n_rows: int) -> None:
        rows = engine.input_rows[:n_rows]
        assert len({row.tobytes() for row in rows}) == n_rows
        seen.append(rows[0].tobytes())
        decode(n_rows)

    monkeypatch.setattr(engine, "decode", noted)
    calibrate(engine, budget_s=3_600)
    assert len(set(seen)) == 1


def test_both_curves_cover_the_fitting_sizes_and_lanes_end_empty(engine: NativeEngine) -> None:
    curves = calibrate(engine, budget_s=3_600)
    decode_rows = [rows for rows, _ in curves.decode.points()]
    assert decode_rows == [rows for rows in LADDER if rows <= (8 if engine.is_last else 32)]
    assert all(ns > 0 for _, ns in curves.decode.points() + curves.prefill.points())
    prefill_rows = [rows for rows, _ in curves.prefill.points()]
    few = set(range(1, 9))
    assert few <= set(prefill_rows), "the head's cost for few rows is the difference to their cost without it"
    assert max(prefill_rows) == (16 if engine.is_last else 32), "a lane has room for 16"
    assert [engine.lane_tokens(lane) for lane in range(5)] == [0] * 5


def test_the_cost_of_context_is_measured_against_copies_of_a_short_one(
    engine: NativeEngine, artifacts: list[Path]
) -> None:
    assert calibrate(engine).context_ns == 0.0, "16 tokens a lane hold no context worth measuring"
    with NativeEngine(engine_config(artifacts[0], n_lanes=2, ctx_tokens=1_024, max_rows=32, spare_lanes=1)) as roomy:
        assert calibrate(roomy).context_ns > 0
        assert [roomy.lane_tokens(lane) for lane in range(3)] == [0] * 3


def test_a_lane_of_its_own_cells_holds_them_several_times_too(lane_engine: NativeEngine) -> None:
    check_multiplied(lane_engine)


def test_a_lane_holds_its_cells_several_times_until_there_is_no_room(engine: NativeEngine) -> None:
    check_multiplied(engine)


def check_multiplied(engine: NativeEngine) -> None:
    def run(lane: int, position: int, n_rows: int) -> npt.NDArray[np.float32]:
        engine.seq_ids[:n_rows], engine.wants[:n_rows] = lane, 1
        engine.positions[:n_rows] = range(position, position + n_rows)
        engine.input_rows[:n_rows] = np.linspace(-1, 1, n_rows * engine.n_embd).reshape(n_rows, -1)
        engine.decode(n_rows)
        found = engine.logits(n_rows - 1) if engine.is_last else engine.output_rows[n_rows - 1]
        return np.array(found)

    run(0, 0, 4)
    alone = run(0, 4, 1)
    engine.drop_from(0, 4)
    assert engine.multiply(0, 4, 8)
    assert engine.lane_tokens(0) == 4
    assert engine.lane_tokens(4) == 0
    with_copies = run(0, 4, 1)
    assert np.isfinite(with_copies).all()
    assert not np.allclose(alone, with_copies, atol=1e-6), "it attends to the copies"
    assert not engine.multiply(0, 4, 1_000), "more than there are cells"
    engine.clear(0)
    engine.clear(4)
    run(0, 0, 4)
    np.testing.assert_allclose(run(0, 4, 1), alone, atol=1e-5)


MS = 1_000_000


@pytest.mark.parametrize(
    ("n_threads", "steps", "last_ms"),
    [
        (1, [(40, 20)], 20),
        (1, [(40, 39)], 40),
        (1, [(1, 0)], 1),
        (4, [(100, 380), (80, 300)], 80),
        (2, [(100, 200), (5, 7)], 5),
        (4, [(100, 380), (100, 190)], 50),
        (4, [(100, 200)], 100),
        (4, [(100, 440), (100, 200)], 50),
        (0, [(40, 1)], 40),
    ],
    ids=["half-a-core", "a-whole-core", "too-short-to-tell", "all-cores", "between-two-ticks", "half-of-them",
         "never-more-than-half", "more-than-all", "another-device"],
)  # fmt: skip
def test_a_step_counts_with_its_time_on_undisturbed_cores(
    n_threads: int, steps: list[tuple[int, int]], last_ms: int
) -> None:
    times = StepTimes(n_threads)
    found_ns = [times.undisturbed_ns(wall * MS, cpu * MS) for wall, cpu in steps]
    assert found_ns[-1] == pytest.approx(last_ms * MS)


class BusyMachine:
    """Clocks of a process that others let compute half of the time, except in single rows."""

    def __init__(self, engine: NativeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.wall_ns = self.cpu_ns = 0
        self._decode = engine.decode
        monkeypatch.setattr(engine, "decode", self.decode)
        monkeypatch.setattr(calibration.time, "monotonic", lambda: 0.0)  # no deadline comes, on a slow machine neither
        monkeypatch.setattr(calibration.time, "monotonic_ns", lambda: self.wall_ns)
        monkeypatch.setattr(calibration.time, "process_time_ns", lambda: self.cpu_ns)

    def decode(self, n_rows: int) -> None:
        self._decode(n_rows)
        self.cpu_ns += n_rows * 10 * MS
        self.wall_ns += n_rows * (10 if n_rows == 1 else 20) * MS


def test_programs_that_have_the_cores_meanwhile_do_not_bend_the_curve(
    engine: NativeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    BusyMachine(engine, monkeypatch)
    curves = calibrate(engine)
    assert curves.decode.points() == [(rows, rows * 10 * MS) for rows, _ in curves.decode.points()]
    assert len(curves.decode.points()) >= 8


class PricedMachine:
    """Clocks on which a row takes the given time, plus some for each of 1,024 earlier tokens: less in tiles."""

    CONTEXT_NS = 20_000

    def __init__(self, engine: NativeEngine, monkeypatch: pytest.MonkeyPatch, row_ms: float, tiled_ns: int) -> None:
        self.now_ns, self.row_ns, self.tiled_ns, self.steps = 0, round(row_ms * MS), tiled_ns, list[int]()
        self._engine, self._decode = engine, engine.decode
        monkeypatch.setattr(engine, "decode", self.decode)
        monkeypatch.setattr(calibration.time, "monotonic", lambda: self.now_ns / 1e9)
        for name in ("monotonic_ns", "process_time_ns"):
            monkeypatch.setattr(calibration.time, name, lambda: self.now_ns)

    def decode(self, n_rows: int) -> None:
        is_long = self._engine.positions[0] == calibration.CONTEXT_COMPUTED_TOKENS
        self.now_ns += n_rows * self.row_ns + is_long * self.context_ns(n_rows)
        self.steps.append(n_rows)
        self._decode(n_rows)

    def context_ns(self, n_rows: int) -> int:
        """Return the extra time of a step of the long lane's rows."""
        if n_rows >= ATTENTION_TILE_ROWS:
            return n_rows * 1_024 * self.tiled_ns
        part = further_ns(1.0, takes_lanes_apart=takes_lanes_apart("f16"))
        return round((1 + part * (n_rows - 1)) * 1_024 * self.CONTEXT_NS)


@pytest.fixture
def roomy(artifacts: list[Path]) -> Iterator[NativeEngine]:
    with NativeEngine(engine_config(artifacts[0], n_lanes=2, ctx_tokens=1_024, max_rows=64, spare_lanes=1)) as engine:
        yield engine


def test_the_cost_of_context_for_tiled_rows_is_measured_apart(
    roomy: NativeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = PricedMachine(roomy, monkeypatch, row_ms=20, tiled_ns=5_000)
    curves = calibrate(roomy)
    assert curves.context_ns == pytest.approx(20_000)
    assert curves.context_tiled_ns == pytest.approx(5_000)
    assert (64, 64 * 20 * MS) in curves.prefill.points(), "no ladder gets so far in its time; this step was long enough"
    assert machine.now_ns < 12_000 * MS
    assert [roomy.lane_tokens(lane) for lane in range(3)] == [0] * 3


class LaneMachine(PricedMachine):
    """With per-lane cells each frame reads its lane once, and each row multiplies with it."""

    LANE_NS, ROW_NS = 15_000, 3_000

    def context_ns(self, n_rows: int) -> int:
        return (1_024 - ATTENTION_TILE_ROWS) * (self.LANE_NS + n_rows * self.ROW_NS)


@pytest.fixture
def apart(artifacts: list[Path]) -> Iterator[NativeEngine]:
    kind = {"kv_layout": "per-lane", "flash_attn": "off"}
    config = engine_config(artifacts[0], n_lanes=2, ctx_tokens=2_048, max_rows=64, **kind)
    with NativeEngine(config) as engine:
        yield engine


def test_of_lanes_with_their_own_cells_the_first_row_of_a_frame_and_the_others_are_measured_apart(
    apart: NativeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = LaneMachine(apart, monkeypatch, row_ms=20, tiled_ns=0)
    curves = calibrate(apart)
    assert curves.context_ns == pytest.approx(18_000)
    assert curves.context_tiled_ns == pytest.approx(3_000)
    assert curves.is_per_lane
    assert curves.predict_ns(shape_of([rows_frame(1, 1_000, 40, Flag.PREFILL), rows_frame(2, 500, 1)])) == (
        pytest.approx(41 * 20 * MS + 1_000 * (15_000 + 40 * 3_000) + 500 * 18_000, rel=0.01)
    )
    assert machine.now_ns < 12_000 * MS
    assert [apart.lane_tokens(lane) for lane in range(2)] == [0] * 2


def test_further_rows_cost_nothing_extra_where_attention_computes_no_scores(
    apart: NativeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    LaneMachine(apart, monkeypatch, row_ms=20, tiled_ns=0)
    assert apart.attention.has_scores
    apart.attention.has_scores = False
    curves = calibrate(apart)
    assert curves.context_ns == pytest.approx(18_000)
    assert curves.context_tiled_ns == 0.0


@pytest.mark.parametrize("hidden_by", ["no copies", "noise"])
def test_lanes_of_which_none_can_be_made_long_have_a_guess_to_refine(
    hidden_by: str, apart: NativeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    if hidden_by == "noise":
        monkeypatch.setattr(LaneMachine, "LANE_NS", -20_000)
        LaneMachine(apart, monkeypatch, row_ms=20, tiled_ns=0)
    else:
        monkeypatch.setattr(apart, "multiply", lambda *_: False)
    curves = calibrate(apart)
    assert curves.context_ns == pytest.approx(calibration.CONTEXT_PART * curves.prefill.cost_ns(1), rel=0.01)
    assert 0 < curves.context_tiled_ns <= curves.context_ns, "a further row never costs more than the first"


def test_a_tile_that_a_slow_machine_would_need_long_for_is_not_measured(
    roomy: NativeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = PricedMachine(roomy, monkeypatch, row_ms=100, tiled_ns=5_000)
    curves = calibrate(roomy)
    assert curves.context_ns == pytest.approx(20_000)
    assert curves.context_tiled_ns == 0.0, "which means unknown"
    assert curves.has_tiles, "which is known all the same: rows of tiles have other bits"
    assert max(machine.steps) < 64
    assert machine.now_ns < 10_000 * MS


def test_nor_is_one_when_the_time_is_spent_or_attention_knows_no_tiles(
    roomy: NativeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    PricedMachine(roomy, monkeypatch, row_ms=1, tiled_ns=5_000)
    assert calibrate(roomy, budget_s=0).context_tiled_ns == 0.0
    assert curves_of(roomy).has_tiles, "with --no-calibrate"
    monkeypatch.setattr(roomy.attention, "goes_by_tiles", False)
    assert calibrate(roomy).context_tiled_ns == 0.0
    assert not curves_of(roomy).has_tiles


def test_noise_that_hides_a_tiles_cost_of_context_leaves_a_price_to_refine(
    roomy: NativeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    PricedMachine(roomy, monkeypatch, row_ms=20, tiled_ns=-1_000)
    assert calibrate(roomy).context_tiled_ns == pytest.approx(calibration.TILED_PART_MIN * 20_000)


@pytest.mark.parametrize(
    ("n_threads", "cpu_ms", "is_doubtful"), [(1, 20, False), (4, 390, False), (4, 200, True), (0, 1, False)]
)
def test_curves_whose_threads_never_had_their_cores_together_are_not_remembered(
    n_threads: int, cpu_ms: int, is_doubtful: bool, engine: NativeEngine, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    times = StepTimes(n_threads)
    assert not times.are_doubtful, "nothing is known yet"
    times.undisturbed_ns(100 * MS, cpu_ms * MS)
    assert times.are_doubtful == is_doubtful
    monkeypatch.setattr(calibration, "step_times", lambda _: times)
    monkeypatch.setattr(calibration, "DISTURBED_MIN_NS", 10**18)
    assert fresh_curves(engine, tmp_path).decode.is_known
    assert (tmp_path / "curves").exists() != is_doubtful
    assert (calibration.CORES_TAKEN in caplog.messages) == is_doubtful


@pytest.mark.parametrize("n_threads", [0, 1])
def test_curves_whose_short_steps_were_disturbed_are_measured_again_at_the_next_start(
    n_threads: int, roomy: NativeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """On a processor. A GPU may take as long for one row of a tiny model as for 64."""
    took_ms = {1: 50, 64: 51}
    monkeypatch.setattr(calibration, "_time_step", lambda _, __, n_rows, **___: took_ms.get(n_rows, n_rows) * MS)
    monkeypatch.setattr(calibration, "step_times", lambda _: StepTimes(n_threads))
    monkeypatch.setattr(calibration, "AGAIN_MAX", 0)
    assert fresh_curves(roomy, tmp_path).doubt
    assert "measure again when it is idle" in caplog.text
    assert (tmp_path / "curves").exists() == (n_threads == 0)
    took_ms[1] = 1
    again = fresh_curves(roomy, tmp_path)
    assert (again.doubt, again.decode.cost_ns(1)) == ("", MS)
    assert (tmp_path / "curves").exists()


@pytest.mark.parametrize(("n_threads", "seems_ms"), [(0, 2), (1, 90)])
def test_a_step_that_a_larger_one_undercuts_is_measured_again_where_only_the_clock_tells(
    n_threads: int, seems_ms: int, engine: NativeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU with other users: each pass was disturbed at three rows. Three may cost more than four on a CPU."""
    seen: list[int] = []

    def takes(_: NativeEngine, times: StepTimes, n_rows: int, *, in_one_lane: bool) -> int:
        seen.append(n_rows)
        return (90 if n_rows == 3 and seen.count(3) <= calibration.PASSES + 1 else 2) * MS

    monkeypatch.setattr(calibration, "_time_step", takes)
    decode, _ = calibration.row_costs(engine, StepTimes(n_threads), *[time.monotonic() + 60] * 2)
    assert dict(decode)[3] == seems_ms * MS


def test_rows_that_larger_steps_undercut() -> None:
    assert calibration.undercut({1: 30, 2: 33, 3: 91, 4: 26, 8: 62, 16: 80, 32: 79, 64: 90}) == [1, 2, 3]
    assert calibration.undercut({1: 1, 2: 2}) == calibration.undercut({}) == []


def test_no_time_still_gives_a_curve_to_begin_with(engine: NativeEngine) -> None:
    curves = calibrate(engine, budget_s=0)
    assert curves.decode.points()[0][0] == 1
    assert curves.prefill.is_known


def test_curves_are_keyed_by_everything_that_changes_them(
    engine: NativeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibration, "_is_outrun", lambda *_: False)  # as if this machine had been as busy then as now
    measured = cached_curves(engine, tmp_path)
    assert cached_curves(engine, tmp_path).decode.points() == measured.decode.points()
    assert cached_curves(engine, tmp_path).context_ns == measured.context_ns
    assert cached_curves(engine, tmp_path).context_tiled_ns == measured.context_tiled_ns
    (file,) = (tmp_path / "curves").iterdir()
    file.write_text("not a curve")
    assert cached_curves(engine, tmp_path).decode.is_known
    fresh_curves(engine, tmp_path)
    assert len(list((tmp_path / "curves").iterdir())) == 1


@pytest.mark.parametrize(
    ("then_ms", "now_ms", "is_kept"),
    [
        ((10, 10, 10), (10, 10, 10), True),
        ((10, 10, 10), (20, 14, 12), True),  # the moment is bad now, and was not then
        ((10, 10, 10), (90, 7, 6), False),  # the first step has read the weights as well
        ((10, 10, 10), (9, 9, 9), True),
        ((1, 1, 1), (0.1, 0.1, 0.1), True),  # so short ones say nothing
    ],
    ids=str,
)
def test_a_curve_of_a_bad_moment_is_measured_again(
    then_ms: tuple[float, ...], now_ms: tuple[float, ...], is_kept: bool, engine: NativeEngine, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    def taking(*each_ms: float) -> None:
        by_rows = dict(zip(calibration.CHECK_ROWS, each_ms, strict=True))
        monkeypatch.setattr(
            calibration,
            "_time_step",
            lambda _, times, n_rows, in_one_lane: round(MS * by_rows.get(n_rows, each_ms[-1])),
        )

    taking(*then_ms)
    assert cached_curves(engine, tmp_path).decode.cost_ns(8) == then_ms[-1] * MS
    taking(*now_ms)
    assert cached_curves(engine, tmp_path).decode.cost_ns(8) == (then_ms if is_kept else now_ms)[-1] * MS
    taking(*then_ms)
    assert cached_curves(engine, tmp_path).decode.cost_ns(8) == (then_ms if is_kept else now_ms)[-1] * MS, "remembered"


def test_a_remembered_curve_is_held_against_no_further_steps_once_loading_is_stopped(
    engine: NativeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cached_curves(engine, tmp_path)
    monkeypatch.setattr(calibration, "CHECK_MIN_NS", 0)
    load = Load()
    load.stop()
    with pytest.raises(LoadStoppedError):
        cached_curves(engine, tmp_path, load)


def test_curves_of_a_small_stage_do_not_serve_a_roomier_one_or_another_build(
    artifacts: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measured(**changes: int) -> int:
        config = engine_config(artifacts[1], **({"n_lanes": 2, "ctx_tokens": 16, "max_rows": 32} | changes))  # type: ignore[arg-type]
        with NativeEngine(config) as engine:
            return max(rows for rows, _ in cached_curves(engine, tmp_path).prefill.points())

    assert measured() == 16
    assert measured(ctx_tokens=64) == 32
    assert measured() == 16
    assert len(list((tmp_path / "curves").iterdir())) == 2
    monkeypatch.setattr(calibration, "machine_facts", lambda: ("here", "with other libraries"))
    assert measured() == 16
    assert len(list((tmp_path / "curves").iterdir())) == 3
    monkeypatch.setattr(remembered, "REMEMBERED_MAX", 2)
    monkeypatch.setattr(calibration, "machine_facts", lambda: ("here", "and with others again"))
    assert measured() == 16
    assert len(list((tmp_path / "curves").iterdir())) == 2


def test_curves_of_one_gpu_do_not_serve_another(
    artifacts: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of them in one host, one chosen by CUDA_VISIBLE_DEVICES: processor, libraries and flags are the same."""
    for gpu_layers in (0, 1):
        for device in ("CUDA0: a small one", "CUDA0: a large one", "CUDA0: a small one"):
            monkeypatch.setattr(calibration.ggml, "devices", lambda device=device: (device,))
            with NativeEngine(engine_config(artifacts[0], n_lanes=2, ctx_tokens=16, gpu_layers=gpu_layers)) as engine:
                cached_curves(engine, tmp_path)
        n_expected = 3 if gpu_layers else 1  # the processor alone computes at first, so devices change nothing
        assert len(list((tmp_path / "curves").iterdir())) == n_expected


def test_devices_are_named() -> None:
    assert any(device.startswith("CPU: ") for device in ggml.devices())


def test_the_command_prints_a_table_and_json(
    artifacts: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    flags = ("--threads", "1", "--ctx", "64", "--lanes", "4")
    table = relayline("calibrate", artifacts[1], *flags)
    assert table.returncode == 0, table.stderr
    assert "ms per step" in table.stdout
    assert "every 1,000 tokens" in table.stdout
    rows = json.loads(relayline("calibrate", artifacts[1], *flags, "--json").stdout)
    assert [line["rows"] for line in rows["decode"]][:4] == [1, 2, 3, 4]
    assert all(line["runs_as"] >= line["rows"] for line in rows["decode"])
    assert rows["context_ns"] >= 0
    assert rows["context_tiled_ns"] == 0, "a lane of 64 tokens is never far behind its rows"
