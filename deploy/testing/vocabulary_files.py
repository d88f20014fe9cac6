"""Small real vocabularies as GGUF files without tensors, written by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import gguf

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIALS = ["<|bos|>", "<|eos|>", "<|im_start|>", "<|im_end|>"]
BOS, EOS, _, IM_END = range(256, 260)
MERGES = ["h e", "l l", "he ll", "hell o", "Ġ w", "o r", "Ġw or", "l d", "Ġwor ld"]
_FIRST_MERGE = 260
N_VOCAB = _FIRST_MERGE + len(MERGES)


def byte_letters() -> list[str]:
    """The printable stand-ins of byte-level BPE, by byte: printable Latin-1 is unchanged, the rest moves up."""
    keep = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    moved = iter(range(256, 512))
    return [chr(byte) if byte in keep else chr(next(moved)) for byte in range(256)]


def write_tokenizer(
    path: Path,
    *,
    template: str | None = CHATML,
    tool_template: str | None = None,
    add_bos: bool = False,
    controls: Sequence[str] = (),
    sampling: Mapping[str, float | str] = MappingProxyType({}),
) -> Path:
    """Write a byte-level BPE vocabulary of 256 bytes, four specials and a few merges: a GGUF without tensors.

    `controls` are further control tokens, from N_VOCAB on; `sampling` the ends of `general.sampling.*` keys.
    """
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny")
    add_vocabulary(writer, controls)
    writer.add_add_bos_token(add_bos)
    if template is not None:
        writer.add_chat_template(template)
    if tool_template is not None:
        writer.add_string("tokenizer.chat_template.tool_use", tool_template)
    for end, value in sampling.items():
        writer.add_key_value(f"general.sampling.{end}", value, gguf.GGUFValueType.get_type(value))
    _write(writer)
    return path


def add_vocabulary(writer: gguf.GGUFWriter, controls: Sequence[str] = ()) -> None:
    """Add N_VOCAB tokens, bytes, specials and merges, and then `controls`."""
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([*byte_letters(), *SPECIALS, *(merge.replace(" ", "") for merge in MERGES), *controls])
    kinds = [gguf.TokenType.NORMAL] * 256 + [gguf.TokenType.CONTROL] * 4 + [gguf.TokenType.NORMAL] * len(MERGES)
    writer.add_token_types([*kinds, *[gguf.TokenType.CONTROL] * len(controls)])
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(BOS)
    writer.add_eos_token_id(EOS)
    writer.add_eot_token_id(IM_END)


def write_sentencepiece(path: Path, *, adds_blank: bool) -> Path:
    """Write a vocabulary of bytes and a few pieces, as sentencepiece makes them."""
    pieces = ["▁", "▁hello", "hello", "h", "e", "l", "o", "{", "}", "a", "b", "he", "ll", "x", "y", "z"]
    kinds = [gguf.TokenType.UNKNOWN, gguf.TokenType.CONTROL, gguf.TokenType.CONTROL]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("llama")
    writer.add_token_list(["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces])
    writer.add_token_scores([0.0] * 259 + [float(len(piece)) for piece in pieces])
    writer.add_token_types([*kinds, *[gguf.TokenType.BYTE] * 256, *[gguf.TokenType.NORMAL] * len(pieces)])
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_space_prefix(adds_blank)
    _write(writer)
    return path


def write_no_tokenizer(path: Path, n_vocab: int = 32) -> Path:
    """Write the file of a model whose tokenizer is "none"."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("none")
    writer.add_vocab_size(n_vocab)
    _write(writer)
    return path


def _write(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
