"""Metadata of models with recurrent states, and what their slices state."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from relayline.coordinator.model.family import Metadata
from relayline.coordinator.model.family_rules import state_values
from relayline.coordinator.model.gguf_file import open_model
from relayline.coordinator.model.inspection import inspect_model
from relayline.coordinator.model.split import split_model
from relayline.coordinator.planner.instance import Load
from relayline.coordinator.planner.memory import stage_memory
from relayline.deploy.cli.model import inspect_command
from relayline.deploy.planning.shapes import shape_of
from relayline.deploy.testing.reference import ReferenceModel
from relayline.stage.engine.lane_state import read_partial
from relayline.wire.common.checkpoints import CHECKPOINT_BYTES_MAX, CHECKPOINTS_PER_LANE_MAX
from relayline.wire.common.errors import CutError
from tests.support.tiny_hybrids import HYBRIDS
from tests.support.tiny_models import make_tiny


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("qwen35", "rrrarrra"),
        ("qwen35:mtp", "rrrarrra"),
        ("nemotron_h", "rfrafrafrf"),
        ("lfm2", "rarrarar"),
        ("falcon-h1", "bbbbb"),
        ("mamba2", "rrrrr"),
        ("kimi-linear", "rrrarrra"),
        ("llama", ""),
    ],
)
def test_kinds_of_layers(name: str, kinds: str, tmp_path: Path) -> None:
    facts = inspect_model(make_tiny(name, tmp_path / "model.gguf"))
    assert facts.kinds == kinds
    for kind, kv_bytes, state_bytes in zip(
        kinds, facts.kv_bytes_per_token, facts.state_bytes_per_lane, strict=bool(kinds)
    ):
        assert (kv_bytes > 0, state_bytes > 0) == (kind in "ab", kind in "rb")


@pytest.mark.parametrize("name", [name for name in HYBRIDS if ":" not in name])
def test_the_bytes_of_a_state_are_those_that_llama_cpp_writes(name: str, tmp_path: Path) -> None:
    """It also writes a head, and a few numbers for each layer."""
    model = make_tiny(name, tmp_path / "model.gguf")
    facts = inspect_model(model)
    with ReferenceModel(model, n_ctx=256, n_seq_max=1) as reference:
        reference.decode([1, 2, 3], range(3), [0] * 3, [True] * 3)
        state = read_partial(reference._context, 0)
    assert state is not None
    assert 0 < state.nbytes - sum(facts.state_bytes_per_lane) < 64 * (facts.n_layers + 1)


def test_slices_state_their_layers_kinds(tmp_path: Path) -> None:
    """Also if the file has only an interval, from its first layer on. The last slice keeps the prediction layer."""
    for name in ("qwen35", "qwen35:mtp"):
        model = make_tiny(name, tmp_path / f"{name}.gguf")
        pipeline = split_model(model, tmp_path / name, cuts=(5,))
        stages = [open_model(tmp_path / name / stage.file) for stage in pipeline.stages]
        kinds = [stage.value("qwen35.attention.recurrent_layers") for stage in stages]
        more = (False,) * name.endswith(":mtp")
        assert kinds == [(True, True, True, False, True), (True, True, False, *more)]


def test_a_stage_of_one_kind_is_refused(tmp_path: Path) -> None:
    model = make_tiny("qwen35", tmp_path / "model.gguf")
    with pytest.raises(CutError, match="only together with one that attends, and the reverse; legal cuts: 4-6"):
        split_model(model, tmp_path / "out", cuts=(7,))


def test_inspect_shows_kinds_and_states(tmp_path: Path) -> None:
    model = make_tiny("qwen35", tmp_path / "model.gguf")
    text = CliRunner().invoke(inspect_command, [str(model)]).stdout
    assert "layer kinds     6 recurrent, 2 attention" in text
    assert "state per lane" in text
    facts = json.loads(CliRunner().invoke(inspect_command, [str(model), "--json"]).stdout)
    assert facts["layer_kinds"] == ["recurrent", "recurrent", "recurrent", "attention"] * 2
    each = 4 * (3 * (64 + 2 * 2 * 16) + 16 * 64)  # f32: three columns of the convolution, and the state itself
    assert facts["state_bytes_per_lane"] == [each, each, each, 0] * 2
    assert facts["kv_bytes_per_token_total"] == 2 * (2 * (16 + 16) * 2)


def test_plans_count_states_for_every_lane_and_checkpoints_up_to_their_bound(tmp_path: Path) -> None:
    facts = inspect_model(make_tiny("qwen35", tmp_path / "model.gguf"))
    shape, one = shape_of(facts), sum(facts.state_bytes_per_lane[:4])
    few, many = (stage_memory(shape, Load(n_lanes=n, kv_layout="per-lane"), 0, 4).kv_bytes for n in (4, 8))
    assert many - few - 4 * 2_048 * sum(facts.kv_bytes_per_token[:4]) == 4 * one * (1 + CHECKPOINTS_PER_LANE_MAX)
    shared = stage_memory(shape, Load(n_lanes=4), 0, 4).kv_bytes
    assert shared - few == one + 256 * sum(facts.kv_bytes_per_token[:4]), "one lane more, for padding"
    n_lanes = 2 * CHECKPOINT_BYTES_MAX // (one * CHECKPOINTS_PER_LANE_MAX)
    more = [stage_memory(shape, Load(n_lanes=n, kv_layout="per-lane"), 0, 4).kv_bytes for n in (n_lanes, n_lanes + 1)]
    assert more[1] - more[0] == one + 2_048 * sum(facts.kv_bytes_per_token[:4])


@pytest.mark.parametrize(
    ("values", "n_values"),
    [
        ({"shortconv.l_cache": 3}, 2 * 64),  # a short convolution keeps the rows before the newest
        ({"ssm.conv_kernel": 4, "ssm.inner_size": 128, "ssm.state_size": 16}, 3 * 128 + 16 * 128),  # Mamba
        ({"ssm.conv_kernel": 4, "kda.head_dim": 8}, 3 * 3 * 32 + 8 * 32),  # Kimi: convolutions of queries, keys, values
    ],
)
def test_a_state_has_the_rows_that_a_convolution_reads_again(values: dict[str, int], n_values: int) -> None:
    facts = Metadata({"embedding_length": 64, "attention.head_count": 4, **values}, (), 2, 100)
    assert state_values(facts) == n_values
