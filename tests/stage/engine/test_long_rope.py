"""Models with two sets of rope factors: the largest length of a lane chooses, for any number of lanes and stages."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from relayline.coordinator.engine.descriptions import check_stages
from relayline.coordinator.model.inspection import inspect_model
from relayline.coordinator.model.split import split_model
from relayline.deploy.certify.whole_model import Row, WholeConfig, WholeModel
from relayline.deploy.testing.reference import LANE_ATTENTION, ReferenceModel
from relayline.stage.config import StageConfig
from relayline.stage.engine.artifact import open_artifact
from relayline.stage.facts import StageFacts
from relayline.wire.common.errors import HandshakeError
from relayline.wire.common.rope_factors import LongRope
from relayline.wire.pb.relayline.v1 import relayline_pb2 as pb
from relayline.wire.settings.table import EngineSettings
from tests.coordinator.engine.test_pipeline import pipeline_file
from tests.support.chain import Chain
from tests.support.tiny_models import make_tiny

ORIGINAL = 512  # more than the smallest cache of llama.cpp, so that both sets can be due
PREFILL, DECODE = 20, 5
ERROR_MAX = 3e-3  # of the logits' standard deviation; steps here have other numbers of rows than the whole model's
TOKENS = [int(token) for token in np.random.default_rng(7).integers(0, 128, PREFILL + DECODE)]


def model_of(name: str, path: Path) -> Path:
    return make_tiny(name, path, extra_values={"rope.scaling.original_context_length": ORIGINAL})


def by_set(model: Path, kv_layout: str) -> dict[str, np.ndarray]:
    """The unsplit model's logits by each set, which llama.cpp takes by the size of its cache."""
    found, flash_attn = {}, "auto" if kv_layout == "unified" else LANE_ATTENTION
    for name, n_ctx in (("short", ORIGINAL), ("long", 2 * ORIGINAL)):
        with ReferenceModel(model, n_ctx=n_ctx, n_seq_max=1, flash_attn=flash_attn) as reference:
            logits = [reference.decode(TOKENS[:PREFILL], range(PREFILL), [0] * PREFILL, [True] * PREFILL)]
            logits += [reference.decode([TOKENS[at]], [at], [0], [True]) for at in range(PREFILL, len(TOKENS))]
        found[name] = np.concatenate(logits)
    assert np.abs(found["long"] - found["short"]).max() / found["short"].std() > 0.1, "they must differ visibly"
    return found


@pytest.mark.sampled(8)
@pytest.mark.parametrize(
    ("ctx_tokens", "n_lanes", "expected"),
    [(64, 1, "short"), (300, 3, "short"), (ORIGINAL, 1, "short"), (ORIGINAL + 1, 1, "long"), (ORIGINAL + 1, 3, "long")],
)
@pytest.mark.parametrize("kv_layout", ["unified", "per-lane"])
@pytest.mark.parametrize("name", ["phi3", "phimoe"])
def test_a_lane_chooses_by_its_own_length(
    name: str, kv_layout: str, ctx_tokens: int, n_lanes: int, expected: str, tmp_path: Path
) -> None:
    model = model_of(name, tmp_path / "model.gguf")
    sets = by_set(model, kv_layout)
    pipeline = split_model(model, tmp_path / "out", cuts=(2,))
    lanes = range(n_lanes)
    with Chain(tmp_path / "out", pipeline, ctx_tokens=ctx_tokens, lanes=lanes, kv_layout=kv_layout) as chain:
        steps = [TOKENS[:PREFILL], *([token] for token in TOKENS[PREFILL:])]
        found = np.concatenate([chain.step(step).reshape(n_lanes, len(step), -1) for step in steps], axis=1)
    error = np.abs(found - sets[expected]).max() / sets[expected].std()
    assert error < ERROR_MAX, error


@pytest.mark.parametrize("kv_layout", ["unified", "per-lane"])
@pytest.mark.parametrize(("ctx_tokens", "expected"), [(ORIGINAL, "short"), (ORIGINAL + 1, "long")])
def test_the_whole_model_that_certifies_chooses_likewise(
    kv_layout: str, ctx_tokens: int, expected: str, tmp_path: Path
) -> None:
    model = model_of("phi3", tmp_path / "model.gguf")
    sets = by_set(model, kv_layout)
    rope = inspect_model(model).long_rope
    settings = EngineSettings(n_lanes=2, ctx_tokens=ctx_tokens, kv_layout=kv_layout, n_threads=1)
    config = WholeConfig(model, settings, long_rope=rope)
    with WholeModel(config) as whole:
        found = whole.decode([Row(token, at, 1, True) for at, token in enumerate(TOKENS[:PREFILL])])
    error = np.abs(found - sets[expected][:PREFILL]).max() / sets[expected].std()
    assert error < ERROR_MAX, error


def test_a_stage_says_up_to_which_length_it_takes_the_short_set(tmp_path: Path) -> None:
    for name, expected in (("phi3", LongRope("phi3", ORIGINAL)), ("mistral3", None)):
        model = model_of(name, tmp_path / f"{name}.gguf")
        assert inspect_model(model).long_rope == expected
        split_model(model, tmp_path / name, cuts=(2,))
        for index in range(2):
            artifact = open_artifact(tmp_path / name / f"stage-{index}.gguf")
            assert artifact.long_rope == expected
            described = StageFacts(artifact, StageConfig(artifact.path), "0").describe()
            assert described.rope_original_tokens == (ORIGINAL if expected else 0)


def test_a_file_that_is_silent_on_its_original_context_is_read_as_llama_cpp_does(tmp_path: Path) -> None:
    factors = {f"rope_factors_{name}.weight": np.ones(8, np.float32) for name in ("long", "short")}
    model = make_tiny("llama", tmp_path / "model.gguf", extra_tensors=factors)
    facts = inspect_model(model)
    assert facts.long_rope == LongRope("llama", facts.ctx_train)
    split_model(model, tmp_path / "out", cuts=(2,))
    assert open_artifact(tmp_path / "out" / "stage-1.gguf").long_rope == facts.long_rope


def description_of(index: int, ctx_tokens: int, original_tokens: int = 4_096) -> pb.DescribeResponse:
    return pb.DescribeResponse(
        pipeline_id="fake",
        stage_index=index,
        n_embd=pipeline_file(2).n_embd,
        ctx_tokens=ctx_tokens,
        rope_original_tokens=original_tokens,
    )


@pytest.mark.parametrize("lengths", [(4_096, 4_097), (8_192, 2_048)])
def test_stages_that_turn_positions_differently_are_refused_in_one_line(lengths: tuple[int, int]) -> None:
    facts = [description_of(index, ctx_tokens) for index, ctx_tokens in enumerate(lengths)]
    with pytest.raises(HandshakeError, match=rf"^b:1 has lanes of {lengths[1]} tokens and a:1 of .* the same --ctx$"):
        check_stages(["a:1", "b:1"], facts, pipeline_file(2))


def test_stages_whose_lanes_differ_in_length_alone_are_joined() -> None:
    check_stages(["a:1", "b:1"], [description_of(0, 2_048), description_of(1, 4_096)], pipeline_file(2))
    check_stages(["a:1", "b:1"], [description_of(0, 8_192), description_of(1, 4_097)], pipeline_file(2))
    check_stages(["a:1", "b:1"], [description_of(0, 8_192, 0), description_of(1, 512, 0)], pipeline_file(2))


def test_a_stage_of_a_build_that_does_not_choose_is_refused() -> None:
    with pytest.raises(HandshakeError, match=r"b:1 and a:1 choose rope factors differently; run the same"):
        check_stages(["a:1", "b:1"], [description_of(0, 2_048), description_of(1, 2_048, 0)], pipeline_file(2))
