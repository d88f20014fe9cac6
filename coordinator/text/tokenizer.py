"""Text to token ids and back, with the vocabulary of the model's own GGUF. The coordinator's only llama.cpp module.

The file is loaded for its vocabulary alone (no weights are read), so a `tokenizer.gguf` of metadata without tensors is
enough. Nothing here decodes a model. Everything is safe to call from several threads once loaded: llama.cpp keeps the
state of a tokenisation on the stack of its caller, and the caches here only ever gain equal entries.
"""

from __future__ import annotations

import ctypes
import functools
import threading
import weakref
from pathlib import Path
from typing import Any, NamedTuple

import llama_cpp

from relayline.coordinator.text.special_tokens import Special, SpecialTokens, TooManyError
from relayline.wire.common.bounds import CTX_TOKENS_MAX
from relayline.wire.common.errors import ContextLengthError, InvalidRequestError, ModelFileError
from relayline.wire.common.texts import whole_number
from relayline.wire.model_files.gguf_header import read_header
from relayline.wire.model_files.model_check import check_header
from relayline.wire.model_files.rank_head import LABELS_KEY
from relayline.wire.model_files.recommended import NOTHING, read_recommended

_NO_DEVICES = (ctypes.c_void_p * 1)(None)
_VOCAB_TYPE_NONE = 0  # LLAMA_VOCAB_TYPE_NONE: `tokenizer.ggml.model` is "none"
_DIRECT_BYTES_MAX = 256  # of a text that llama.cpp may look through for special tokens itself
_LOG_LEVEL_ERROR = 4
_UNKNOWN = llama_cpp.LLAMA_TOKEN_ATTR_UNKNOWN
_CONTROL = llama_cpp.LLAMA_TOKEN_ATTR_CONTROL
_USER_DEFINED = llama_cpp.LLAMA_TOKEN_ATTR_USER_DEFINED
_LSTRIP = llama_cpp.LLAMA_TOKEN_ATTR_LSTRIP
_RSTRIP = llama_cpp.LLAMA_TOKEN_ATTR_RSTRIP
_META_TEXT_BYTES_MAX = 4096
_METADATA_MAX, _METADATA_CHARS_MAX = 256, 512  # entries of a file, and characters of one
# Tokens that end messages but not every answer, such as the thoughts in gpt-oss's.
MESSAGE_ENDS = (
    b"<|end|>",
    b"<|im_end|>",
    b"<|eot_id|>",
    b"<|eot|>",
    b"<end_of_turn>",
    b"<turn|>",
    b"<|END_OF_TURN_TOKEN|>",
)


class FillIn(NamedTuple):
    """The tokens that stand around a gap in a text, of a vocabulary that has them."""

    prefix: int
    suffix: int
    middle: int
    repository: int | None = None  # before the name of a project
    file: int | None = None  # before the name of a file of it


class Pairing(NamedTuple):
    """How a query and a document become one prompt, as the file of a reranker says."""

    template: str | None  # text with {query} and {document}; None: tokens stand around them
    before: list[int]  # the query
    between: list[int]
    after: list[int]  # the document


class _LogSink:
    """Swallows llama.cpp's log, which would otherwise go to stderr, and keeps each thread's first error line.

    The log callback is global to the process, so the newest caller of `install` owns it. Any other owner (a stage in
    the same test process, say) only takes the error lines away from here.
    """

    def __init__(self) -> None:
        self._lines = threading.local()
        self._callback = llama_cpp.llama_log_callback(self._on_line)  # kept alive: llama.cpp holds a bare pointer

    def _on_line(self, level: int, text: bytes, _user_data: object) -> None:
        if level == _LOG_LEVEL_ERROR and not getattr(self._lines, "first", ""):
            self._lines.first = text.decode("utf-8", errors="replace").strip()

    def install(self) -> None:
        """Take the log over and forget this thread's errors."""
        self._lines.first = ""
        llama_cpp.llama_log_set(self._callback, None)

    def first_error(self) -> str:
        """Return the first error line (the cause; the rest are consequences) on this thread since `install`, or ""."""
        return getattr(self._lines, "first", "")


_LOG = _LogSink()


class Tokenizer:
    """The vocabulary of one model. Make it with `load`."""

    def __init__(self, model: Any, path: Path) -> None:
        """`model` is a llama_model pointer whose ownership passes to this object, read from `path`."""
        self.path = path
        vocab = llama_cpp.llama_model_get_vocab(model)
        self._vocab = vocab
        self._release = weakref.finalize(self, llama_cpp.llama_model_free, model)
        self.n_vocab = int(llama_cpp.llama_vocab_n_tokens(vocab))
        self.has_text = int(llama_cpp.llama_vocab_type(vocab)) != _VOCAB_TYPE_NONE
        self.bos = _token_or_none(llama_cpp.llama_vocab_bos(vocab))
        self.eos = _token_or_none(llama_cpp.llama_vocab_eos(vocab))
        self.adds_bos = self.bos is not None and bool(llama_cpp.llama_vocab_get_add_bos(vocab))
        self.fill_in = _fill_in(vocab)
        self._names_bos = bool(_meta_text(model, b"tokenizer.ggml.bos_token_id"))
        architecture = _meta_text(model, b"general.architecture")
        # How the model's makers turn hidden rows into one embedding: llama.cpp's number, None where they say nothing.
        self.pooling = whole_number(_meta_text(model, f"{architecture}.pooling_type".encode()), 9)
        self.metadata = _metadata_of(model, architecture)
        self.name = _meta_text(model, b"general.name")
        self.chat_template = self._template(model, None)
        # For chats with tools, where the file has a separate template for these (Hermes 2, Command R).
        self.tool_template = self._template(model, b"tool_use")
        self.n_labels = whole_number(_meta_text(model, LABELS_KEY.encode()), 9) or 0  # of a reranker's head; 0: none
        self.pairing = _pairing(vocab, self._template(model, b"rerank"))
        self.recommended = NOTHING  # sampling options, by the file
        self._pieces: dict[tuple[int, bool], bytes] = {}  # bounded by two entries per token of the vocabulary

    @classmethod
    def load(cls, path: Path) -> Tokenizer:
        """Load the vocabulary of a GGUF file, with or without tensors.

        Raises ModelFileError if the file is missing or llama.cpp does not understand it.
        """
        if not path.is_file():
            raise ModelFileError(f"{path}: no such tokenizer file")
        header = read_header(path)
        check_header(header)
        _LOG.install()
        params = llama_cpp.llama_model_default_params()
        params.vocab_only = True
        # Without a list llama.cpp looks at every GPU, and each process that does keeps half a GiB of it.
        params.devices = ctypes.addressof(_NO_DEVICES)
        model = llama_cpp.llama_model_load_from_file(bytes(path), params)
        if not model:
            reason = _LOG.first_error() or "llama.cpp gave no reason"
            raise ModelFileError(f"{path}: cannot load its tokenizer: {reason}")
        tokenizer = cls(model, path)
        tokenizer.recommended = read_recommended(header.entries)
        return tokenizer

    @property
    def bos_text(self) -> str:
        """The text of the begin-of-sequence token, as chat templates write it; empty if there is none.

        Where a file names none, llama.cpp takes a number that is an ordinary token of most vocabularies.
        """
        is_mark = self.bos is not None and llama_cpp.llama_vocab_get_attr(self._vocab, self.bos) & _CONTROL
        return self._special_text(self.bos) if self._names_bos or is_mark else ""

    @property
    def eos_text(self) -> str:
        """The text of the end-of-sequence token; empty if there is none."""
        return self._special_text(self.eos)

    def encode(
        self,
        text: str,
        *,
        add_special: bool = True,
        parse_special: bool = True,
        ctx_tokens: int = CTX_TOKENS_MAX,
        param: str = "prompt",
    ) -> list[int]:
        """Return the token ids of `text`, at most `ctx_tokens` plus those that the vocabulary adds.

        `add_special` adds the tokens that the vocabulary wants around a prompt (usually a begin token, often none);
        `parse_special` reads the text of special tokens as those tokens. Raises InvalidRequestError naming `param` when
        the model has no tokenizer; ContextLengthError for a text that cannot fit, before costly work.
        """
        if not self.has_text:
            raise InvalidRequestError("this model has no tokenizer; send token ids", param=param)
        self.check_size(text, ctx_tokens, param)
        raw = text.encode("utf-8", errors="replace")  # a lone surrogate is not text any vocabulary knows
        if len(raw) <= _DIRECT_BYTES_MAX:
            return self._encode(raw, add_special=add_special, parse_special=parse_special)
        try:
            ids = self._pieces_of(raw, parse_special, ctx_tokens)
        except TooManyError:
            raise ContextLengthError.of_prompt(ctx_tokens, f"more than {ctx_tokens} tokens", param) from None
        before, after = self._around if add_special else ([], [])
        return [*before, *ids, *after]

    def encode_bytes(self, raw: bytes) -> list[int]:
        """Return the token ids of some bytes of a text, with no special token among or around them."""
        return self._encode(raw, add_special=False, parse_special=False)

    @functools.cached_property
    def words(self) -> list[bytes]:
        """Each token as its own text. Computed on first use: some 0.3 s for 128,000 tokens."""
        return [self._read_word(token) for token in range(self.n_vocab)] if self.has_text else []

    def _read_word(self, token: int) -> bytes:
        room = 64
        while True:
            buffer = ctypes.create_string_buffer(room)
            one = (ctypes.c_int32 * 1)(token)
            size_bytes = int(llama_cpp.llama_detokenize(self._vocab, one, 1, buffer, room, False, True))
            if size_bytes >= 0:
                return buffer.raw[:size_bytes]
            room = -size_bytes

    def check_size(self, text: str, ctx_tokens: int, param: str) -> None:
        """Raise ContextLengthError for a text that no tokens could fit into `ctx_tokens`."""
        # No character has less than one byte, and no token covers more than the longest does.
        if len(text) > ctx_tokens and len(text) > ctx_tokens * self.longest_piece_bytes:
            size = f"{len(text)} characters, of which one token covers {self.longest_piece_bytes} at most"
            raise ContextLengthError.of_prompt(ctx_tokens, size, param)

    @functools.cached_property
    def longest_piece_bytes(self) -> int:
        """The most bytes of text in one token. Computed on first use: 0.5 s for 128,000 tokens."""
        pieces = (len(self._read_piece(token, special=True)) for token in range(self.n_vocab))
        return max(1, max(pieces, default=1)) if self.has_text else 1

    @functools.cached_property
    def _specials(self) -> SpecialTokens:
        flags = _CONTROL | _USER_DEFINED | _UNKNOWN
        found = []
        for token in range(self.n_vocab):
            attributes = llama_cpp.llama_vocab_get_attr(self._vocab, token)
            text = llama_cpp.llama_vocab_get_text(self._vocab, token) if attributes & flags else b""
            if text:
                is_control = bool(attributes & (_CONTROL | _UNKNOWN))
                found.append(Special(token, text, is_control, bool(attributes & _LSTRIP), bool(attributes & _RSTRIP)))
        return SpecialTokens(found, lambda raw: self._encode(raw, add_special=False, parse_special=True))

    @functools.cached_property
    def _around(self) -> tuple[list[int], list[int]]:
        """The tokens that the vocabulary adds before and behind a text."""
        plain = self._encode(b"a", add_special=False, parse_special=False)
        whole = self._encode(b"a", add_special=True, parse_special=False)
        at = next((at for at in range(len(whole)) if whole[at : at + len(plain)] == plain), 0)
        return whole[:at], whole[at + len(plain) :]

    def _pieces_of(self, raw: bytes, parse_special: bool, n_max: int) -> list[int]:
        ids: list[int] = []
        for part in self._specials.split(raw, parse_special=parse_special, n_max=n_max):
            if isinstance(part, int):
                ids.append(part)
            else:
                ids += self._encode(part, add_special=False, parse_special=False)
            if len(ids) > n_max:
                raise TooManyError
        return ids

    def _encode(self, raw: bytes, *, add_special: bool, parse_special: bool) -> list[int]:
        """Return llama.cpp's own tokenisation."""
        room = len(raw) + 8
        while True:
            ids = (ctypes.c_int32 * room)()
            n_tokens = int(llama_cpp.llama_tokenize(self._vocab, raw, len(raw), ids, room, add_special, parse_special))
            if n_tokens >= 0:
                return ids[:n_tokens]
            room = -n_tokens

    def encode_chat(self, rendered: str, ctx_tokens: int = CTX_TOKENS_MAX) -> list[int]:
        """Return the token ids of a rendered chat template. Raises as `encode`.

        Templates write their special tokens out, often the begin token too. It is added only when the vocabulary wants
        one and the template did not write it, so there is never a second.
        """
        ids = self.encode(rendered, add_special=False, ctx_tokens=ctx_tokens, param="messages")
        if self.adds_bos and self.bos is not None and ids[:1] != [self.bos]:
            ids.insert(0, self.bos)
        return ids

    def piece(self, token: int, *, special: bool = False) -> bytes:
        """Return the bytes that a token contributes to the text, not always whole characters.

        Control tokens contribute nothing unless `special` asks for their names. A token outside the vocabulary, and
        any token of a model without a tokenizer, is empty.
        """
        key = (token, special)
        found = self._pieces.get(key)
        if found is None:
            if not self.has_text or not 0 <= token < self.n_vocab:
                return b""  # llama.cpp would throw through C, which ends the process
            found = self._pieces[key] = self._read_piece(token, special)
        return found

    def is_end(self, token: int) -> bool:
        """Return whether the model ends its turn with this token."""
        return 0 <= token < self.n_vocab and bool(llama_cpp.llama_vocab_is_eog(self._vocab, token))

    @functools.cached_property
    def message_ends(self) -> frozenset[int]:
        """The tokens that end a message of a chat, of any role: those that end answers, and a few known ones."""
        if not self.has_text:
            return frozenset()
        named = (self._encode(name, add_special=False, parse_special=True) for name in MESSAGE_ENDS)
        return frozenset(ids[0] for ids in named if len(ids) == 1) | frozenset(filter(self.is_end, range(self.n_vocab)))

    def decode(self, tokens: list[int] | tuple[int, ...], *, special: bool = True) -> str:
        """Return the text of a token sequence; bytes that are not UTF-8 become U+FFFD."""
        return b"".join(self.piece(token, special=special) for token in tokens).decode("utf-8", errors="replace")

    def warm(self) -> None:
        """Compute now the facts that are otherwise computed for the first text."""
        if self.has_text:
            _ = self.longest_piece_bytes, self._specials, self._around

    def close(self) -> None:
        """Free the native vocabulary. The object must not be used afterwards."""
        self._release()

    def _template(self, model: Any, name: bytes | None) -> str | None:
        template = llama_cpp.llama_model_chat_template(model, name) if self.has_text else None
        return template.decode("utf-8", errors="replace") if template else None

    def _read_piece(self, token: int, special: bool) -> bytes:
        room = 64
        while True:
            buffer = ctypes.create_string_buffer(room)
            size_bytes = int(llama_cpp.llama_token_to_piece(self._vocab, token, buffer, room, 0, special))
            if size_bytes >= 0:
                return buffer.raw[:size_bytes]
            room = -size_bytes

    def _special_text(self, token: int | None) -> str:
        return "" if token is None else self.piece(token, special=True).decode("utf-8", errors="replace")


def _fill_in(vocab: Any) -> FillIn | None:
    """Return the tokens around a gap, None where one of the three that are needed is missing."""
    prefix, suffix, middle = (
        _token_or_none(find(vocab))
        for find in (llama_cpp.llama_vocab_fim_pre, llama_cpp.llama_vocab_fim_suf, llama_cpp.llama_vocab_fim_mid)
    )
    if prefix is None or suffix is None or middle is None:
        return None
    repository = _token_or_none(llama_cpp.llama_vocab_fim_rep(vocab))
    file = _token_or_none(llama_cpp.llama_vocab_fim_sep(vocab))
    return FillIn(prefix, suffix, middle, repository, file)


def _pairing(vocab: Any, template: str | None) -> Pairing:
    """Return what llama-server's format_prompt_rerank puts around two texts."""
    bos, eos, sep = (
        _token_or_none(find(vocab))
        for find in (llama_cpp.llama_vocab_bos, llama_cpp.llama_vocab_eos, llama_cpp.llama_vocab_sep)
    )
    end = eos if eos is not None else sep
    ends = [end] if end is not None and llama_cpp.llama_vocab_get_add_eos(vocab) else []
    begins = [bos] if bos is not None and llama_cpp.llama_vocab_get_add_bos(vocab) else []
    parts = [sep] if sep is not None and llama_cpp.llama_vocab_get_add_sep(vocab) else []
    return Pairing(template, begins, [*ends, *parts], ends)


def _token_or_none(token: int) -> int | None:
    return int(token) if token >= 0 else None


def _metadata_of(model: Any, architecture: str) -> dict[str, str]:
    """Return what a file says of the model and its shape, as text: `general.*` and the keys of its architecture."""
    found: dict[str, str] = {}
    buffer = ctypes.create_string_buffer(_META_TEXT_BYTES_MAX)
    for index in range(int(llama_cpp.llama_model_meta_count(model))):
        llama_cpp.llama_model_meta_key_by_index(model, index, buffer, _META_TEXT_BYTES_MAX)
        key = buffer.value.decode("utf-8", errors="replace")
        if key.startswith(("general.", f"{architecture}.")) and len(found) < _METADATA_MAX:
            found[key] = _meta_text(model, key.encode())[:_METADATA_CHARS_MAX]
    return found


def _meta_text(model: Any, key: bytes) -> str:
    buffer = ctypes.create_string_buffer(_META_TEXT_BYTES_MAX)
    size_bytes = int(llama_cpp.llama_model_meta_val_str(model, key, buffer, _META_TEXT_BYTES_MAX))
    return buffer.value.decode("utf-8", errors="replace") if size_bytes >= 0 else ""
