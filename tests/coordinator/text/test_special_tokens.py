"""Texts are split at special tokens as llama.cpp does it, for each kind of vocabulary, and in linear time."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import pytest
from hypothesis import given
from hypothesis import strategies as st

from relayline.coordinator.text.special_tokens import Special, SpecialTokens, TooManyError
from relayline.coordinator.text.tokenizer import Tokenizer
from relayline.deploy.testing import vocabulary_files as support
from relayline.wire.common.errors import ContextLengthError

VOCABULARIES = os.environ.get("RELAYLINE_VOCABULARIES", "")  # a directory of GGUF files with vocabularies
# Of one length and overlapping, inside one another, with blanks in them, runs of blanks.
CONTROLS = ["<s>", "</s>", "<unk>", "<mask>", "<|endoftext|>", "<|a|>", "|><|", "<|a", "ab<", "<ab", "> <"]
USER_DEFINED = ["\n\n", "\n\n\n", "  ", "    ", "<|b|>", "aba"]
PIECES = [
    *CONTROLS,
    *USER_DEFINED,
    "a",
    "b",
    " ",
    "\n",
    "\t",
    "\v",
    "x",
    "é",
    "日",
    "<",
    "|",
    ">",
    "<|",
    "hello",
    "▁",
    "\0",
]
TEXTS = st.lists(st.sampled_from(PIECES), max_size=16).map("".join)


def write_byte_pairs(path: Path, name: str, pre: str) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name(name)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list([*support.byte_letters(), *CONTROLS, *USER_DEFINED, "he"])
    kinds = [gguf.TokenType.NORMAL] * 256 + [gguf.TokenType.CONTROL] * len(CONTROLS)
    writer.add_token_types([*kinds, *[gguf.TokenType.USER_DEFINED] * len(USER_DEFINED), gguf.TokenType.NORMAL])
    writer.add_token_merges(["h e"])
    writer.add_bos_token_id(256)
    writer.add_eos_token_id(257)
    writer.add_add_bos_token(True)
    writer.add_add_eos_token(True)
    return written(writer, path)


def write_sentence_pieces(path: Path, name: str, *, adds_blank: bool) -> Path:
    pieces = ["▁", "▁a", "a", "b", "ab", "x", "he", "h", "e", "l", "o"]
    kinds = [gguf.TokenType.CONTROL] * len(CONTROLS) + [gguf.TokenType.USER_DEFINED] * len(USER_DEFINED)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name(name)
    writer.add_tokenizer_model("llama")
    writer.add_token_list([*CONTROLS, *USER_DEFINED, *(f"<0x{byte:02X}>" for byte in range(256)), *pieces])
    n_before = len(CONTROLS) + len(USER_DEFINED) + 256
    writer.add_token_scores([0.0] * n_before + [float(len(piece)) for piece in pieces])
    writer.add_token_types([*kinds, *[gguf.TokenType.BYTE] * 256, *[gguf.TokenType.NORMAL] * len(pieces)])
    writer.add_unk_token_id(2)
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_add_space_prefix(adds_blank)
    return written(writer, path)


def written(writer: gguf.GGUFWriter, path: Path) -> Path:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


@pytest.fixture(
    scope="module",
    # The names make llama.cpp strip blanks right of special tokens (phi-3), and left of <mask> (jina).
    params=["bpe", "bpe-phi-3", "bpe-jina", "spm", "spm-phi-3", "spm-plain"],
)
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path, kind = tmp_path_factory.mktemp("vocab") / "vocab.gguf", request.param
    if kind.startswith("bpe"):
        return Tokenizer.load(write_byte_pairs(path, kind, "jina-v2-de" if "jina" in kind else "gpt-2"))
    return Tokenizer.load(write_sentence_pieces(path, kind, adds_blank=kind != "spm-plain"))


@pytest.fixture(autouse=True)
def _nothing_goes_straight(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short texts are llama.cpp's as they are; here they are split as well."""
    monkeypatch.setattr("relayline.coordinator.text.tokenizer._DIRECT_BYTES_MAX", -1)


@given(text=TEXTS, parse_special=st.booleans(), add_special=st.booleans())
def test_the_tokens_are_llama_cpps(tokenizer: Tokenizer, text: str, parse_special: bool, add_special: bool) -> None:
    whole = tokenizer._encode(text.encode(), add_special=add_special, parse_special=parse_special)
    assert tokenizer.encode(text, add_special=add_special, parse_special=parse_special) == whole


def test_blanks_are_stripped_where_the_vocabulary_says_so(tokenizer: Tokenizer) -> None:
    parts = [*tokenizer._specials.split(b"x \n</s> \n x <mask> x", parse_special=True, n_max=9)]
    texts = [part for part in parts if isinstance(part, bytes)]
    assert texts[0] == b"x \n"
    assert (texts[1] == b"x ") == ("phi-3" in tokenizer.name)
    assert (texts[1] == b" \n x") == ("jina" in tokenizer.name)


def test_a_flood_is_worked_through_once() -> None:
    n_calls = 0

    def encode(raw: bytes) -> Sequence[int]:
        nonlocal n_calls
        n_calls += 1
        return list(raw)

    specials = SpecialTokens([Special(1_000, b"<s>"), Special(1_001, b"aaaa"), Special(1_002, b"aa")], encode)
    n_calls = 0
    flood = b"<s>" * 100_000 + b"aaaa" * 100_000 + b"aaa"
    parts = [*specials.split(flood, parse_special=True, n_max=1_000_000)]
    assert parts == [1_000] * 100_000 + [1_001] * 100_000 + [1_002, b"a"]
    assert n_calls == 0
    with pytest.raises(TooManyError):
        next(specials.split(flood, parse_special=True, n_max=10))


def test_text_that_cannot_fit_is_refused_before_it_is_tokenised(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*args: object, **options: object) -> list[int]:
        raise AssertionError("something was done to it")

    assert tokenizer.longest_piece_bytes == len("<|endoftext|>")
    assert len(tokenizer.encode("<|endoftext|>" * 7, ctx_tokens=7, add_special=False)) == 7
    monkeypatch.setattr(tokenizer, "_encode", never)
    with pytest.raises(ContextLengthError, match=r"length is 7 tokens\. However, your .* 92 characters") as caught:
        tokenizer.encode("<|endoftext|>" * 7 + "x", ctx_tokens=7)
    assert caught.value.param == "prompt"
    with pytest.raises(ContextLengthError, match="more than 7 tokens"):
        tokenizer.encode("<s>" * 8, ctx_tokens=7)


class Walked(bytes):
    """Counts the bytes that a search in it has gone over."""

    n_bytes = 0

    def find(self, sub: Any, start: Any = 0, end: Any = None) -> int:  # type: ignore[override]
        at = super().find(sub, start)
        self.n_bytes += (at + len(sub) if at >= 0 else len(self)) - start
        return at


@pytest.mark.parametrize("piece", ["<s>", "<|a|>", "<|a ", "> <|endoftext|>", "  ab<", "<s>x", "\n\n\n"])
def test_the_work_grows_with_the_text_alone(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, piece: str) -> None:
    """Bytes that are searched, and bytes that llama.cpp gets, and in how large pieces at most."""
    specials, own = tokenizer._specials, tokenizer._encode
    given_bytes = list[int]()

    def encode(raw: bytes, **options: bool) -> list[int]:
        given_bytes.append(len(raw))
        return own(raw, **options)

    monkeypatch.setattr(tokenizer, "_encode", encode)
    walked = []
    for n_pieces in (500, 4_000):
        raw, given_bytes[:] = Walked((piece * n_pieces).encode()), []
        for _ in specials.split(raw, parse_special=True, n_max=100_000):
            pass
        walked.append(raw.n_bytes / len(raw))
        tokenizer.encode(piece * n_pieces, add_special=False)
        assert sum(given_bytes) <= len(raw), "each byte is handed to llama.cpp once at most"
    few, many = walked
    assert many <= few * 1.05
    assert many <= 4 * (len(CONTROLS) + len(USER_DEFINED))


@pytest.mark.skipif(not VOCABULARIES, reason="RELAYLINE_VOCABULARIES names no directory of GGUF vocabularies")
@pytest.mark.parametrize("path", sorted(Path(VOCABULARIES).glob("*.gguf")) if VOCABULARIES else [], ids=str)
@given(data=st.data())
def test_the_tokens_of_known_vocabularies_are_llama_cpps(path: Path, data: st.DataObject) -> None:
    known = _known(path)
    some = [
        special.text.decode(errors="replace") for each in known._specials._by_prefix.values() for _, special in each
    ]
    pieces = st.one_of(st.sampled_from([*some, *PIECES]), st.text(max_size=4))
    text = "".join(data.draw(st.lists(pieces, max_size=12)))
    for parse_special in (False, True):
        whole = known._encode(text.encode(), add_special=True, parse_special=parse_special)
        assert known.encode(text, parse_special=parse_special) == whole


_KNOWN: dict[Path, Tokenizer] = {}


def _known(path: Path) -> Tokenizer:
    if path not in _KNOWN:
        _KNOWN.clear()
        _KNOWN[path] = Tokenizer.load(path)
    return _KNOWN[path]
