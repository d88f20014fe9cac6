"""Rows that are wider than the model, or enter the graph in its middle: a split states it and stages check it."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from relayline.coordinator.model.families import FAMILIES
from relayline.coordinator.model.family import Metadata
from relayline.coordinator.model.family_rules import deepseek4_kv_values, deepseek4_states
from relayline.coordinator.model.inspection import inspect_model
from relayline.coordinator.model.pipeline_file import load_pipeline
from relayline.coordinator.model.split import split_model
from relayline.coordinator.planner.instance import Host, Instance, Load, Machine
from relayline.coordinator.planner.speed import Speed
from relayline.deploy.cli.model import inspect_command
from relayline.deploy.planning.shapes import shape_of
from relayline.deploy.testing.engines import engine_config
from relayline.deploy.testing.reference import ReferenceModel
from relayline.stage.engine import capture
from relayline.stage.engine.artifact import open_artifact
from relayline.stage.engine.native import NativeEngine
from relayline.stage.inbound import check_fit, hello_of
from relayline.wire.common.errors import CutError, HandshakeError, ModelFileError, NativeError, UsageError
from relayline.wire.pb.relayline.v1 import relayline_pb2 as pb
from tests.support.chain import Chain
from tests.support.family_check import ERROR_OTHER_ROWS_MAX, check
from tests.support.tiny_models import make_tiny
from tests.support.tiny_shapes import N_EMBD
from tests.support.tiny_wide import STREAMS

LONG = 150  # tokens: more than one compressed cell represents


def test_splitter_and_stages_name_the_same_families() -> None:
    assert {name for name, family in FAMILIES.items() if family.enters_inside} == set(capture._ENTRIES)


def test_each_boundary_says_how_wide_its_rows_are(tmp_path: Path) -> None:
    split_model(make_tiny("hy_v4", tmp_path / "model.gguf"), tmp_path / "out", cuts=(2, 4))
    assert [stage.row_width for stage in load_pipeline(tmp_path / "out").stages] == [N_EMBD, *[STREAMS * N_EMBD] * 2]
    stages = [open_artifact(tmp_path / "out" / f"stage-{index}.gguf") for index in range(3)]
    wide = STREAMS * N_EMBD
    assert [(stage.width_in, stage.width_out) for stage in stages] == [(N_EMBD, wide), (wide, wide), (wide, N_EMBD)]
    hello = hello_of(pb.ConfigureRequest(wire_dtype=pb.DTYPE_F16), stages[0])
    assert hello.n_embd == wide
    check_fit(hello, stages[1])
    hello.n_embd = N_EMBD
    with pytest.raises(HandshakeError, match="width is 64, here 256"):
        check_fit(hello, stages[1])


def test_a_plan_counts_the_bytes_of_wide_rows(tmp_path: Path) -> None:
    shape = shape_of(inspect_model(make_tiny("hy_v4", tmp_path / "model.gguf")))
    speed = Speed(((1, 1e6),), ((1, 1e6),))
    hosts = tuple(Host(f"stage-{index}", Machine(f"m{index}", 4), 1, speed) for index in range(2))
    instance = Instance(shape, hosts, Load(wire_dtype="f16"))
    one, two = (instance.link_bytes(rows, ((0, 2), (2, 6)))[1] for rows in (1, 2))
    assert two - one >= 2 * STREAMS * N_EMBD
    assert instance.link_bytes(1)[1] == one, "without a cut, the widest"


def test_rows_wider_than_the_wire_takes_are_refused(tmp_path: Path) -> None:
    model = make_tiny("hy_v4", tmp_path / "model.gguf", extra_values={"hyper_connection.count": 2048})
    with pytest.raises(ModelFileError, match="pass on rows of 131072 values; the limit is 65536"):
        inspect_model(model)


@pytest.mark.parametrize(
    ("entry", "message"), [("nothing", "took 0 floats but got 64"), ("ffn_up-0", "holds more values")]
)
def test_a_graph_that_takes_no_rows_there_is_refused_at_load(
    entry: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    split_model(make_tiny("bloom", tmp_path / "model.gguf"), tmp_path / "out", cuts=(2,))
    monkeypatch.setitem(capture._ENTRIES, "bloom", entry)
    with pytest.raises(NativeError, match=message):
        NativeEngine(engine_config(tmp_path / "out" / "stage-1.gguf", n_lanes=1, ctx_tokens=32, max_rows=4))


@pytest.mark.parametrize("name", ["bloom", "muse-glimmer"])
def test_rows_that_enter_as_embeddings_would_be_normed_once_more(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(capture._ENTRIES, name)
    with pytest.raises(AssertionError, match="cuts"):
        check(make_tiny(name, tmp_path / "model.gguf"), [(3,)], tmp_path)


def test_more_rows_are_never_written_than_came_in(tmp_path: Path) -> None:
    split_model(make_tiny("bloom", tmp_path / "model.gguf"), tmp_path / "out", cuts=(2,))
    with NativeEngine(engine_config(tmp_path / "out" / "stage-1.gguf", n_lanes=1, ctx_tokens=32, max_rows=4)) as engine:
        written = engine._capture
        assert written is not None
        written.begin = lambda n_rows: type(written).begin(written, n_rows - 1)  # type: ignore[method-assign]
        engine.positions[:3] = range(3)
        with pytest.raises(NativeError, match="holds more values than the step has"):
            engine.decode(3)
        assert engine.lane_tokens(0) == 0


def test_deepseek4_compresses_the_context_of_two_lanes(tmp_path: Path) -> None:
    """Each lane reads enough to fill cells of 128 tokens too; the lanes' rows are mixed in each step."""
    model = make_tiny("deepseek4", tmp_path / "model.gguf")
    facts = inspect_model(model)
    fed = [int(token) for token in np.random.default_rng(5).integers(0, facts.n_vocab, LONG)]
    pipeline = split_model(model, tmp_path / "out", cuts=(2, 4))
    edges = (0, 70, 140, LONG)
    steps = [fed[start:end] for start, end in itertools.pairwise(edges)]
    with Chain(tmp_path / "out", pipeline, lanes=(2, 0), ctx_tokens=256, max_rows=80, kv_layout="per-lane") as chain:
        found = np.concatenate([chain.step(step).reshape(2, len(step), -1) for step in steps], axis=1)
    with ReferenceModel(model, n_ctx=256, n_seq_max=1, flash_attn=chain.flash_attn) as reference:
        expected = np.concatenate(
            [
                reference.decode(step, range(start, start + len(step)), [0] * len(step), [True] * len(step))
                for start, step in zip(edges, steps, strict=False)
            ]
        )
    assert np.abs(found - expected).max() / expected.std() < ERROR_OTHER_ROWS_MAX


def test_deepseek4_stages_have_a_layer_that_compresses_four_tokens(tmp_path: Path) -> None:
    model = make_tiny("deepseek4", tmp_path / "model.gguf")
    with pytest.raises(CutError, match="without one that compresses four tokens"):
        split_model(model, tmp_path / "out", cuts=(1,))
    facts = inspect_model(model)
    assert facts.kv_bytes_per_token[:3] == (2 * 32, 2 * (32 + (32 + 64) // 4), 2 * 32)
    assert facts.state_bytes_per_lane[:3] == (0, 4 * 2 * 2 * 8 * (32 + 64), 4 * 2 * 128 * 32)
    split_model(model, tmp_path / "out", cuts=(4,))
    config = engine_config(tmp_path / "out" / "stage-0.gguf", n_lanes=1, ctx_tokens=32, max_rows=4, kv_layout="unified")
    with pytest.raises(UsageError, match="deepseek4 gives each lane its own cells; use --kv-layout per-lane"):
        NativeEngine(config)


def test_biases_for_images_are_left_out_of_slices(tmp_path: Path) -> None:
    """Rows that are given as embeddings look like an image to llama.cpp."""
    tensors = {f"blk.{layer}.exp_probs_b_vl.bias": np.full(4, [9, -9, 0, 0], np.float32) for layer in range(8)}
    check(make_tiny("deepseek4", tmp_path / "model.gguf", extra_tensors=tensors), [(4,)], tmp_path)


def test_inspect_shows_row_widths_and_lane_states(tmp_path: Path) -> None:
    model = str(make_tiny("deepseek4", tmp_path / "model.gguf"))
    lines = CliRunner().invoke(inspect_command, [model]).stdout
    assert "width           64, 256 in rows between stages" in lines
    assert "state per lane" in lines
    facts = json.loads(CliRunner().invoke(inspect_command, [model, "--json"]).stdout)
    assert facts["row_widths"] == [N_EMBD, *[STREAMS * N_EMBD] * 7]
    assert facts["state_bytes_per_lane_total"] == sum(inspect_model(Path(model)).state_bytes_per_lane) > 0


def test_deepseek4_counts_compressed_cells_and_an_indexer_where_four_tokens_share_one() -> None:
    values = {
        "attention.compress_ratios": (0, 4, 128, 4),
        "attention.key_length": 512,
        "attention.indexer.key_length": 128,
    }
    facts = Metadata(values, (), 4, 100)
    sparse = 512 + (512 + 128) // 4
    assert deepseek4_kv_values(facts) == (512, sparse, 512 + 512 // 128, sparse)
    assert deepseek4_states(facts) == (0, 2 * 2 * 4 * 2 * 640, 2 * 128 * 512, 2 * 2 * 4 * 2 * 640)
