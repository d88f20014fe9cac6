"""Values that travel with rows, and tables looked up by token id: a split states them, and they reach their layers."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path

import gguf
import numpy as np
import pytest
from click.testing import CliRunner

from relayline.coordinator.model.inspection import inspect_model
from relayline.coordinator.model.pipeline_file import load_pipeline
from relayline.coordinator.model.split import split_model
from relayline.coordinator.planner.instance import Host, Instance, Load, Machine
from relayline.coordinator.planner.memory import stage_memory
from relayline.coordinator.planner.speed import Speed
from relayline.deploy.cli.model import inspect_command
from relayline.deploy.planning.shapes import shape_of
from relayline.stage.engine import row_parts
from relayline.stage.engine.artifact import open_artifact
from relayline.stage.engine.embedding import EmbeddingTable
from relayline.stage.engine.layer_inputs import ROWS_AT_ONCE
from relayline.stage.engine.micro_batches import Cut
from relayline.stage.inbound import check_fit, hello_of
from relayline.wire.common.errors import ArtifactError, CutError, HandshakeError, ModelFileError, ProtocolError
from relayline.wire.pb.relayline.v1 import relayline_pb2 as pb
from tests.support.family_check import check
from tests.support.tiny_families import RECIPES
from tests.support.tiny_later_families import GEMMA4_E_LAYERS, INPUT_WIDTH
from tests.support.tiny_models import make_tiny
from tests.support.tiny_shapes import N_EMBD, N_EXPERTS
from tests.support.tiny_wide import N_HASHED, STREAMS

E2B, HASHED = "gemma4:e2b", "deepseek4:hash"
EACH = INPUT_WIDTH * GEMMA4_E_LAYERS


def test_each_boundary_states_its_sideband_values(tmp_path: Path) -> None:
    split_model(make_tiny(E2B, tmp_path / "model.gguf"), tmp_path / "out", cuts=(2, 6))
    values_beside = [EACH, INPUT_WIDTH * 10, INPUT_WIDTH * 6]
    widths = [(stage.row_width, stage.sideband_values) for stage in load_pipeline(tmp_path / "out").stages]
    assert widths == [(N_EMBD + values, values) for values in values_beside]
    stages = [open_artifact(tmp_path / "out" / f"stage-{index}.gguf") for index in range(3)]
    edges = [*(N_EMBD + values for values in values_beside), N_EMBD]
    assert [(stage.width_in, stage.width_out) for stage in stages] == list(itertools.pairwise(edges))
    hello = hello_of(pb.ConfigureRequest(wire_dtype=pb.DTYPE_F16), stages[0])
    check_fit(hello, stages[1])
    hello.n_embd = N_EMBD
    with pytest.raises(HandshakeError, match=f"width is {N_EMBD}, here {N_EMBD + values_beside[1]}"):
        check_fit(hello, stages[1])


def test_ids_of_tokens_end_at_stage_0(tmp_path: Path) -> None:
    split_model(make_tiny(HASHED, tmp_path / "model.gguf"), tmp_path / "out", cuts=(3,))
    stages = load_pipeline(tmp_path / "out").stages
    looked_up = 2 * N_HASHED
    assert [(stage.row_width, stage.sideband_values) for stage in stages] == [
        (N_EMBD + looked_up, looked_up),
        (STREAMS * N_EMBD, 0),
    ]
    assert open_artifact(tmp_path / "out" / "stage-1.gguf").hashed is None


def test_plans_count_sidebands_and_the_tables_of_stage_0(tmp_path: Path) -> None:
    model = make_tiny(E2B, tmp_path / "model.gguf")
    facts = inspect_model(model)
    tables = 4 * (facts.n_vocab * EACH + N_EMBD * EACH + INPUT_WIDTH)
    assert facts.embedding_bytes == facts.head_bytes + tables
    shape = shape_of(facts)
    first, other = (stage_memory(shape, Load(), *edges).weights_bytes for edges in ((0, 2), (2, 4)))
    assert first - sum(facts.layer_bytes[:2]) == facts.embedding_bytes
    assert other == sum(facts.layer_bytes[2:4])
    speed = Speed(((1, 1e6),), ((1, 1e6),))
    hosts = tuple(Host(f"stage-{index}", Machine(f"m{index}", 4), 1, speed) for index in range(2))
    instance = Instance(shape, hosts, Load(wire_dtype="f16"))
    one, two = (instance.link_bytes(rows, ((0, 6), (6, 12)))[1] for rows in (1, 2))
    early = instance.link_bytes(1, ((0, 2), (2, 12)))[1]
    assert two - one >= 2 * (N_EMBD + 6 * INPUT_WIDTH)
    assert early - one == 2 * 4 * INPUT_WIDTH, "four more layers are still to come"


def test_layers_that_share_cells_hold_none(tmp_path: Path) -> None:
    facts = inspect_model(make_tiny(E2B, tmp_path / "model.gguf"))
    assert [size > 0 for size in facts.kv_bytes_per_token] == [True] * 8 + [False] * 4


@pytest.mark.parametrize(
    ("name", "cut", "reason"),
    [
        (E2B, 7, "its last 4 layers attend to the cells of the two before them, so these stay on one stage"),
        (E2B, 9, "legal cuts: 2-6"),
        (HASHED, 2, "its first 3 layers look their experts up by token id, and token ids end at stage 0"),
    ],
)
def test_cuts_through_connected_layers_are_refused(name: str, cut: int, reason: str, tmp_path: Path) -> None:
    with pytest.raises(CutError, match=reason):
        split_model(make_tiny(name, tmp_path / "model.gguf"), tmp_path / "out", cuts=(cut,))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", [E2B, HASHED])
def test_inspect_shows_sidebands(name: str, tmp_path: Path) -> None:
    model = str(make_tiny(name, tmp_path / "model.gguf"))
    facts = json.loads(CliRunner().invoke(inspect_command, [model, "--json"]).stdout)
    text = " ".join(CliRunner().invoke(inspect_command, [model]).stdout.split())
    if name == E2B:
        assert facts["layer_inputs"] == INPUT_WIDTH
        assert facts["row_widths"][:2] == [N_EMBD + EACH, N_EMBD + EACH - INPUT_WIDTH]
        assert "beside rows 32 values for each later layer, made on stage 0" in text
        assert f"up to {N_EMBD + EACH - INPUT_WIDTH} in rows between stages" in text
        assert "of it also the head" in text
    else:
        assert facts["hash_layers"] == N_HASHED
        assert "by token id the experts of the first 3 layers, which are all on stage 0" in text


@pytest.mark.parametrize("quant", ["f16", "q8_0", "q4_0"])
@pytest.mark.parametrize("name", [E2B, HASHED])
def test_quantised_tables_are_as_exact(name: str, quant: str, tmp_path: Path) -> None:
    check(make_tiny(name, tmp_path / "model.gguf", quant=quant), [(4,)], tmp_path)


def test_a_stage_that_took_the_inputs_of_other_layers_would_show(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = row_parts.RowParts.__init__

    def shifted(self: row_parts.RowParts, *arguments: object) -> None:
        made(self, *arguments)  # type: ignore[arg-type]
        own = self._own
        self._own = slice(own.start + INPUT_WIDTH, own.stop + INPUT_WIDTH) if own.stop < self._passed.stop else own

    monkeypatch.setattr(row_parts.RowParts, "__init__", shifted)
    with pytest.raises(AssertionError, match="cuts"):
        check(make_tiny(E2B, tmp_path / "model.gguf"), [(4,)], tmp_path)


def test_other_experts_than_the_tokens_own_would_show(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill = row_parts.RowParts.fill

    def one_further(self: row_parts.RowParts, rows: np.ndarray, cut: Cut | None) -> None:
        fill(self, rows, cut)
        for entry in self._experts:
            entry.source[:] = (entry.source + 1) % N_EXPERTS

    monkeypatch.setattr(row_parts.RowParts, "fill", one_further)
    with pytest.raises(AssertionError, match="cuts"):
        check(make_tiny(HASHED, tmp_path / "model.gguf"), [(4,)], tmp_path)


def test_inputs_of_more_rows_than_are_computed_at_once(tmp_path: Path) -> None:
    split_model(make_tiny(E2B, tmp_path / "model.gguf"), tmp_path / "out", cuts=(4,))
    table = EmbeddingTable(open_artifact(tmp_path / "out" / "stage-0.gguf"))
    tokens = np.arange(2 * ROWS_AT_ONCE + 3, dtype=np.int32) % table.n_rows
    every = np.empty((tokens.size, table.width), np.float32)
    table.lookup(tokens, every)
    alone = np.empty((1, table.width), np.float32)
    for row in (0, ROWS_AT_ONCE, tokens.size - 1):
        table.lookup(tokens[row : row + 1], alone)
        np.testing.assert_allclose(every[row], alone[0], atol=1e-5)
    assert np.abs(every[0] - every[1]).max() > 0.1


def test_rows_of_images_take_the_inputs_of_the_padding_token(tmp_path: Path) -> None:
    """A row that equals token 0's has the inputs of token 0, and any other row the same ones by token."""
    split_model(make_tiny(E2B, tmp_path / "model.gguf"), tmp_path / "out", cuts=(4,))
    artifact = open_artifact(tmp_path / "out" / "stage-0.gguf")
    table = EmbeddingTable(artifact)
    looked_up, taken = np.empty((2, table.width), np.float32), np.empty((2, table.width), np.float32)
    table.lookup(np.array([0, 5], np.int32), looked_up)
    table.take(looked_up[:, :N_EMBD], taken)
    np.testing.assert_array_equal(taken[0], looked_up[0])
    np.testing.assert_array_equal(taken[1, :N_EMBD], looked_up[1, :N_EMBD])
    assert np.abs(taken[1] - looked_up[1]).max() > 0.1
    assert artifact.takes_rows


def test_layers_that_need_tokens_take_no_rows(tmp_path: Path) -> None:
    split_model(make_tiny(HASHED, tmp_path / "model.gguf"), tmp_path / "out", cuts=(3,))
    artifact = open_artifact(tmp_path / "out" / "stage-0.gguf")
    assert not artifact.takes_rows
    table = EmbeddingTable(artifact)
    with pytest.raises(ProtocolError, match=f"rows of {N_EMBD} values came"):
        table.take(np.zeros((1, N_EMBD), np.float32), np.zeros((1, table.width), np.float32))


def test_tables_of_other_shapes_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    wrong = {"per_layer_model_proj.weight": (32, N_EMBD)}
    recipe = RECIPES[E2B]
    for tops, problem in (
        ({**recipe.tops, **wrong}, r"per_layer_model_proj.weight has shape \[64, 32\], not \[64, 384\]"),
        ({k: v for k, v in recipe.tops.items() if "proj_norm" not in k}, "per_layer_proj_norm.weight is missing"),
    ):
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(RECIPES, E2B, dataclasses.replace(recipe, tops=tops))
            model = make_tiny(E2B, tmp_path / "model.gguf")
        with pytest.raises(ModelFileError, match=problem):
            split_model(model, tmp_path / "out", cuts=(4,))
        assert not (tmp_path / "out").exists()


def test_an_artifact_without_a_place_for_sidebands_is_refused(tmp_path: Path) -> None:
    split_model(make_tiny(E2B, tmp_path / "model.gguf"), tmp_path / "out", cuts=(4,))
    path = tmp_path / "out" / "stage-1.gguf"
    field = gguf.GGUFReader(path).fields["relayline.layer_inputs.width"]
    offset = field.offset + sum(part.nbytes for part in field.parts[:-1])
    content = bytearray(path.read_bytes())
    content[offset : offset + 4] = (INPUT_WIDTH - 1).to_bytes(4, "little")
    path.write_bytes(content)
    with pytest.raises(ArtifactError, match="rows in have 320 values, not 64 and 248 more; split the model"):
        open_artifact(path)
