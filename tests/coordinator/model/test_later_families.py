"""Metadata that slices of some families need, and models of these families that are refused."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest

from relayline.coordinator.model.gguf_file import GgufModel, open_model
from relayline.coordinator.model.inspection import inspect_model
from relayline.coordinator.model.pipeline_file import store_pipeline
from relayline.coordinator.model.split import split_model
from relayline.deploy.testing.engines import engine_config
from relayline.stage.engine.native import NativeEngine
from relayline.wire.common.errors import CutError, ModelFileError, UnsupportedArchitectureError, UsageError
from tests.support.tiny_later_families import GEMMA4_WINDOWS
from tests.support.tiny_models import make_tiny
from tests.support.tiny_shapes import CTX, HEAD, N_EMBD, Value


def stages_of(model: Path, cuts: tuple[int, ...]) -> list[GgufModel]:
    """Split and open every stage."""
    out = model.parent / "out"
    pipeline = split_model(model, out, cuts=cuts)
    return [open_model(out / stage.file) for stage in pipeline.stages]


def read(model: GgufModel, name: str) -> np.ndarray:
    tensor = model.tensors[name]
    values = np.fromfile(model.path, np.float32, tensor.size_bytes // 4, offset=tensor.offset)
    return values.reshape(tuple(reversed(tensor.dims)))


def test_gemma4_carries_rope_factors_only_where_a_layer_has_no_window(tmp_path: Path) -> None:
    """llama.cpp asks for them there alone, and refuses a file with a tensor that it did not ask for."""
    stages = stages_of(make_tiny("gemma4", tmp_path / "model.gguf"), (3, 7))
    assert ["rope_freqs.weight" in stage.tensors for stage in stages] == [False, True, True]
    patterns = [stage.value("gemma4.attention.sliding_window_pattern") for stage in stages]
    assert patterns == [(True,) * 3, (True, True, False, True), (True,) * 4 + (False,)]


def test_gemma4_layers_with_a_window_hold_narrower_keys(tmp_path: Path) -> None:
    facts = inspect_model(make_tiny("gemma4", tmp_path / "model.gguf"))
    narrow, wide = 2 * (HEAD + HEAD) * 2, 1 * (2 * HEAD + 2 * HEAD) * 2  # heads, keys and values, bytes of f16
    assert narrow == wide == 128
    assert facts.kv_bytes_per_token == (128,) * 12
    same = {"attention.head_count_kv": 2}
    facts = inspect_model(make_tiny("gemma4", tmp_path / "same.gguf", extra_values=same))
    assert facts.kv_bytes_per_token == tuple(128 if is_windowed else 256 for is_windowed in GEMMA4_WINDOWS)


def test_gemma4_stages_have_two_layers_and_a_window(tmp_path: Path) -> None:
    model = make_tiny("gemma4", tmp_path / "model.gguf")
    with pytest.raises(CutError, match=r"cut 1 is not legal: llama.cpp runs no file of a single layer"):
        split_model(model, tmp_path / "out", cuts=(1,))
    with pytest.raises(CutError, match=r"layer 4 cannot be one stage: .* single layer"):
        split_model(model, tmp_path / "out", cuts=(4, 5))


@pytest.mark.parametrize(
    ("name", "values", "reason"),
    [
        ("nanbeige", {"num_loops": 2}, "several times"),
        ("granite_swa", {"deepstack_mapping": [0, -1, -1, -1, -1, -1, -1, -1]}, "deepstack"),
    ],
)
def test_some_models_of_a_family_are_refused(name: str, values: dict[str, Value], reason: str, tmp_path: Path) -> None:
    model = make_tiny(name, tmp_path / "model.gguf", extra_values=values)
    facts = inspect_model(model)
    assert facts.refusal is not None
    assert reason in facts.refusal
    with pytest.raises(UnsupportedArchitectureError, match=reason):
        split_model(model, tmp_path / "out", cuts=(4,), experimental=True)
    assert not (tmp_path / "out").exists()


def test_a_model_that_runs_through_its_layers_once_is_not_refused(tmp_path: Path) -> None:
    assert inspect_model(make_tiny("nanbeige", tmp_path / "model.gguf", extra_values={"num_loops": 1})).supported


@pytest.mark.parametrize(("name", "n_layers"), [("qwen3vl", 2), ("qwen3vlmoe", 3)])
def test_the_first_stage_takes_features_of_images(name: str, n_layers: int, tmp_path: Path) -> None:
    path = make_tiny(name, tmp_path / "model.gguf")
    stages = stages_of(path, (4,))
    assert [stage.value(f"{name}.n_deepstack_layers") for stage in stages] == [n_layers, 0]
    assert [stage.value("relayline.rows.width_in") for stage in stages] == [N_EMBD * (1 + n_layers), None]
    assert [stage.value("relayline.version") for stage in stages] == [6, 1], "earlier builds may run later stages"
    assert inspect_model(path).legal_cuts == tuple(range(n_layers + 1, 5))
    with pytest.raises(CutError, match=f"its first {n_layers} layers add features of images"):
        stages_of(path, (n_layers,))


def test_slices_that_an_earlier_version_made_for_text_alone_are_made_again(tmp_path: Path) -> None:
    model, out = make_tiny("qwen3vl", tmp_path / "model.gguf"), tmp_path / "out"
    made = split_model(model, out, cuts=(3,))
    inode = (out / "stage-0.gguf").stat().st_ino
    assert split_model(model, out, cuts=(3,)) == made
    assert (out / "stage-0.gguf").stat().st_ino == inode
    store_pipeline(out, msgspec.structs.replace(made, deepstack_layers=0))
    assert split_model(model, out, cuts=(3,)) == made
    assert (out / "stage-0.gguf").stat().st_ino != inode


def test_a_model_that_ends_among_the_layers_that_take_image_features_is_refused(tmp_path: Path) -> None:
    facts = inspect_model(make_tiny("qwen3vl", tmp_path / "model.gguf", extra_values={"n_deepstack_layers": 5}))
    assert facts.refusal == "5 of its layers add features of images, but it has only 5"


def test_minicpm_slices_state_values_derived_from_the_number_of_layers(tmp_path: Path) -> None:
    """Values that the file states stay."""
    for stage in stages_of(make_tiny("minicpm", tmp_path / "model.gguf"), (2,)):
        assert stage.value("minicpm.residual_scale") == pytest.approx(1.4 / 5**0.5, rel=1e-7)
        assert stage.value("minicpm.logit_scale") == 256 / N_EMBD
        assert stage.value("minicpm.embedding_scale") == 0.0
    stages = stages_of(make_tiny("minicpm:stated", tmp_path / "other" / "model.gguf"), (2,))
    assert [stage.value("relayline.embedding.scale") for stage in stages] == [3.0, None]
    assert [stage.value("minicpm.residual_scale") for stage in stages] == [pytest.approx(0.6)] * 2


@pytest.mark.parametrize("name", ["gpt2", "starcoder", "mpt:positions"])
def test_positions_are_added_once(name: str, tmp_path: Path) -> None:
    """The graph of every slice adds a row of the table: behind stage 0 it holds zeros."""
    model = make_tiny(name, tmp_path / "model.gguf")
    stages = stages_of(model, (1, 3))
    table = read(open_model(model), "position_embd.weight")
    assert np.array_equal(read(stages[0], "position_embd.weight"), table)
    for stage in stages[1:]:
        tensor = stage.tensors["position_embd.weight"]
        assert (tensor.dims, tensor.type_name) == ((N_EMBD, CTX), "Q4_0")
        assert stage.path.read_bytes()[tensor.offset :][: tensor.size_bytes] == bytes(tensor.size_bytes)


def test_a_stage_holds_no_more_positions_than_its_model_knows(tmp_path: Path) -> None:
    """llama.cpp aborts on a row beyond the end of the table."""
    split_model(make_tiny("gpt2", tmp_path / "model.gguf"), tmp_path / "out", cuts=(2,))
    for index in range(2):
        artifact = tmp_path / "out" / f"stage-{index}.gguf"
        with pytest.raises(UsageError, match="--ctx is 513, but this model has only 512 positions"):
            NativeEngine(engine_config(artifact, 1, CTX + 1, 8))
        with NativeEngine(engine_config(artifact, 1, CTX, 8)) as engine:
            engine.positions[0] = CTX - 1
            engine.decode(1)


def test_glm4_rotates_halves_where_its_file_rotates_neighbours(tmp_path: Path) -> None:
    """llama.cpp takes rows for this family only with a rope of several axes, which pairs values in another way."""
    model = make_tiny("glm4:bias", tmp_path / "model.gguf")
    assert inspect_model(model).reorders_rows
    (_, second), whole = stages_of(model, (2,)), open_model(model)
    assert second.value("glm4.rope.dimension_sections") == (2, 2, 0, 0)
    order = [0, 2, 4, 6, 1, 3, 5, 7, *range(8, HEAD)]
    for name in ("attn_q.weight", "attn_k.weight", "attn_q.bias", "attn_k.bias"):
        found, given = read(second, f"blk.0.{name}"), read(whole, f"blk.2.{name}")
        heads = given.reshape(-1, HEAD, *given.shape[1:])
        assert np.array_equal(found, heads[:, order].reshape(given.shape))
    assert np.array_equal(read(second, "blk.0.attn_v.weight"), read(whole, "blk.2.attn_v.weight"))


def test_glm4_with_several_axes_stays_as_it_is(tmp_path: Path) -> None:
    model = make_tiny("glm4:axes", tmp_path / "model.gguf")
    assert not inspect_model(model).reorders_rows
    (_, second), whole = stages_of(model, (2,)), open_model(model)
    assert np.array_equal(read(second, "blk.0.attn_q.weight"), read(whole, "blk.2.attn_q.weight"))
    assert second.value("glm4.nextn_predict_layers") == 0


def test_glm4_with_indistinguishable_queries_and_keys_is_refused(tmp_path: Path) -> None:
    fused = {"blk.0.attn_qkv.weight": np.zeros((2 * N_EMBD, N_EMBD), np.float32)}
    facts = inspect_model(make_tiny("glm4", tmp_path / "model.gguf", extra_tensors=fused))
    assert facts.refusal is not None
    assert "one matrix" in facts.refusal
    assert not facts.may_be_tried


def test_glm4_with_half_a_head_is_refused(tmp_path: Path) -> None:
    wide = {"attention.key_length": 24, "attention.value_length": 24}
    model = make_tiny("glm4", tmp_path / "model.gguf", extra_values=wide)
    with pytest.raises(ModelFileError, match=r"blk.0.attn_q.weight is not made of whole heads"):
        split_model(model, tmp_path / "out", cuts=(2,))


def test_deci_slices_start_with_attention_and_end_with_a_feed_forward_part(tmp_path: Path) -> None:
    """Layers of pruned models may have neither, and one may be empty: that is no damage."""
    model = make_tiny("deci", tmp_path / "model.gguf")
    facts = inspect_model(model)
    assert facts.layer_bytes[5] == 0
    assert facts.legal_cuts == (1, 3, 7)
    assert facts.kv_bytes_per_token[2] == facts.kv_bytes_per_token[4] == 0
    with pytest.raises(CutError, match="its first layer would have no attention"):
        split_model(model, tmp_path / "out", cuts=(2,))
    with pytest.raises(CutError, match="the layer before has no feed-forward part"):
        split_model(model, tmp_path / "out", cuts=(6,))


def test_laguna_slices_rotate_as_the_whole_does(tmp_path: Path) -> None:
    """A slice that begins with a window would rotate as much of a head in layers without one."""
    model = make_tiny("laguna", tmp_path / "model.gguf")
    assert inspect_model(model).legal_cuts == (4, 5, 6, 7)
    with pytest.raises(CutError, match="would rotate as many values of a head as its first layer"):
        split_model(model, tmp_path / "out", cuts=(3,))
    alike = make_tiny("laguna", tmp_path / "alike.gguf", extra_values={"rope.dimension_count_swa": HEAD // 2})
    assert inspect_model(alike).legal_cuts == (2, 3, 4, 5, 6, 7)


def test_minimax_m3_stages_have_an_indexer(tmp_path: Path) -> None:
    model = make_tiny("minimax-m3", tmp_path / "model.gguf")
    assert inspect_model(model).legal_cuts == (3, 4, 5, 6)
    with pytest.raises(CutError, match="layers without an indexer only together with one that has"):
        split_model(model, tmp_path / "out", cuts=(2,))


def test_minimax_m3_with_shared_cells_says_that_its_layers_do_not_choose(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    split_model(make_tiny("minimax-m3", tmp_path / "model.gguf"), tmp_path / "out", cuts=(4,))
    for layout, is_said in (("per-lane", False), ("unified", True)):
        NativeEngine(engine_config(tmp_path / "out" / "stage-0.gguf", 2, CTX, kv_layout=layout)).close()
        assert ("attends to all tokens, not to those its layers choose" in caplog.text) is is_said


def test_smallthinker_stages_do_not_have_four_layers(tmp_path: Path) -> None:
    model = make_tiny("smallthinker", tmp_path / "model.gguf")
    with pytest.raises(CutError, match=r"cut 4 is not legal: llama.cpp takes a file of 4 layers"):
        split_model(model, tmp_path / "out", cuts=(4,))
    with pytest.raises(CutError, match="cut 9 is not legal: this architecture repeats every 4 layers"):
        split_model(model, tmp_path / "out", cuts=(9,))
