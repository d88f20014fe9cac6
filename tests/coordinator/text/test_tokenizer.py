"""The vocabulary of a GGUF, on tokenizer files that the tests write themselves."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import llama_cpp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from relayline.coordinator.text.tokenizer import Tokenizer
from relayline.deploy.testing import vocabulary_files as support
from relayline.wire.common.errors import InvalidRequestError, ModelFileError
from tests.support.tiny_models import make_tiny


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(support.write_tokenizer(tmp_path_factory.mktemp("tok") / "tokenizer.gguf"))


@pytest.fixture(scope="module")
def with_bos(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(support.write_tokenizer(tmp_path_factory.mktemp("tok") / "bos.gguf", add_bos=True))


@pytest.fixture(scope="module")
def textless(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(support.write_no_tokenizer(tmp_path_factory.mktemp("tok") / "none.gguf", n_vocab=32))


def test_no_gpu_is_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """llama.cpp asks each GPU for its memory unless it gets a list, and the process keeps half a GiB there."""
    found = []
    load = llama_cpp.llama_model_load_from_file

    def noted(path: bytes, params: Any) -> Any:
        found.append(ctypes.cast(params.devices, ctypes.POINTER(ctypes.c_void_p))[0])
        return load(path, params)

    monkeypatch.setattr(llama_cpp, "llama_model_load_from_file", noted)
    Tokenizer.load(support.write_tokenizer(tmp_path / "tokenizer.gguf"))
    assert found == [None]


def test_facts_of_the_file(tokenizer: Tokenizer) -> None:
    assert (tokenizer.n_vocab, tokenizer.bos, tokenizer.eos) == (support.N_VOCAB, support.BOS, support.EOS)
    assert (tokenizer.bos_text, tokenizer.eos_text) == ("<|bos|>", "<|eos|>")
    assert (tokenizer.name, tokenizer.chat_template) == ("tiny", support.CHATML)
    assert tokenizer.has_text
    assert not tokenizer.adds_bos


def test_a_begin_token_that_the_file_does_not_name_counts_only_if_it_is_a_mark(tmp_path: Path) -> None:
    """llama.cpp takes token 11 for such vocabularies."""
    unnamed = Tokenizer.load(make_tiny("llama", tmp_path / "model.gguf", n_layers=1, tokenizer=True))
    assert unnamed.bos == 11
    assert (unnamed.bos_text, unnamed.eos_text) == ("", "<|end|>")


def test_merges_are_applied(tokenizer: Tokenizer) -> None:
    assert [tokenizer.piece(token) for token in tokenizer.encode("hello world!")] == [b"hello", b" world", b"!"]


@given(text=st.text(max_size=40))
def test_any_text_survives_the_round_trip(tokenizer: Tokenizer, text: str) -> None:
    tokens = tokenizer.encode(text, parse_special=False)
    assert b"".join(tokenizer.piece(token) for token in tokens) == text.encode()


def test_special_text_is_a_token_only_when_asked(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("<|im_end|>") == [support.IM_END]
    plain = tokenizer.encode("<|im_end|>", parse_special=False)
    assert support.IM_END not in plain
    assert tokenizer.decode(plain) == "<|im_end|>"


def test_control_tokens_show_only_on_request(tokenizer: Tokenizer) -> None:
    assert tokenizer.piece(support.IM_END) == b""
    assert tokenizer.piece(support.IM_END, special=True) == b"<|im_end|>"
    assert tokenizer.decode([104, support.EOS], special=False) == tokenizer.decode([104])


def test_end_tokens(tokenizer: Tokenizer) -> None:
    assert tokenizer.is_end(support.EOS)
    assert tokenizer.is_end(support.IM_END)
    assert not tokenizer.is_end(104)


def test_messages_end_with_what_ends_answers_and_with_tokens_known_for_it(tmp_path: Path) -> None:
    """gpt-oss ends a thought, and each message before the answer, with a token that does not end answers."""
    controls = ["<|return|>", "<|call|>", "<|end|>", "<|start|>"]
    harmony = Tokenizer.load(support.write_tokenizer(tmp_path / "tokenizer.gguf", controls=controls))
    answers, _, end, start = range(support.N_VOCAB, support.N_VOCAB + 4)
    assert [harmony.is_end(token) for token in (answers, end, start)] == [True, False, False]
    assert harmony.message_ends >= {answers, end, support.IM_END, support.EOS}
    assert not harmony.message_ends & {start, 104}


@pytest.mark.parametrize("token", [-1, support.N_VOCAB, 1 << 40])
def test_tokens_outside_the_vocabulary_never_reach_llama_cpp(tokenizer: Tokenizer, token: int) -> None:
    assert tokenizer.piece(token) == b""
    assert not tokenizer.is_end(token)


def test_begin_token_is_added_to_prompts_when_the_vocabulary_says_so(tokenizer: Tokenizer, with_bos: Tokenizer) -> None:
    assert with_bos.encode("hello")[0] == support.BOS
    assert with_bos.encode("hello", add_special=False)[0] != support.BOS
    assert tokenizer.encode("hello")[0] != support.BOS


def test_a_chat_never_begins_with_two_begin_tokens(tokenizer: Tokenizer, with_bos: Tokenizer) -> None:
    for rendered in ("<|bos|>hello", "hello"):
        assert with_bos.encode_chat(rendered).count(support.BOS) == 1
    assert tokenizer.encode_chat("<|bos|>hello").count(support.BOS) == 1
    assert tokenizer.encode_chat("hello").count(support.BOS) == 0


def test_without_a_tokenizer_text_is_refused_and_ids_still_have_a_vocabulary(textless: Tokenizer) -> None:
    assert not textless.has_text
    assert textless.n_vocab == 32
    assert (textless.bos, textless.chat_template) == (None, None)
    assert textless.piece(3) == b""
    with pytest.raises(InvalidRequestError, match="no tokenizer; send token ids"):
        textless.encode("hello")


def test_files_that_are_not_tokenizers(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    garbage = tmp_path / "garbage.gguf"
    garbage.write_bytes(b"not a gguf at all")
    with pytest.raises(ModelFileError, match=r"garbage\.gguf: not a GGUF file"):
        Tokenizer.load(garbage)
    with pytest.raises(ModelFileError, match="no such tokenizer file"):
        Tokenizer.load(tmp_path / "absent.gguf")
    assert capfd.readouterr() == ("", "")


def test_loading_and_using_is_silent(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    tokenizer = Tokenizer.load(support.write_tokenizer(tmp_path / "t.gguf"))
    tokenizer.encode("hello")
    tokenizer.close()
    assert capfd.readouterr() == ("", "")
