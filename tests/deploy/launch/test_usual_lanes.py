"""The default number of lanes for a model whose lanes keep a state."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from relayline.coordinator.model.inspection import inspect_model
from relayline.coordinator.planner import memory
from relayline.coordinator.planner.memory import usual_lanes
from relayline.deploy.cli.model import inspect_command
from relayline.deploy.cli.plan import make_plan
from relayline.deploy.cli.planned import planned_manifest
from relayline.deploy.doctor.plan import needed_memory_bytes
from relayline.deploy.launch.lanes import with_usual_lanes
from relayline.deploy.launch.prepare import override
from relayline.deploy.manifest import load_manifest
from relayline.deploy.manifest.smallest import smallest_manifest
from relayline.wire.common.units import GIB, MIB
from tests.support.tiny_models import make_tiny


def test_states_of_all_lanes_are_bounded_where_nobody_says() -> None:
    assert usual_lanes((0, 0), 32) == 32, "of cells, each lane takes as many as it uses"
    assert usual_lanes((0, 60 * MIB), 32) == 32
    assert usual_lanes((155 * MIB // 48,) * 48, 32) == 13, "a hybrid of 27B"
    assert usual_lanes((GIB,), 32) == 4, "fewer make no pipeline"
    assert usual_lanes((GIB,), 2) == 2


@pytest.fixture(name="model")
def large_states(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A hybrid whose states take the allowed memory with five lanes."""
    path = make_tiny("qwen35", tmp_path / "model.gguf", tokenizer=True)
    monkeypatch.setattr(memory, "LANE_STATES_BYTES", 5 * sum(inspect_model(path).state_bytes_per_lane))
    return path


def test_a_model_with_large_states_gets_fewer_lanes(model: Path) -> None:
    usual, lowered = smallest_manifest(model), planned_manifest(str(model), ())
    assert (usual.engine.n_lanes, lowered.engine.n_lanes) == (32, 5)
    plan = make_plan(lowered)
    assert plan.instance.load.n_lanes == 5
    assert any("so there are 5 lanes unless a setting says more" in note for note in plan.notes)
    assert (needed_memory_bytes(lowered) or 0) < (needed_memory_bytes(usual) or 0)


@pytest.mark.parametrize(
    ("lanes_line", "n_lanes"),
    [("", 5), ("    lanes: 32\n", 32), ("    tokens: 512\n", 5), ("    rewindRows: 7\n", 4)],
)
def test_a_manifests_number_of_lanes_stands(lanes_line: str, n_lanes: int, model: Path) -> None:
    text = (
        "apiVersion: relayline.dev/v1alpha1\nkind: Pipeline\nmetadata: {name: p}\nspec:\n  model: {path: model.gguf}\n"
    )
    manifest = model.parent / "pipeline.yaml"
    manifest.write_text(text + (f"  context:\n{lanes_line}" if lanes_line else ""))
    assert with_usual_lanes(load_manifest(manifest)).engine.n_lanes == n_lanes


def test_earlier_states_are_memory_of_every_lane(model: Path) -> None:
    needed = []
    for n_rows in (0, 3):
        manifest = override(smallest_manifest(model), {"context.lanes": 8, "context.rewindRows": n_rows})
        needed.append(needed_memory_bytes(manifest) or 0)
    each = sum(inspect_model(model).state_bytes_per_lane)
    assert needed[1] - needed[0] == pytest.approx(3 * each * 9, rel=0.2), "eight lanes, and a spare one of each stage"


def test_inspect_says_whether_drafts_can_be_had(model: Path, tmp_path: Path) -> None:
    other = make_tiny("granitehybrid", tmp_path / "other.gguf")
    for path, can, line in ((model, True, "--rewind-rows N"), (other, False, "cannot be rewound")):
        result = CliRunner().invoke(inspect_command, [str(path)])
        assert line in result.output
        result = CliRunner().invoke(inspect_command, [str(path), "--json"])
        assert json.loads(result.stdout)["rewinds_states"] is can


def test_a_model_that_is_not_here_or_attends_alone_changes_nothing(tmp_path: Path) -> None:
    absent = smallest_manifest(tmp_path / "absent.gguf")
    assert with_usual_lanes(absent) is absent
    plain = smallest_manifest(make_tiny("llama", tmp_path / "model.gguf"))
    assert with_usual_lanes(plain) is plain
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF")
    assert with_usual_lanes(smallest_manifest(broken)).engine.n_lanes == 32


def test_inspect_tells_the_number(model: Path) -> None:
    assert json.loads(CliRunner().invoke(inspect_command, [str(model), "--json"]).stdout)["usual_lanes"] == 5
    text = " ".join(CliRunner().invoke(inspect_command, [str(model)]).stdout.split())
    assert "5 lanes by default" in text
