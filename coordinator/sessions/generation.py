"""The interface between the HTTP side and the pipeline side of the coordinator: requests in, token events out.

This module knows neither HTTP nor gRPC. The HTTP side turns a request body into a validated `GenerationRequest`, and
nothing checks it again. The pipeline side turns it into frames and answers with `TokenEvent`s.
"""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from relayline.coordinator.sessions.tenants import ANYONE, Tenant
from relayline.wire.common.phase import Phase
from relayline.wire.common.sampler_fields import BY_NAME, POOLINGS
from relayline.wire.common.thoughts import ThoughtMarks, Thoughts

if TYPE_CHECKING:
    from relayline.coordinator.sessions.request_log import RequestRecord

FinishReason = Literal["stop", "length"]


@dataclasses.dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the last stage picks tokens of one session: penalties, grammar, top-k, top-p, min-p, temperature, draw."""

    temperature: float = 1.0  # 0 picks the largest logit and ignores the filters and the seed
    top_k: int = 0  # 0 keeps all
    top_p: float = 1.0  # 1.0 keeps all
    min_p: float = 0.0  # 0.0 keeps all
    seed: int = 0  # u64; the draw for a position depends on (seed, position) only
    n_logprobs: int = -1  # -1: no logprobs; 0: the chosen token's; k: also the k largest (bounds.LOGPROBS_MAX)
    frequency_penalty: float = 0.0  # taken off a token's logit for each time it was generated (PENALTY_TOKENS_MAX)
    presence_penalty: float = 0.0  # taken off once if it was
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token, number added to its logit)
    grammar: str = ""  # of llguidance, checked: only what fits it is picked; empty: everything
    numbers: tuple[tuple[str, float], ...] = ()  # of wire.common.sampler_fields, those that are not neutral
    allowed_tokens: tuple[int, ...] = ()  # only these are picked; empty: all
    held_back_tokens: tuple[int, ...] = ()  # not picked before the number `held_back_until`, a position
    bad_words: tuple[tuple[int, ...], ...] = ()  # the last token of none is picked behind its others

    dry_breakers: tuple[int, ...] = ()  # ascending: tokens over which no repetition reaches
    dry_sequences: tuple[tuple[int, ...], ...] = ()  # a token that begins such a break, and those that must follow it
    thought_marks: ThoughtMarks | None = None  # of an answer whose thoughts have a bound

    def number(self, name: str) -> float:
        """Return one of the numbers, its neutral value where it is not said."""
        return dict(self.numbers).get(name, BY_NAME[name].neutral)

    @property
    def looks_at_prompt(self) -> bool:
        """Whether a pick depends on the prompt's tokens as well as the logits."""
        return self.number("repetition_penalty") != 1.0 or self.number("dry_multiplier") != 0.0

    @property
    def reads_all(self) -> bool:
        """Whether each row of the prompt is pooled, so that none may be copied."""
        return self.number("pooling") == POOLINGS["mean"]

    @property
    def has_lists(self) -> bool:
        """Whether stages need lists of tokens besides the generated ones."""
        lists = self.allowed_tokens or self.held_back_tokens or self.bad_words or self.thought_marks
        return bool(self.looks_at_prompt or lists)

    @property
    def is_penalised(self) -> bool:
        """Whether tokens are penalised for having been picked before."""
        return self.frequency_penalty != 0 or self.presence_penalty != 0

    @property
    def looks_back(self) -> bool:
        """Whether sampling depends on the tokens sampled before."""
        is_led = self.bad_words or self.grammar or self.thought_marks
        return self.is_penalised or self.looks_at_prompt or self.carries or bool(is_led)

    @property
    def carries(self) -> bool:
        """Whether each sample says where mirostat or adaptive-p stands, and the next open has to."""
        return self.number("mirostat") != 0 or self.number("adaptive_target") >= 0

    def behind(self, said: Sequence[int], n_prompt: int) -> SamplingParams:
        """Return the same for a session that has said this behind its prompt: with where its thoughts began."""
        if self.thought_marks is None or not said:
            return self
        numbers = dict(self.numbers)
        begun_at = numbers.pop("thoughts_begun_at", None)
        thoughts = Thoughts(self.thought_marks, None if begun_at is None else int(begun_at))
        thoughts.read(said, n_prompt)
        if thoughts.begun_at is not None:
            numbers["thoughts_begun_at"] = float(thoughts.begun_at)
        return dataclasses.replace(self, numbers=tuple(sorted(numbers.items())))

    def resumed(self, mirostat_mu: float | None) -> SamplingParams:
        """Return the same for a session that stands there; None: it begins."""
        if mirostat_mu is None:
            return self
        return dataclasses.replace(self, numbers=(*self.numbers, ("mirostat_mu", mirostat_mu)))


ROW_TOKEN_MIN = 1 << 30  # a number from here on represents a row of a media file; no vocabulary has as many


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class ImageRows:
    """Rows of an image or of audio that follow each other in a prompt. Their numbers in its tokens are made from the
    file's bytes.

    So two prompts with equal tokens have equal rows, and the rows themselves are never compared.
    """

    start: int  # position of the first one
    rows: npt.NDArray[np.float32]  # [n, n_embd]
    are_mutual: bool = False  # each attends to all of them, also to later ones: they are computed in one step
    grid: tuple[int, int] | None = None  # width and height in rows, where positions have several axes

    @property
    def end(self) -> int:
        """The position behind the last one."""
        return self.start + len(self.rows)


class Cells(NamedTuple):
    """What cells of equal tokens have in common, where one request may use those of another."""

    adapter: int = 0
    """The choice of LoRA adapters that they are computed with."""
    circle: str = ""
    """Whom they serve, see `circle_of`."""


@dataclasses.dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One admitted-or-refused unit of work: a prompt and how far to continue it."""

    request_id: str  # shown to the client and in logs; unique per request
    prompt_tokens: tuple[int, ...]  # at least one, each inside the vocabulary, or of `images`
    max_tokens: int  # >= 1; len(prompt_tokens) + max_tokens <= tokens per stream
    sampling: SamplingParams
    said: tuple[int, ...] = ()  # the answer's first tokens, which were generated before; fewer than max_tokens
    ignore_eos: bool = False  # continue past an end-of-generation token
    wants_logits: bool = False  # certification: whole rows of logits with every token
    cache_prompt: bool = True  # may use the prefix cache and add to it
    circle: str = ""  # it shares prefixes with requests of the same one alone, see `circle_of`
    prediction: tuple[int, ...] = ()  # the client's predicted output: drafts are looked up there too
    scores_prompt: bool = False  # the prompt's own tokens get log probabilities too; then no part of it is copied
    wants_progress: bool = False  # its reader gets the progress of reading the prompt
    adapter: int = 0  # the choice of LoRA adapters that its rows are computed with
    images: tuple[ImageRows, ...] = dataclasses.field(default=(), compare=False)  # ascending; compared by their tokens
    tenant: Tenant = ANYONE  # who sent it; sessions are shared within one tenant only
    turn: int = dataclasses.field(default=0, compare=False)  # among its tenant's requests in line, see `turn_of`

    @property
    def cells(self) -> Cells:
        """What makes cells of the same tokens those of this request."""
        return Cells(self.adapter, self.circle)

    def border_behind(self, position: int) -> int | None:
        """Return where rows of an image begin or end next, behind a position of the prompt."""
        return next((at for each in self.images for at in (each.start, each.end) if at > position), None)

    def mutual_at(self, position: int) -> ImageRows | None:
        """Return the rows at a position if they attend to each other."""
        return next((each for each in self.images if each.are_mutual and each.start <= position < each.end), None)

    def grid_at(self, position: int) -> ImageRows | None:
        """Return the rows at a position if they have places on several axes."""
        return next((each for each in self.images if each.grid and each.start <= position < each.end), None)

    def whole_until(self, n_tokens: int) -> int:
        """Return how many of the first tokens can be copied or kept: an image with places on axes only as a whole."""
        image = self.grid_at(n_tokens) if self.images else None
        return n_tokens if image is None else image.start

    @property
    def mutual_rows_max(self) -> int:
        """The most rows that one step has to take, because they attend to each other; 0: none do."""
        return max((len(each.rows) for each in self.images if each.are_mutual), default=0)

    def rows_at(self, position: int, n_rows: int) -> npt.NDArray[np.float32] | None:
        """Return the rows that take the place of tokens at these positions: f32 [n_rows, n_embd]; None: tokens do."""
        for each in self.images:
            if each.start <= position < each.end:
                return each.rows[position - each.start : position - each.start + n_rows]
        return None


class PromptProgress(NamedTuple):
    """How far a prompt has been read, in tokens."""

    n_total: int
    n_cached: int  # that were copied
    n_read: int  # that have passed the last stage, copied ones included


class Slot(NamedTuple):
    """The activity of one lane."""

    lane: int
    state: str  # "idle", or the session's own word
    is_busy: bool = False
    may_draft: bool = False
    task: int = -1  # the session; -1: none
    n_prompt: int = 0
    n_read: int = 0  # of the prompt, rows that have left for the stages
    n_cached: int = 0  # of the prompt, copied
    n_generated: int = 0
    n_left: int = -1  # tokens that may still be generated


class PromptScore(NamedTuple):
    """The model's log probability for one token of a prompt; the first token has none."""

    token: int
    logprob: float  # natural log of the raw softmax
    top: tuple[tuple[int, float], ...]  # (token, logprob), largest first


class TokenEvent(msgspec.Struct, frozen=True, gc=False):
    """One generated token. The last event of a stream carries `finish_reason`; exactly one event does.

    When a session ends at an end-of-generation token, that token's event carries finish_reason "stop" and
    `is_end_token` is true: it counts as a completion token but contributes no text.
    """

    token: int
    logprob: float | None  # natural log of the raw softmax (before biases, penalties, filters); None unless asked for
    top_logprobs: tuple[tuple[int, float], ...]  # (token, logprob), largest first; empty unless asked for
    finish_reason: FinishReason | None = None
    is_end_token: bool = False
    logits: bytes = b""  # f32 per vocabulary entry; empty unless asked for
    n_cached: int = 0  # of a stream's first event: prompt tokens that others had computed
    is_predicted: bool = False  # the client's prediction continues with this token at the answer's position
    is_drafted: bool = False  # it was guessed, and its row had left before it was sampled
    prompt_scores: tuple[PromptScore, ...] = ()  # of a stream's first event, if asked for: one less than prompt tokens
    embedding: bytes = b""  # f32 per value of a hidden row, not normalised; where the prompt is pooled, not continued


class TokenStream(Protocol):
    """The tokens of one admitted session, in order. It has one reader, which iterates once and always closes it.

    `__anext__` raises a RelaylineError at most once, in place of an event, after which the stream has ended. A reader
    that is cancelled inside `__anext__` loses no lane: `aclose` still cancels the session.
    """

    def __aiter__(self) -> AsyncIterator[TokenEvent]:
        """Return the iterator over this stream's events."""

    async def aclose(self) -> None:
        """Cancel the session if it still runs and give its lane back. Idempotent; raises nothing deliberate."""


class Generator(Protocol):
    """The pipeline side, as the HTTP side sees it."""

    @property
    def ctx_tokens(self) -> int:
        """Tokens that one stream may hold, prompt and completion together; 0 until the stages have been connected."""

    @property
    def phase(self) -> Phase:
        """The state that clients see; see wire.common.phase."""

    def is_ready(self) -> bool:
        """Return whether a request would start now (all stages connected, not draining)."""

    def check_ready(self) -> None:
        """Raise NotReadyError, which says why, unless a request would be admitted now.

        Requests are admitted while `is_ready`, and for a while after a stage was lost. Then the request waits, and its
        stream raises NotReadyError if the stage does not come back in time.
        """

    def check_room(self, tenant: Tenant = ANYONE) -> None:
        """Raise OverloadedError if every request of this tenant would be refused now. Called before a body is read."""

    def slots(self) -> Sequence[Slot]:
        """Return what each lane does, in their order."""

    def tenants(self) -> Mapping[str, tuple[int, int]]:
        """Return how many streams of each tenant run, and how many wait, by its name."""

    async def describe(self, since_ns: int | None = None, *, with_recent: bool = True) -> dict[str, object]:
        """Return the JSON-ready topology and live counters shown by GET /v1/pipeline.

        `since_ns` restricts `overlap` to later steps: monotonic nanoseconds of this process, as in the answer's
        `now_ns`. `overlap_since_ns` says from when on it is known. None takes all steps that stages remember.
        Without `with_recent` the answer has no waits and no overlap, which need thousands of numbers from each stage.
        """

    def open(self, request: GenerationRequest, record: RequestRecord | None = None) -> TokenStream:
        """Admit the request and start it, or refuse it now, without waiting.

        `record` is the telemetry record of its HTTP request.

        A refusal leaves nothing behind: OverloadedError, LaneLimitError, NotReadyError or ContextLengthError. The call
        is synchronous, so the HTTP side can still answer with a real status, and can open several choices as all or
        nothing. Later errors are raised by the stream.
        """
