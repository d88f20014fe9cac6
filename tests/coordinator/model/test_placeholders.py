"""Slices that begin with placeholders (kimi-k3): what they hold, and what plans count of that."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from relayline.coordinator.model.gguf_file import open_model
from relayline.coordinator.model.inspection import inspect_model
from relayline.coordinator.model.pipeline_file import load_pipeline
from relayline.coordinator.model.placeholders import NARROW
from relayline.coordinator.model.split import split_model
from relayline.coordinator.planner.instance import Gpu, Load, Offload
from relayline.coordinator.planner.memory import stage_memory
from relayline.deploy.cli.model import inspect_command
from relayline.deploy.planning.shapes import shape_of
from relayline.deploy.testing.engines import engine_config
from relayline.stage.engine.artifact import open_artifact
from relayline.stage.engine.lane_state import read_lane, read_partial
from relayline.stage.engine.native import NativeEngine
from relayline.wire.common.errors import ArtifactError, CutError
from relayline.wire.model_files.gguf_header import read_header
from tests.support.tiny_hybrids import BLOCK_LAYERS, K3_ATTENDING, K3_LAYERS
from tests.support.tiny_models import make_tiny
from tests.support.tiny_shapes import N_EMBD, N_FF

CUTS = (4, 5, 7)


@pytest.fixture(name="split")
def split_fixture(tmp_path: Path) -> Path:
    split_model(make_tiny("kimi-k3", tmp_path / "model.gguf"), tmp_path / "out", cuts=CUTS)
    return tmp_path / "out"


def n_blocks(layer: int) -> int:
    """How many blocks begin before a layer."""
    return len(range(0, layer, BLOCK_LAYERS))


def test_layers_keep_their_numbers_behind_zeros(split: Path) -> None:
    whole = open_model(split.parent / "model.gguf")
    for index, (start, end) in enumerate(itertools.pairwise((0, *CUTS, K3_LAYERS))):
        path = split / f"stage-{index}.gguf"
        header, data = read_header(path), path.read_bytes()
        assert header.value("kimi-k3.block_count") == open_artifact(path).file_layers == end
        heads = header.value("kimi-k3.attention.head_count_kv")
        assert isinstance(heads, tuple)
        assert heads[start:] == tuple(K3_ATTENDING[start:end])
        assert set(heads) == {0, 1}, "there are layers of both kinds"
        for tensor in header.tensors:
            if not tensor.name.startswith("blk."):
                continue
            found = data[tensor.offset : tensor.offset + tensor.size_bytes]
            if int(tensor.name.split(".")[1]) < start:
                assert not any(found)
                assert "exps" not in tensor.name
            else:
                source = whole.tensors[tensor.name]
                with whole.files[0].path.open("rb") as file:
                    file.seek(source.offset)
                    assert found == file.read(source.size_bytes)


@pytest.mark.parametrize(
    ("name", "start", "lead", "width"),
    [("kimi-k3", 5, 5, NARROW), ("kimi-k3:dense", 5, 6, N_FF), ("kimi-k3:dense", 7, 7, NARROW)],
)
def test_placeholders_are_as_narrow_as_the_slices_own_dense_layers_allow(
    name: str, start: int, lead: int, width: int, tmp_path: Path
) -> None:
    split_model(make_tiny(name, tmp_path / "model.gguf"), tmp_path / "out", cuts=(start,))
    header = read_header(tmp_path / "out" / "stage-1.gguf")
    found = [header.value(f"kimi-k3.{key}") for key in ("leading_dense_block_count", "feed_forward_length")]
    assert found == [lead, width]


def test_the_first_stage_alone_needs_layers_of_both_kinds(tmp_path: Path) -> None:
    model = make_tiny("kimi-k3", tmp_path / "model.gguf")
    assert inspect_model(model).legal_cuts == tuple(range(4, K3_LAYERS))
    needs = "the first stage needs a layer with a recurrent state and one that attends; legal cuts: 4-9"
    with pytest.raises(CutError, match=f"cut 3 is not legal: {needs}"):
        split_model(model, tmp_path / "out", cuts=(3,))


def test_each_boundary_has_a_row_and_the_inputs_of_all_blocks_before_it(split: Path) -> None:
    edges = (0, *CUTS)
    widths = [(stage.row_width, stage.sideband_values) for stage in load_pipeline(split).stages]
    assert widths == [(N_EMBD * (1 + n_blocks(edge)), N_EMBD * n_blocks(edge)) for edge in edges]
    stages = [open_artifact(split / f"stage-{index}.gguf") for index in range(len(edges))]
    assert [stage.width_in for stage in stages[1:]] == [stage.width_out for stage in stages[:-1]]
    assert stages[-1].width_out == N_EMBD


def test_a_file_whose_widths_contradict_its_blocks_is_refused(split: Path) -> None:
    path = split / "stage-1.gguf"
    data = path.read_bytes()
    key = b"relayline.blocks.layers\x04\x00\x00\x00"
    assert key in data
    path.write_bytes(data.replace(key + bytes([BLOCK_LAYERS]), key + bytes([1])))
    with pytest.raises(ArtifactError, match=f"rows in have {3 * N_EMBD} values, not {N_EMBD} and {4 * N_EMBD} more"):
        open_artifact(path)


@pytest.mark.parametrize("index", range(1, 4))
def test_plans_count_the_memory_that_placeholders_take(index: int, split: Path) -> None:
    facts = inspect_model(split.parent / "model.gguf")
    start, end = ((0, *CUTS, K3_LAYERS)[index + at] for at in (0, 1))
    path = split / f"stage-{index}.gguf"
    held = sum(tensor.size_bytes for tensor in read_header(path).tensors if tensor.name.startswith("blk."))
    shape, load = shape_of(facts), Load(ctx_tokens=256, n_lanes=2, kv_layout="unified")
    memory = stage_memory(shape, load, start, end)
    assert memory.weights_bytes == held + (facts.head_bytes if end == K3_LAYERS else 0)
    with NativeEngine(engine_config(path, 2, 64, max_rows=8)) as engine:
        engine.decode(1)
        state, whole = (read(engine._context, 0) for read in (read_partial, read_lane))
    assert state is not None
    assert whole is not None
    before = shape.before(start, end)
    states = sum(facts.state_bytes_per_lane[start:end]) + before.state_bytes
    cells = sum(facts.kv_bytes_per_token[start:end]) + before.kv_bytes
    assert 0 <= state.nbytes - states < 64 * (end + 1)
    assert 0 <= whole.nbytes - state.nbytes - cells < 64 * (end + 1)
    on_gpu = stage_memory(shape, load, start, end, Offload(Gpu("gpu")))
    assert on_gpu.gpu is not None
    assert on_gpu.gpu.weights_bytes == memory.weights_bytes - before.weights_bytes
    assert on_gpu.weights_bytes == before.weights_bytes, "they stay in the host's memory"
    assert on_gpu.kv_bytes >= before.state_bytes * 3


def test_inspect_says_what_travels_and_what_a_later_stage_holds_besides(split: Path) -> None:
    model = str(split.parent / "model.gguf")
    found = CliRunner().invoke(inspect_command, [model])
    assert found.exit_code == 0
    lines = " ".join(found.output.split())
    assert f"beside rows the input of every block of {BLOCK_LAYERS} layers, {N_EMBD} values each" in lines
    assert "placeholders one for each earlier layer, with weights of" in lines
    told = json.loads(CliRunner().invoke(inspect_command, [model, "--json"]).output)
    assert told["block_layers"] == BLOCK_LAYERS
    assert len(told["placeholder_bytes"]) == K3_LAYERS
    assert told["placeholder_bytes"][0] == 0 < told["placeholder_bytes"][1]
