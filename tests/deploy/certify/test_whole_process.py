"""The unsplit model in a child process: the same numbers, the same errors, and an abort is one line."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import numpy as np
import pytest

from relayline.deploy.certify.whole_model import Row, WholeConfig, WholeModel
from relayline.deploy.certify.whole_process import WholeProcess
from relayline.wire.common.errors import InternalError, ModelFileError, NativeError
from relayline.wire.settings.table import EngineSettings
from tests.support.tiny_models import make_tiny

ROWS = [Row(token, at, 0, at % 2 == 0) for at, token in enumerate([3, 14, 15, 92, 65, 35, 89, 79])]


def whole_config(path: Path, n_lanes: int = 1, ctx_tokens: int = 64, max_rows: int = 512) -> WholeConfig:
    settings = EngineSettings(n_lanes=n_lanes, ctx_tokens=ctx_tokens, max_rows=max_rows, kv_layout="unified")
    return WholeConfig(path, settings)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("phi3", tmp_path_factory.mktemp("whole") / "model.gguf", n_layers=2)


def test_gives_the_models_answers(tiny: Path) -> None:
    config = whole_config(tiny, n_lanes=2, ctx_tokens=128, max_rows=16)
    with WholeModel(config) as here, WholeProcess(config) as elsewhere:
        expected = here.decode(ROWS)
        assert (elsewhere.n_vocab, elsewhere.n_ctx) == (here.n_vocab, here.n_ctx)
        assert np.array_equal(elsewhere.decode(ROWS), expected)
        elsewhere.clear()
        assert np.array_equal(elsewhere.decode(ROWS), expected)
        assert elsewhere.decode([Row(1, 8, 0, False)]).shape == (0, here.n_vocab)
        with pytest.raises(InternalError, match="beyond what was opened"):
            elsewhere.decode([Row(1, 0, 1, True)] * 17)
        elsewhere.clear()
        assert np.array_equal(elsewhere.decode(ROWS), expected), "an error ends nothing"


def test_an_abort_of_llama_cpp_is_one_line(tmp_path: Path) -> None:
    """It asserts that some layer has a window where the family has windows."""
    values = {"attention.sliding_window_pattern": [False] * 8}
    model = make_tiny("granite_swa", tmp_path / "model.gguf", extra_values=values)
    with pytest.raises(
        NativeError, match=r"the unsplit model ended: llama.cpp aborted: GGML_ASSERT\(.*is_swa_any"
    ) as caught:
        WholeProcess(whole_config(model))
    assert "\n" not in caught.value.message


def test_a_file_that_does_not_load_is_refused_as_here(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"no model")
    with pytest.raises(ModelFileError, match=r"llama.cpp cannot load it"):
        WholeProcess(whole_config(tmp_path / "model.gguf"))


def test_a_killed_process_is_reported(tiny: Path) -> None:
    with WholeProcess(whole_config(tiny)) as model:
        os.kill(model._child.pid, signal.SIGKILL)
        with pytest.raises(NativeError, match=r"the unsplit model ended: llama.cpp ended with SIGKILL"):
            model.decode(ROWS)
