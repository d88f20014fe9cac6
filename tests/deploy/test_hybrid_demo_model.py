"""The second demo model: a trained hybrid, whose answers have the margins that random weights lack."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from llama_cpp import llama_cpp as llama

from relayline.coordinator.model.inspection import inspect_model
from relayline.coordinator.model.split import split_model
from relayline.coordinator.text.tokenizer import Tokenizer
from relayline.deploy.testing.paths import DEMO, DEMO_MODEL
from relayline.deploy.testing.paths import HYBRID_DEMO_MODEL as MODEL
from relayline.deploy.testing.reference import ReferenceModel
from tests.support.chain import Chain

CUTS = [(4,), (9,), (14,), (5, 10), (4, 8, 12)]
N_TOKENS = 160


@pytest.fixture(scope="module", name="text")
def text_fixture(tmp_path_factory: pytest.TempPathFactory) -> list[int]:
    """Held-out text as the model reads it."""
    directory = tmp_path_factory.mktemp("split")
    tokenizer = Tokenizer.load(directory / split_model(MODEL, directory, n_stages=2).tokenizer.file)
    assert tokenizer.bos is not None
    return [tokenizer.bos, *tokenizer.encode((DEMO / "heldout.txt").read_text(encoding="utf-8")[:2_000])][:N_TOKENS]


@pytest.fixture(scope="module", name="whole")
def whole_fixture() -> Iterator[ReferenceModel]:
    with ReferenceModel(MODEL, 512, 1) as model:
        yield model


def loss(logits: np.ndarray, following: list[int]) -> float:
    """Nats per token."""
    shifted = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
    chosen = shifted[np.arange(len(following)), following]
    return float((np.log(np.exp(shifted).sum(axis=1)) - chosen).mean())


def test_it_is_a_small_hybrid_with_a_prediction_layer_and_the_first_ones_tokens(tmp_path: Path) -> None:
    facts, first = inspect_model(MODEL), inspect_model(DEMO_MODEL)
    assert MODEL.stat().st_size <= 12 * 1024 * 1024
    assert (facts.architecture, facts.n_layers, facts.n_vocab) == ("qwen35", 16, first.n_vocab)
    assert facts.legal_cuts == tuple(range(4, 15))
    texts = [
        (DEMO / "heldout.txt").read_text(encoding="utf-8")[:5_000],
        "<|user|>Hello<|end|><|assistant|> äöü \U0001f600",
    ]
    vocabularies = []
    for name, model in (("first", DEMO_MODEL), ("second", MODEL)):
        pipeline = split_model(model, tmp_path / name, n_stages=2)
        tokenizer = Tokenizer.load(tmp_path / name / pipeline.tokenizer.file)
        vocabularies.append(([tokenizer.encode(text) for text in texts], tokenizer.chat_template, tokenizer.bos))
    assert vocabularies[0] == vocabularies[1]


@pytest.mark.parametrize("cuts", CUTS, ids=str)
def test_every_cut_knows_text_as_the_whole_does(
    cuts: tuple[int, ...], text: list[int], whole: ReferenceModel, tmp_path: Path
) -> None:
    """The state of a chunk is carried into the next: the prompt comes in pieces that no chunk of llama.cpp's fits."""
    whole.drop_from(0, 0)
    expected = whole.read(text, 0)
    with Chain(tmp_path, split_model(MODEL, tmp_path, cuts=cuts), ctx_tokens=256) as chain:
        found = np.concatenate([chain.step(text[at : at + 23]) for at in range(0, len(text), 23)])
    assert np.abs(found - expected).max() < 2e-2 * expected.std()
    best = np.sort(expected, axis=1)
    is_certain = best[:, -1] - best[:, -2] > 0.1
    assert is_certain.mean() > 0.8, "a trained model has margins"
    assert (found.argmax(axis=1) == expected.argmax(axis=1))[is_certain].all()
    assert loss(expected[:-1], text[1:]) < 4.0


class Drafting:
    """The whole model and its prediction layer in bare llama.cpp, as its own drafting runs them."""

    def __init__(self) -> None:
        params = llama.llama_model_default_params()
        params.n_gpu_layers, params.load_mtp = 0, True
        self._model = llama.llama_model_load_from_file(str(MODEL).encode(), params)
        assert self._model
        self._contexts = []
        self._batch = llama.llama_batch_init(N_TOKENS, 0, 1)
        # Exported, but with the names of C++.
        self._rows = llama._lib._Z26llama_get_embeddings_nextnP13llama_context
        self._rows.restype, self._rows.argtypes = ctypes.POINTER(ctypes.c_float), [ctypes.c_void_p]
        wanted = llama._lib._Z26llama_set_embeddings_nextnP13llama_contextbb
        wanted.restype, wanted.argtypes = None, [ctypes.c_void_p, ctypes.c_bool, ctypes.c_bool]
        for kind in (llama.LLAMA_CONTEXT_TYPE_DEFAULT, llama.LLAMA_CONTEXT_TYPE_MTP):
            context_params = llama.llama_context_default_params()
            context_params.n_ctx = context_params.n_batch = context_params.n_ubatch = 256
            context_params.n_threads = context_params.n_threads_batch = 1
            context_params.ctx_type = kind
            context = llama.llama_init_from_model(self._model, context_params)
            assert context
            wanted(context, True, False)
            self._contexts.append(context)

    def logits(self, tokens: list[int]) -> tuple[np.ndarray, np.ndarray]:
        """For the token after each, and for the one after that: f32 [n, n_vocab] and [n - 1, n_vocab]."""
        main, draft = self._contexts
        main_logits = self._decode(main, tokens)
        width = llama.llama_model_n_embd(self._model)
        rows = np.ascontiguousarray(np.ctypeslib.as_array(self._rows(main), (len(tokens), width))[:-1])
        self._batch.embd = rows.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
        drafted = self._decode(draft, tokens[1:])
        self._batch.embd = None  # these rows are not the batch's to free
        return main_logits, drafted

    def _decode(self, context: object, tokens: list[int]) -> np.ndarray:
        batch = self._batch
        batch.n_tokens = len(tokens)
        for row, token in enumerate(tokens):
            batch.token[row], batch.pos[row], batch.n_seq_id[row], batch.logits[row] = token, row, 1, 1
            batch.seq_id[row][0] = 0
        assert llama.llama_decode(context, batch) == 0
        n_vocab = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(self._model))
        return np.ctypeslib.as_array(llama.llama_get_logits(context), (len(tokens), n_vocab)).copy()

    def close(self) -> None:
        llama.llama_batch_free(self._batch)
        for context in self._contexts:
            llama.llama_free(context)
        llama.llama_model_free(self._model)


def test_the_prediction_layer_drafts_the_models_next_tokens(text: list[int]) -> None:
    drafting = Drafting()
    main_logits, drafted = drafting.logits(text)
    drafting.close()
    assert loss(drafted[:-1], text[2:]) < 5.0
    hits = (drafted.argmax(axis=1) == main_logits[1:].argmax(axis=1)).mean()
    assert hits > 0.4, f"only {hits:.2f} of its drafts would be accepted"
