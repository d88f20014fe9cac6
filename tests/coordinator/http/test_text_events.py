"""An event that adds text alone is written around a text that was written once: the same bytes as any other way."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relayline.coordinator.http.replies.choice import ChoiceState, Ending, Growth
from relayline.coordinator.http.replies.dialect import Dialect, Header, SoFar
from relayline.coordinator.http.replies.openai_dialects import ChatDialect, CompletionDialect
from relayline.coordinator.sessions.generation import TokenEvent

TRICKY = '"content":"" "text":""'  # a model may be called anything
HEADER = Header("chatcmpl-1", 1_790_000_000, TRICKY, "relayline-1", return_token_ids=False)


def chat(each: Header, n_top: int) -> ChatDialect:
    return ChatDialect(each, None, n_top)  # type: ignore[arg-type]


def completion(each: Header, n_top: int) -> CompletionDialect:
    return CompletionDialect(each, None, n_top)  # type: ignore[arg-type]


@pytest.mark.parametrize("make", [chat, completion])
@given(text=st.text(min_size=1), index=st.integers(0, 3))
def test_a_text_is_written_as_in_any_event(
    make: Callable[[Header, int], ChatDialect | CompletionDialect], text: str, index: int
) -> None:
    text = text.encode("utf-8", "replace").decode()
    quick, plain = (make(HEADER, -1) for _ in range(2))
    plain.so_far = lambda: SoFar()  # as if events had to tell of the whole answer
    for each in (text, "", text):
        assert quick.growth_event(index, Growth(each)) == plain.growth_event(index, Growth(each))
    assert json.loads(quick.growth_event(index, Growth(text)))["model"] == TRICKY


def test_an_event_with_more_than_text_is_written_whole() -> None:
    dialect: Dialect = chat(HEADER, -1)
    assert isinstance(dialect, ChatDialect)
    thought = json.loads(dialect.growth_event(0, Growth("a", reasoning="b")))["choices"][0]["delta"]
    assert thought == {"content": "a", "reasoning_content": "b"}


@given(text=st.text(max_size=8), cuts=st.lists(st.integers(0, 24), max_size=6), raw=st.binary(max_size=4))
def test_plain_answers_have_the_text_of_those_that_are_looked_through(text: str, cuts: list[int], raw: bytes) -> None:
    whole = text.encode("utf-8", "replace") + raw
    ends = sorted({min(cut, len(whole)) for cut in cuts} | {len(whole)})
    pieces = [whole[at:end] for at, end in zip([0, *ends], ends, strict=False)]
    events = [TokenEvent(token, None, ()) for token in range(len(pieces) - 1)]
    events.append(TokenEvent(len(pieces) - 1, None, (), "length"))
    found = []
    for stops in ((), ("\0 never said",)):
        state = ChoiceState(pieces.__getitem__, Ending(stops), wants_logprobs=False, wants_tokens=False)
        found.append(("".join([state.on_event(event).text for event in events]), state.n_tokens, state.finish_reason))
    assert found == [(whole.decode("utf-8", "replace"), len(pieces), "length")] * 2
