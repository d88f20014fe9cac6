"""One choice as it grows: token events in, text and log probabilities out. Pure; shared by both routes and by streams.

A choice ends by a stop string or a line's end (both found here), by an end-of-generation token or by its length (both
said by the event).
"""

from __future__ import annotations

import codecs
import dataclasses
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

from relayline.coordinator.answers.reader import CallPart, Parts, Reader
from relayline.coordinator.sessions.generation import ImageRows, PromptScore, TokenEvent
from relayline.coordinator.text.detokenize import TextAssembler
from relayline.coordinator.text.line_end import ANYWHERE, LineEnd, LineEndFinder
from relayline.coordinator.text.tokenizer import Tokenizer

FinishReason = Literal["stop", "length", "tool_calls"]

LOGPROB_MIN = -9999.0  # represents minus infinity, which JSON cannot carry


@dataclasses.dataclass(frozen=True, slots=True)
class Scored:
    """One generated token with its log probability."""

    token: int
    logprob: float  # natural log
    top: tuple[tuple[int, float], ...]  # (token, logprob), largest first
    offset_chars: int  # characters of text before this token


@dataclasses.dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt as token ids, with the text to repeat before its choices (empty without `echo`), and its images."""

    tokens: tuple[int, ...]
    echo: str = ""
    images: tuple[ImageRows, ...] = ()


class Growth(NamedTuple):
    """The part that one event, or a whole choice, adds. A tuple, because one is made for every token."""

    text: str = ""
    tokens: tuple[int, ...] = ()
    scored: tuple[Scored, ...] = ()
    reasoning: str = ""
    calls: tuple[CallPart, ...] = ()
    stop: str = ""  # the stop string that ended the choice
    prompt: Prompt | None = None  # of a whole choice, if the log probabilities of its prompt are wanted
    prompt_scores: tuple[PromptScore, ...] = ()  # of that prompt's tokens but the first

    def __bool__(self) -> bool:
        return bool(self.text or self.tokens or self.scored or self.reasoning or self.calls)

    def whole_calls(self) -> list[CallPart]:
        """Return one part for each call, with all its arguments."""
        arguments: dict[int, list[str]] = {}
        for part in self.calls:
            arguments.setdefault(part.index, []).append(part.arguments)
        named = [part for part in self.calls if part.name]
        return [dataclasses.replace(part, arguments="".join(arguments[part.index])) for part in named]


@dataclasses.dataclass(frozen=True, slots=True)
class Ending:
    """The ends of a choice besides its end token and its length."""

    stops: tuple[str, ...] = ()
    tokens: frozenset[int] = frozenset()
    min_tokens: int = 0  # before this many tokens none of these ends it
    shows_stop: bool = False  # the string or token is shown
    line_end: LineEnd = ANYWHERE  # counts as its length
    at_once: bool = False  # before its first token, which is not shown; counts as its length


class ChoiceState:
    """Follows one choice from its first event to its finish reason."""

    def __init__(
        self,
        piece: Callable[[int], bytes],
        ending: Ending,
        *,
        wants_logprobs: bool,
        wants_tokens: bool,
        offset_chars: int = 0,
        reader: Reader | None = None,
    ) -> None:
        """`piece` gives a token's bytes; `offset_chars` is the length of text shown before (an echoed prompt).

        `reader` splits the text into reasoning, text and calls.
        """
        self._piece = piece
        self._reader = reader
        self._ending = ending
        self._assembler = TextAssembler(ending.stops, shows_stop=ending.shows_stop)
        self._line_end = LineEndFinder(ending.line_end) if ending.line_end != ANYWHERE else None
        self._wants_logprobs = wants_logprobs
        self._wants_tokens = wants_tokens
        # Most answers: text, and nothing that could end one but their last event.
        may_end = ending.stops or ending.tokens or self._line_end or ending.at_once
        self._is_plain = not (wants_logprobs or wants_tokens or reader or may_end)
        self._offset_chars = offset_chars
        self.n_tokens = 0  # generated, whether they became text or not
        self.n_thought = 0  # of those, where reasoning is shown separately
        self.n_predicted = 0  # of those, tokens that the client's prediction had right
        self.n_cached = 0  # of the prompt, not computed for this choice
        self.finish_reason: FinishReason | None = None
        self.first_ns = 0  # when the first token came, where timings or a time limit are wanted

    def is_finished(self) -> bool:
        """Return whether the choice has its finish reason."""
        return self.finish_reason is not None

    def on_event(self, event: TokenEvent, elapsed_ns: int = 0) -> Growth:
        """Take the next event, which came so long after the first token; events after the finish change nothing."""
        if self.finish_reason is not None:
            return Growth()
        self.n_tokens += 1
        if self._is_plain and event.finish_reason is None and not event.prompt_scores:
            self.n_predicted += event.is_predicted
            self.n_cached += event.n_cached
            return Growth(self._assembler.push(self._piece(event.token)))
        return self._take(event, elapsed_ns)

    def _take(self, event: TokenEvent, elapsed_ns: int) -> Growth:
        self.n_predicted += event.is_predicted
        self.n_cached += event.n_cached
        if self._ending.at_once:
            self.n_tokens, self.finish_reason = 0, "length"
            return Growth(prompt_scores=event.prompt_scores)
        text = ""
        scored: tuple[Scored, ...] = ()
        may_stop = self.n_tokens > self._ending.min_tokens
        is_stop_token = may_stop and event.token in self._ending.tokens
        if not event.is_end_token:
            scored = self._score(event)
        if not event.is_end_token and (not is_stop_token or self._ending.shows_stop):
            text = self._assembler.push(self._piece(event.token), may_stop=may_stop)
        if event.finish_reason is not None or is_stop_token:
            text += self._assembler.finish()
            self.finish_reason = "stop" if is_stop_token else event.finish_reason
        if self._assembler.stopped:
            self.finish_reason = "stop"
        if self._line_end is not None:
            text = self._line_end.push(text, elapsed_ns)
            self.finish_reason = "length" if self._line_end.is_over else self.finish_reason
        parts = self._read(text)
        tokens = (event.token,) if self._wants_tokens else ()
        return Growth(
            parts.text,
            tokens,
            scored,
            parts.reasoning,
            parts.calls,
            self._assembler.stop,
            prompt_scores=event.prompt_scores,
        )

    def _read(self, text: str) -> Parts:
        reader = self._reader
        if reader is None:
            return Parts(text)
        was_thinking = reader.is_thinking
        parts = reader.push(text)
        self.n_thought += was_thinking or reader.is_thinking  # the marks around it included
        if reader.is_over:
            self.finish_reason = "tool_calls"
        elif self.finish_reason is not None:
            parts = parts.with_more(reader.finish(is_cut=self.finish_reason == "length"))
            # Clients run what `tool_calls` ends, and arguments that were cut are no JSON.
            if reader.n_calls and not reader.has_cut_call and self.finish_reason == "stop":
                self.finish_reason = "tool_calls"
        return parts

    def _score(self, event: TokenEvent) -> tuple[Scored, ...]:
        if not self._wants_logprobs or event.logprob is None:
            return ()
        top = tuple((token, max(logprob, LOGPROB_MIN)) for token, logprob in event.top_logprobs)
        offset_chars = self._offset_chars + self._assembler.n_chars_decoded
        return (Scored(event.token, max(event.logprob, LOGPROB_MIN), top, offset_chars),)


class Speller:
    """Names tokens in log probabilities: each needs its own text, even if it is half a character."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def offsets(self, tokens: Sequence[int], text: str) -> list[int]:
        """Return for each token of a prompt the number of characters of its text before it.

        A token that is not in the text, such as the one that begins every prompt, adds none.
        """
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        n_chars, found = 0, []
        for token in tokens:
            found.append(n_chars)
            piece = decoder.decode(self._tokenizer.piece(token, special=True))
            for shown in (piece, piece.lstrip()):  # some vocabularies put a blank before the first word
                if text.startswith(shown, n_chars):
                    n_chars += len(shown)
                    break
        return found

    def spell(self, token: int) -> tuple[str, bytes]:
        """Return the token's name and bytes.

        Bytes that are no text are written `bytes:\\xe2\\x82`, as OpenAI does; without a tokenizer, `token_id:5`.
        """
        if not self._tokenizer.has_text:
            return f"token_id:{token}", b""
        raw = self._tokenizer.piece(token, special=True)
        try:
            return raw.decode(), raw
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw), raw
