"""The unsplit reference decodes like llama.cpp itself, in the same context as a stage's, and refuses in one line."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from llama_cpp import llama_cpp as llama

from relayline.coordinator.model.split import split_model
from relayline.deploy.certify.whole_model import Row, WholeConfig, WholeModel, plain_tokens
from relayline.deploy.testing.engines import engine_config
from relayline.deploy.testing.reference import ReferenceModel
from relayline.stage.engine.native import NativeEngine
from relayline.wire.common.errors import InternalError, ModelFileError
from tests.support.tiny_models import CONTROLS, TOKENS, make_tiny

PROMPT = [3, 14, 15, 92, 65, 35, 89, 79]


def whole(path: Path, n_lanes: int, ctx_tokens: int, max_wanted: int = 64, **more: int) -> WholeConfig:
    settings = engine_config(path, n_lanes, ctx_tokens, **more).settings
    return WholeConfig(path, settings, max_wanted=max_wanted)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama", tmp_path_factory.mktemp("whole") / "model.gguf", n_layers=2)


def rows(lane: int = 0) -> list[Row]:
    return [Row(token, at, lane, True) for at, token in enumerate(PROMPT)]


def test_gives_the_logits_of_the_model(tiny: Path) -> None:
    with ReferenceModel(tiny, n_ctx=512, n_seq_max=1) as reference:
        expected = reference.decode(PROMPT, range(len(PROMPT)), [0] * len(PROMPT), [True] * len(PROMPT))
    with WholeModel(whole(tiny, 2, 128)) as model:
        found = model.decode(rows())
        assert found.shape == (len(PROMPT), model.n_vocab)
        assert np.abs(found - expected).max() < 1e-3 * expected.std()


def test_a_cleared_model_is_a_fresh_one(tiny: Path) -> None:
    with WholeModel(whole(tiny, 2, 128)) as model:
        first = model.decode(rows())
        model.decode(rows(lane=1))
        model.clear()
        assert np.array_equal(model.decode(rows()), first)


def test_only_wanted_rows_come_back(tiny: Path) -> None:
    with WholeModel(whole(tiny, 1, 128)) as model:
        every = model.decode(rows())
        model.clear()
        found = model.decode([row._replace(wanted=row.position in (2, 7)) for row in rows()])
        assert found.shape[0] == 2
        assert np.abs(found - every[[2, 7]]).max() < 1e-3 * every.std()


def test_more_than_was_opened_is_refused_before_llama_cpp_sees_it(tiny: Path) -> None:
    with WholeModel(whole(tiny, 1, 128, max_wanted=2, max_rows=4)) as model:
        with pytest.raises(InternalError):
            model.decode(rows())
        with pytest.raises(InternalError):
            model.decode(rows()[:3])


@pytest.mark.parametrize(("kv_layout", "spare_lanes"), [("unified", 1), ("per-lane", 0)])
@pytest.mark.parametrize(("n_lanes", "ctx_tokens"), [(5, 800), (1, 128)])
def test_its_context_is_as_large_as_a_stages(
    kv_layout: str, spare_lanes: int, n_lanes: int, ctx_tokens: int, tiny: Path, tmp_path: Path
) -> None:
    path = tmp_path / split_model(tiny, tmp_path, cuts=(1,)).stages[0].file
    config = engine_config(path, n_lanes, ctx_tokens, spare_lanes=spare_lanes, kv_layout=kv_layout)
    with NativeEngine(config) as engine, WholeModel(WholeConfig(tiny, config.settings)) as model:
        assert model.n_ctx == llama.llama_n_ctx(engine._context)


def test_control_tokens_are_left_out(tmp_path: Path) -> None:
    model = make_tiny("llama", tmp_path / "model.gguf", n_layers=1, tokenizer=True)
    expected = [token for token, text in enumerate(TOKENS) if text not in CONTROLS]
    assert plain_tokens(model, len(TOKENS)).tolist() == expected


def test_a_nameless_vocabulary_counts_whole(tiny: Path) -> None:
    assert plain_tokens(tiny, 128).tolist() == list(range(128))


def test_a_vocabulary_without_choice_is_refused(tmp_path: Path) -> None:
    model = make_tiny("llama", tmp_path / "model.gguf", n_layers=1, vocab=1)
    with pytest.raises(ModelFileError, match="1 ordinary tokens; there is nothing to compare"):
        plain_tokens(model, 1)


def test_a_model_that_llama_cpp_cannot_load_is_refused_with_the_reason(tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF" + bytes(60))
    for use in (lambda: plain_tokens(broken, 8), lambda: WholeModel(whole(broken, 1, 64))):
        with pytest.raises(ModelFileError, match=r"broken\.gguf: llama\.cpp cannot load it: \w"):
            use()
