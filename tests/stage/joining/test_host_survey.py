"""A host measures slices that have no weights."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable
from pathlib import Path

import pytest

from relayline.coordinator.joining.config import engine_message
from relayline.coordinator.model.inspection import inspect_model
from relayline.coordinator.model.split import hollow_slices, write_stages
from relayline.deploy.planning.measure import slices_for
from relayline.deploy.testing.paths import DEMO_MODEL, HYBRID_DEMO_MODEL
from relayline.stage.joining import survey as survey_module
from relayline.stage.joining.config import JoinConfig
from relayline.stage.joining.survey import survey
from relayline.stage.speed.calibrate import PREFILL_LADDER
from relayline.stage.speed.host_probe import CTX_TOKENS, LANES
from relayline.wire.common.child_command import code_command
from relayline.wire.common.curve import LADDER
from relayline.wire.common.scratch import LOCK
from relayline.wire.pb.relayline.v1 import join_pb2 as pb
from relayline.wire.pb.relayline.v1 import relayline_pb2 as pb_wire
from relayline.wire.settings.table import EngineSettings


class OneMember:
    """The part of a membership that `survey` uses."""

    def __init__(self, order: pb.JoinResponse) -> None:
        self.order = order
        self.reports: list[pb.HostMeasured] = []

    async def report(self, *, measured: pb.HostMeasured) -> None:
        self.reports.append(measured)

    async def report_progress(self, phase: pb.ArtifactPhase, done_bytes: int, total_bytes: int) -> None:
        assert phase == pb.ARTIFACT_PHASE_MEASURING

    async def fetch(self, offset: int, sha256: str = "", end: int = 0) -> AsyncGenerator[pb.FetchResponse, None]:
        for at in range(offset, 4):
            yield pb.FetchResponse(offset=at, data=b"x" * 1_000)


def surveyed(slices: list[pb.SurveySlice], cache: Path) -> pb.HostMeasured:
    engine = engine_message(EngineSettings(n_threads=1))
    order = pb.JoinResponse(survey=pb.Survey(slices=slices, link_bytes=4), engine=engine)
    member = OneMember(order)
    asyncio.run(survey(member, JoinConfig("127.0.0.1:1", "box", cache)))  # type: ignore[arg-type]
    (report,) = member.reports
    assert list(cache.iterdir()) == [], "nothing is left on the disk"
    return report


def rows_of(points: Iterable[pb_wire.CostPoint]) -> list[int]:
    return [point.n_rows for point in points]


@pytest.mark.parametrize("model", [DEMO_MODEL, HYBRID_DEMO_MODEL], ids=["attention", "recurrent"])
@pytest.mark.parametrize("budget_ms", [10**7, 0], ids=["hours", "no time"])
def test_slices_of_a_real_model_are_measured_without_its_weights(budget_ms: int, model: Path, tmp_path: Path) -> None:
    """Each ladder as far as the time goes: to the last rung that fits the slice, or to the first one alone."""
    hollow = list(hollow_slices(model, slices_for(inspect_model(model))))
    assert sum(len(each.header) for each in hollow) < 16_384, "no texts of tokens"
    slices = [
        pb.SurveySlice(
            header=each.header, size_bytes=each.size_bytes, layer_bytes=each.layer_bytes, budget_ms=budget_ms
        )
        for each in hollow
    ]
    report = surveyed(slices, tmp_path / "cache")
    assert not report.HasField("failure")
    assert len(report.slices) == len(slices)
    for given, costs in zip(hollow, report.slices, strict=True):
        assert all(point.cost_ns > 0 for point in (*costs.decode, *costs.prefill))
        has_head = given.head_bytes > 0
        decode = [rows for rows in LADDER if rows <= LANES or not has_head]  # as many rows want logits
        prefill = [rows for rows in PREFILL_LADDER if has_head and rows <= CTX_TOKENS]
        if not budget_ms:
            decode, prefill = decode[:1], [*PREFILL_LADDER[:1]]
        assert rows_of(costs.decode) == decode
        assert rows_of(costs.prefill) == sorted(prefill)
    assert report.in_service >= 1.0
    assert report.round_trip_ns > 0 < report.bytes_per_s


def test_a_hollow_slice_is_as_long_as_the_real_one_but_for_the_tokens(tmp_path: Path) -> None:
    facts = inspect_model(DEMO_MODEL)
    cuts = (facts.n_layers // 2,)
    (hollow,) = hollow_slices(DEMO_MODEL, [(cuts, 0)])
    (real,) = write_stages(DEMO_MODEL, tmp_path, cuts, [0])
    assert real.read_bytes().startswith(hollow.header)
    assert hollow.size_bytes == real.stat().st_size
    assert hollow.layer_bytes == sum(facts.layer_bytes[: cuts[0]])
    assert hollow.head_bytes == 0


def test_a_failed_measurement_is_reported(tmp_path: Path) -> None:
    (tmp_path / "cache" / "survey-00000000").mkdir(parents=True)  # of one that was killed
    (tmp_path / "cache" / "survey-00000000" / LOCK).touch()
    report = surveyed([pb.SurveySlice(header=b"no model", size_bytes=64, budget_ms=10)], tmp_path / "cache")
    assert "not a GGUF file" in report.failure.message
    assert not report.slices


def test_a_measurement_that_hangs_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(survey_module, "SLICE_S", 0.0)
    hangs = code_command("import signal; signal.pause()")
    monkeypatch.setattr(survey_module, "module_command", lambda *_: hangs)
    report = surveyed([pb.SurveySlice(header=b"never read", size_bytes=64, budget_ms=1)], tmp_path / "cache")
    assert "longer than 0 s" in report.failure.message
