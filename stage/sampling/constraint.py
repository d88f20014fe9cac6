"""The tokens that a session's grammar allows next. Decode thread only.

The grammar's text is llguidance's (Lark, or JSON around a JSON schema); the coordinator has made and checked it. Before
each pick the tokens that do not fit it lose all their chance; afterwards the pick is recorded. At the grammar's end
only the vocabulary's end tokens fit. The open of a session brings the tokens generated before it. If a position is
picked again, the grammar's state is that of the first pick: retried equals once.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import llama_cpp
import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from relayline.stage.sampling.grammars import grammars
from relayline.wire.common.bounds import GRAMMAR_BYTES_MAX, GRAMMAR_TOKENS_MAX
from relayline.wire.common.errors import InternalError, InvalidRequestError, ProtocolError
from relayline.wire.common.grammars import without_forcing

_NOTHING = np.float32(-np.inf)


def read_vocabulary(vocab: Any, n_vocab: int) -> LLTokenizer | None:
    """Return a llama.cpp vocabulary (its `llama_vocab *`) as grammars need it: 0.5 s for 128,000 tokens.

    It must not be used once the model is freed. None where the vocabulary has no text, or no token that ends one.
    """
    if llama_cpp.llama_vocab_type(vocab) == llama_cpp.LLAMA_VOCAB_TYPE_NONE:
        return None
    ends = [token for token in range(n_vocab) if llama_cpp.llama_vocab_is_eog(vocab, token)]
    return LLTokenizer(TokenizerWrapper(_Pieces(vocab, n_vocab, ends[0])), n_vocab, ends) if ends else None


class _Pieces:
    """A vocabulary in the form that llguidance asks for."""

    def __init__(self, vocab: Any, n_vocab: int, end: int) -> None:
        self._vocab = vocab
        self.eos_token_id, self.bos_token_id = end, None
        self.tokens = [_piece(vocab, token) for token in range(n_vocab)]
        no_text = llama_cpp.LLAMA_TOKEN_ATTR_CONTROL | llama_cpp.LLAMA_TOKEN_ATTR_UNKNOWN
        self.special_token_ids = [
            token for token in range(n_vocab) if llama_cpp.llama_vocab_get_attr(vocab, token) & no_text
        ]

    def __call__(self, text: bytes) -> list[int]:
        """Return the tokens of a text."""
        room = len(text) + 8
        ids = (ctypes.c_int32 * room)()
        return ids[: max(0, llama_cpp.llama_tokenize(self._vocab, text, len(text), ids, room, False, False))]


def _piece(vocab: Any, token: int) -> bytes:
    """Return the bytes of a token, of a special one its name."""
    room = 64
    while True:
        buffer = ctypes.create_string_buffer(room)
        size_bytes = int(llama_cpp.llama_token_to_piece(vocab, token, buffer, room, 0, True))
        if size_bytes >= 0:
            return buffer.raw[:size_bytes]
        room = -size_bytes


class Constraint:
    """The grammar of one session and how far it has come in it."""

    def __init__(self, vocabulary: LLTokenizer | None, grammar: str, said: Sequence[int]) -> None:
        """`said` are all tokens that the session has been given already.

        Raises ProtocolError for what no coordinator sends, InvalidRequestError for a grammar that cannot be used, if
        that is known by now; else `apply` does.
        """
        if len(grammar.encode()) > GRAMMAR_BYTES_MAX or len(said) > GRAMMAR_TOKENS_MAX:
            raise ProtocolError(f"a grammar of {len(grammar)} characters after {len(said)} tokens is too long")
        if vocabulary is None:
            raise InvalidRequestError(
                "this model's vocabulary has no texts or no end token, so it cannot follow a grammar"
            )
        if max(said, default=0) >= vocabulary.vocab_size:
            raise ProtocolError(f"a token of the answer is outside the vocabulary of {vocabulary.vocab_size}")
        self._vocabulary, self._grammar = vocabulary, grammar
        self._start, self._n_read = begin(vocabulary, grammar, said, take=True), len(said)
        self._said = list(said)
        self._first: int | None = None  # position of the first token of these; the first sample sets it
        self._matcher = self._restarted() if self._start.done() else None

    def apply(self, position: int, logits: npt.NDArray[np.float32]) -> None:
        """Take all chance from tokens that do not fit at `position`: their `logits` (f32 [n_vocab]) become -inf.

        Raises InvalidRequestError where the grammar is too complex, InternalError for a position behind the next.
        """
        self._go_to(position)
        matcher = self._matcher = self._matcher or self._restarted()
        bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        _check(matcher)
        fits = np.unpackbits(bits, count=logits.size, bitorder="little").view(np.bool_)
        np.copyto(logits, _NOTHING, where=~fits)

    def said(self, token: int) -> None:
        """Record the token picked from the logits that `apply` left."""
        if self._matcher is not None:  # else it reads this with the rest
            self._matcher.consume_token(token)
            _check(self._matcher)
        self._said.append(token)

    def _go_to(self, position: int) -> None:
        if self._first is None:
            self._first = position - len(self._said)
        n_said = position - self._first
        if not 0 <= n_said <= len(self._said):
            raise InternalError(
                f"position {position} was sampled out of order: {len(self._said)} tokens are known from position "
                f"{self._first} on"
            )
        if n_said < len(self._said):
            del self._said[n_said:]
            self._matcher = self._restarted()

    def _restarted(self) -> LLMatcher:
        """Return a matcher that has read the tokens so far. (Its `rollback` goes one token too far behind an end
        token.)
        """
        if len(self._said) < self._n_read:
            self._start, self._n_read = begin(self._vocabulary, self._grammar), 0
        # Sessions wait for it before they pick (stage.sampling.grammars.Holds).
        matcher = self._start.result().deep_copy()
        matcher.consume_tokens(self._said[self._n_read :])
        _check(matcher)
        return matcher


def begin(vocabulary: LLTokenizer, grammar: str, said: Sequence[int] = (), *, take: bool = False) -> Future[LLMatcher]:
    """Begin to prepare a grammar that has read the tokens so far, unless one is being prepared.

    `take`: no other caller will ask for it. Raises InvalidRequestError for invalid JSON.
    """
    text = without_forcing(grammar)
    is_readable = 0 < len(said) <= GRAMMAR_TOKENS_MAX and max(said) < vocabulary.vocab_size
    return grammars.read(vocabulary, text, said, take=take) if is_readable else grammars.ready(vocabulary, text)


def _check(matcher: LLMatcher) -> None:
    if matcher.is_error():
        reason = matcher.get_error().strip().split("\n", 1)[0]
        raise InvalidRequestError(f"the grammar cannot be used: {reason}")
