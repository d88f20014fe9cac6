"""The benches' command lines: impossible arguments are refused in one line, with exit code 2, before anything runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from benches import __main__ as everything
from benches import bench_engine, compare, hop, plan_accuracy, quantisation, tracing
from benches.compare import Bench, plan_of
from benches.models import SHAPES, Shape
from benches.peers import Kernels, Peers
from relayline.wire.telemetry.config import LEVEL_NAMES


@pytest.mark.parametrize(
    ("read", "argv", "message"),
    [
        (
            compare.parse,
            ["--systems", "auto,unspilt"],
            "--systems: there is no 'unspilt'; there are auto, single, drain",
        ),
        (compare.parse, ["--streams", "x"], "--streams: 'x' is not a number of at least 1"),
        (compare.parse, ["--streams", "1,,2"], "--streams: '' is not a number of at least 1"),
        (compare.parse, ["--delay-streams", "8,0"], "--delay-streams: '0' is not a number of at least 1"),
        (compare.parse, ["--tokens", "0"], "--tokens: '0' is not a number of at least 1"),
        (compare.parse, ["--rounds", "x"], "--rounds: 'x' is not a number of at least 1"),
        (compare.parse, ["--type", "q4"], "--type: invalid choice: 'q4'"),
        (quantisation.main, ["--types", "q4"], "--types: there is no 'q4'; there are q4_0, q8_0"),
        (quantisation.main, ["--threads", "0"], "--threads: '0' is not a number of at least 1"),
        (bench_engine.main, ["--steps", "-3"], "--steps: '-3' is not a number of at least 1"),
        (hop.main, ["--width", "0"], "--width: '0' is not a number of at least 1"),
        (tracing.parse, ["--repeats", "-1"], "--repeats: '-1' is not a number of at least 1"),
        (plan_accuracy.parse, ["--tokens", "x"], "--tokens: 'x' is not a number of at least 1"),
        (everything.parse, ["--only", "hop,quantization"], "--only: there is no 'quantization'; there are envelope"),
        (everything.parse, ["--only", ""], "--only: there is no ''; there are envelope"),
        (tracing.parse, ["--levels", "off,sumary"], "--levels: there is no 'sumary'; there are off, summary"),
        (plan_accuracy.parse, ["--stages", "two"], "--stages: 'two' is not a number of at least 1"),
        (plan_accuracy.parse, ["--streams", "-1"], "--streams: '-1' is not a number of at least 1"),
        (plan_accuracy.parse, ["--streams", "1,2"], "--streams 2: plans predict 1, 8, 32"),
    ],
)
def test_arguments_without_a_measurement_are_refused_in_one_line(
    read: Callable[[Sequence[str]], object], argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        read(argv)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err.splitlines()[-1]


def test_old_results_do_not_pass_for_new_ones(tmp_path: Path) -> None:
    """An interrupted run leaves its results so far, but neither the combined file nor the plots of an earlier run."""
    for name in ("results.json", "hop.json", "compare.json", "compare.png", "compare.txt", "of-mine.png"):
        (tmp_path / name).touch()
    everything.forget(tmp_path, ["compare"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hop.json", "of-mine.png"]


def test_lists_are_read_as_they_are_given() -> None:
    options = compare.parse(["--systems", "drain,auto", "--streams", "2,16", "--delay-streams", "4"])
    plan = plan_of(options, {})
    assert (plan.systems, plan.streams, plan.delay_streams) == (("drain", "auto"), (2, 16), (4,))
    assert plan_of(compare.parse(["--quick"]), {}).streams == (1, 4)
    peers = dict.fromkeys(Kernels, Peers(Path("bin"), "1"))
    assert plan_of(compare.parse([]), peers).systems == ("auto", "single", "drain", "rpc", "unsplit")
    mixed = compare.parse(["--systems", "auto,unsplit+kernels,rpc"])
    assert compare.wanted_kernels(mixed) == [Kernels.OURS, Kernels.SHIPPED]
    only_shipped = {Kernels.SHIPPED: Peers(Path("bin"), "1")}
    assert plan_of(mixed, only_shipped).systems == ("auto", "rpc"), "programs that are not built are left out"
    assert tracing.parse(["--levels", "summary,frames"]).levels == ("summary", "frames")
    assert tracing.parse([]).levels == tuple(LEVEL_NAMES)


async def test_no_server_answers_under_a_name_that_is_none_of_the_systems(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_model(_shape: Shape, _mix: str) -> Path:
        return tmp_path / "none.gguf"

    monkeypatch.setattr(compare, "model", no_model)
    bench = Bench(plan_of(compare.parse(["--quick"]), {}), tmp_path, {})
    assert bench.plan.shape == SHAPES["toy"]
    with pytest.raises(ValueError, match="there is no system 'unspilt'"):
        async with bench.system("unspilt"):
            pass
