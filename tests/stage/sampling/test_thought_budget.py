"""The bound of thoughts: llama.cpp's state machine as a plain definition, compared with a stage's tokens.

Also from the middle of an answer, as after a loss, and with positions that are picked again, as behind a wrong draft.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLTokenizer, TokenizerWrapper

from relayline.stage.sampling.penalties import Penalties
from relayline.stage.sampling.rows import Ask, sample_rows
from relayline.stage.sampling.sampler import SamplingOptions, SessionSampler
from relayline.stage.sampling.thought_budget import ThoughtBudget
from relayline.wire.common.bounds import LAST_WORDS_BYTES_MAX, LAST_WORDS_TOKENS_MAX, THOUGHT_MARK_TOKENS_MAX
from relayline.wire.common.errors import ProtocolError
from relayline.wire.common.thoughts import ThoughtMarks, Thoughts, marks_from, read_last_words

N_VOCAB, AT = 6, 40  # the prompt's tokens
MARKS = st.lists(st.integers(0, N_VOCAB - 1), min_size=1, max_size=2).map(tuple)
# Token 5 is the first byte of a character of three, token 4 a further one.
PIECES = [b"a", b"b", b"c", b"d", b"\x82", b"\xe2"]


class Bytes:
    """A vocabulary of the 256 bytes and an end, as llguidance asks for one."""

    eos_token_id, bos_token_id = 256, None
    special_token_ids = (256,)
    tokens = (*(bytes([byte]) for byte in range(256)), b"<end>")

    def __call__(self, text: bytes) -> list[int]:
        return [*text]


def bytes_of(tokens: list[int]) -> bytes:
    return b"".join(PIECES[token] for token in tokens)


def is_cut(text: bytes) -> bool:
    """Whether a text ends within a character. Bytes that no character could have are none."""
    tail = text[-3:]
    return tail.endswith(b"\xe2") or tail[-2:] == b"\xe2\x82"


class Plainly:
    """What `common/reasoning-budget.cpp` of llama.cpp does, token by token."""

    def __init__(self, marks: ThoughtMarks, budget: int, *, is_thinking: bool) -> None:
        self.marks, self.budget, self.said = marks, budget, list[int]()
        self.forced: list[int] = []
        self.n_left: int | None = budget if is_thinking else None
        self.check()

    def check(self) -> None:
        if self.n_left is not None and not self.forced and self.n_left <= 0:
            if is_cut(bytes_of(self.said)) and self.n_left > -3:
                return
            self.forced = [*self.marks.last_words, *self.marks.end]

    def pick(self, logits: np.ndarray) -> int:
        token = self.forced.pop(0) if self.forced else int(logits.argmax())
        was_forced = bool(self.forced)
        self.said.append(token)
        mark = self.marks.begin if self.n_left is None else self.marks.end
        if self.said[-len(mark) :] == [*mark]:
            self.n_left = self.budget if self.n_left is None else None
            self.forced = []
        elif self.n_left is not None and not was_forced:
            self.n_left -= 1
        self.check()
        return token


@settings(max_examples=200)
@given(
    begin=MARKS,
    end=MARKS,
    words=st.lists(st.integers(0, N_VOCAB - 1), max_size=3).map(tuple),
    budget=st.integers(0, 6),
    is_thinking=st.booleans(),
    seed=st.integers(0, 1000),
    cut=st.integers(1, 39),
    n_again=st.integers(0, 8),
)
def test_each_pick_is_that_of_the_definition(
    begin: tuple[int, ...], end: tuple[int, ...], words: tuple[int, ...], budget: int, is_thinking: bool,
    seed: int, cut: int, n_again: int,
) -> None:  # fmt: skip
    marks = ThoughtMarks(begin, end, words)
    rows = np.random.default_rng(seed).standard_normal((40, N_VOCAB)).astype(np.float32)
    plain = Plainly(marks, budget, is_thinking=is_thinking)
    wanted = [plain.pick(row) for row in rows]

    def made(said: list[int], begun_at: int | None) -> Penalties:
        return Penalties(0, 0, (), said, N_VOCAB, thoughts=ThoughtBudget(marks, budget, begun_at, bytes_of))

    def picked(sampler: Penalties, at: int) -> int:
        out = np.empty(N_VOCAB, np.float32)
        sampler.apply(rows[at], AT + at, out)
        sampler.said(token := int(out.argmax()))
        return token

    begun_at = AT if is_thinking else None
    sampler = made([], begun_at)
    assert [picked(sampler, at) for at in range(40)] == wanted
    back = max(0, 40 - n_again)
    assert [picked(sampler, at) for at in range(back, 40)] == wanted[back:], "picked again"
    thoughts = Thoughts(marks, begun_at)
    thoughts.read(wanted[:cut], AT)
    later = made(wanted[:cut], thoughts.begun_at)
    assert [picked(later, at) for at in range(cut, 40)] == wanted[cut:], "elsewhere, behind what was said"


def test_marks_that_are_joined_with_the_ends_of_their_lines_are_seen() -> None:
    marks = ThoughtMarks((1, 2, 3), (4, 2, 3), (), (33,), (33, 34))
    thoughts = Thoughts(marks)
    thoughts.read([1, 2, 33, 9, 9], AT)
    assert thoughts.begun_at == AT + 3
    thoughts.read([9, 4, 2, 34, 8], AT + 5)
    assert thoughts.begun_at is None
    assert marks_from([*marks], 40) == marks


MARKED = ((1,), (2,), (3, 4))
NUMBERS = {"thought_tokens_max": 3.0, "thoughts_begun_at": 7.0}


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"allowed_tokens": (0, 5)},
        {"logit_bias": ((3, -100.0), (0, 50.0))},
        {"held_back_tokens": (2, 3)},
        {"bad_words": ((3, 4), (2,))},
        {"numbers": {"mirostat": 2.0}},
        {"numbers": {"adaptive_target": 0.3}},
        {"numbers": {"typical_p": 0.5, "top_n_sigma": 1.0, "xtc_probability": 1.0, "dynatemp_range": 0.5}},
        {"numbers": {"repetition_penalty": 2.0, "dry_multiplier": 9.0}},
        {"top_k": 2, "top_p": 0.4, "min_p": 0.3, "n_logprobs": 2},
    ],
    ids=str,
)
def test_last_words_come_whatever_else_is_asked_for(more: dict[str, Any], temperature: float) -> None:
    numbers = {**NUMBERS, "held_back_until": 99.0, **more.get("numbers", {})}
    options = SamplingOptions(
        **{"temperature": temperature, "seed": 3, "thought_marks": MARKED, **more, "numbers": numbers}
    )
    rows = np.random.default_rng(5).standard_normal((9, N_VOCAB)).astype(np.float32)
    rows[:, 1:3] = -9.0
    one, other = SessionSampler(options, N_VOCAB), SessionSampler(options, N_VOCAB)
    alone = [one.sample(row, 7 + at) for at, row in enumerate(rows)]
    assert [each.token for each in alone[3:6]] == [3, 4, 2]
    plain = SessionSampler(SamplingOptions(temperature=temperature, seed=4), N_VOCAB)
    pairs = [sample_rows([Ask(other, row, 7 + at), Ask(plain, rows[8], 70 + at)])[0] for at, row in enumerate(rows)]
    assert pairs == alone, "together with rows of another session"


def test_what_a_grammar_asks_for_comes_behind_the_thoughts() -> None:
    vocabulary = LLTokenizer(TokenizerWrapper(Bytes()), 257, [256])
    mark = tuple(b"</think>")
    options = SamplingOptions(
        temperature=0.0,
        grammar='start: THOUGHT "</think>" /[0-9]{3}/\nTHOUGHT: /[^<]*/',
        thought_marks=((1, 2), mark, tuple(b" So:")),
        numbers={"thought_tokens_max": 5.0, "thoughts_begun_at": 3.0},
    )
    sampler = SessionSampler(options, vocabulary.vocab_size, vocabulary=vocabulary)
    rows = np.random.default_rng(5).standard_normal((30, vocabulary.vocab_size)).astype(np.float32)
    rows[:, ord("x")] = 20.0
    said = bytes(sampler.sample(row, 3 + at).token for at, row in enumerate(rows[:20]))
    assert said.startswith(b"xxxxx So:</think>")
    assert said[-3:].isdigit()


def test_an_answer_that_names_the_mark_of_thoughts_still_fits_its_grammar() -> None:
    vocabulary = LLTokenizer(TokenizerWrapper(Bytes()), 257, [256])
    options = SamplingOptions(
        temperature=0.0,
        grammar=r'start: /"[a-z <>]*"/',
        thought_marks=(tuple(b"<think>"), tuple(b"</think>"), tuple(b"\nSo.\n")),
        numbers={"thought_tokens_max": 3.0},
    )
    sampler, text, said = SessionSampler(options, 257, vocabulary=vocabulary), b'"use <think> for thoughts"', b""
    for at, byte in enumerate(text):
        row = np.zeros(257, np.float32)
        row[byte] = 9.0
        said += bytes([sampler.sample(row, 3 + at).token])
    assert said == text


@pytest.mark.parametrize(
    "lists",
    [
        (),
        ((1,), (2,)),
        ((), (2,), ()),
        ((1,), (), ()),
        ((1,), (N_VOCAB,), ()),
        ((1,), (2,), (N_VOCAB,)),
        ((1,), (2,) * (THOUGHT_MARK_TOKENS_MAX + 1), ()),
        ((1,), (2,), (3,) * (LAST_WORDS_TOKENS_MAX + 1)),
    ],
)
def test_invalid_marks_are_refused(lists: tuple[tuple[int, ...], ...]) -> None:
    with pytest.raises(ProtocolError):
        marks_from(lists, N_VOCAB)
    with pytest.raises(ProtocolError):
        SessionSampler(SamplingOptions(thought_marks=lists, numbers=NUMBERS), N_VOCAB)


def test_last_words_are_bounded_by_their_bytes() -> None:
    assert read_last_words("1" * LAST_WORDS_BYTES_MAX)
    with pytest.raises(ValueError, match="192 bytes"):
        read_last_words("ü" * (LAST_WORDS_BYTES_MAX // 2 + 1))
    blank_and_digits = (0, *(1 for _ in range(LAST_WORDS_BYTES_MAX)))  # as SentencePiece has a text of digits
    assert marks_from(((1,), (2,), blank_and_digits), N_VOCAB).last_words == blank_and_digits
