"""A checked request as a plan: what is generated, how it is picked, and what of it is shown."""

from __future__ import annotations

import dataclasses

from relayline.coordinator.http.requests.structure import Shape
from relayline.coordinator.http.requests.tools import Offered
from relayline.coordinator.sessions.generation import SamplingParams
from relayline.coordinator.sessions.tenants import ServiceTier
from relayline.coordinator.text.line_end import ANYWHERE, LineEnd

SEEDS = 1 << 64  # of random draws, from 0 on


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """A checked request, the same for both routes."""

    n: int  # choices per prompt
    max_tokens: int | None  # as asked for; None when the client left it open
    max_tokens_default: int | None  # when left open: this many, or None for all that the context leaves
    sampling: SamplingParams  # of the first choice; the others derive their seed from it
    stops: tuple[str, ...]
    ignore_eos: bool
    stream: bool
    include_usage: bool
    echo: bool
    return_token_ids: bool
    cache_prompt: bool
    cache_salt: str
    shows_prompt_alone: bool = False  # of an echo that wants no answer: the one token that is computed is not shown
    prediction: str | tuple[int, ...] = ""  # the client's predicted output, as text or token ids
    shape: Shape | None = None  # that the answer must have; its grammar goes into `sampling`
    offered: Offered | None = None  # tools
    splits_reasoning: bool = True  # a chat's reasoning is shown separately from its text
    min_tokens: int = 0  # before them no answer may end
    stop_tokens: tuple[int, ...] = ()  # tokens that end an answer, and are not shown
    shows_stop: bool = False  # what ended an answer is shown, a string or a token
    bad_words: tuple[str, ...] = ()  # that are not said; their tokens go into `sampling`
    dry_texts: tuple[str, ...] = ()  # sequence breakers, where repetitions cost; their tokens go into `sampling`
    bias_texts: tuple[tuple[str, float], ...] = ()  # whose tokens have that bias; they go into `sampling`
    n_logprobs: int = -1  # alternatives of each token of the answer; below 0: no log probabilities
    n_prompt_logprobs: int = -1  # the same of each token of the prompt, as vLLM shows them
    continuous_usage: bool = False  # each event of a stream carries the usage so far
    thought_tokens_max: int | None = None  # of each block of a chat's thoughts; None: no bound
    last_words: str = ""  # of thoughts that are ended
    line_end: LineEnd = ANYWHERE  # the line behind which the answer ends
    shows_timings: bool = False
    shows_progress: bool = False  # of the prompt, in a stream
    service_tier: ServiceTier | None = None  # that it is served as; None: the client did not ask
    turn: int = 0  # in its sender's line, see `turn_of`

    @property
    def scores_prompt(self) -> bool:
        """Whether the prompt's own tokens get log probabilities."""
        return self.n_prompt_logprobs >= 0 or (self.echo and self.n_logprobs >= 0)

    def sampling_of(self, choice: int, n_prompt: int = 0) -> SamplingParams:
        """Return the sampling of the n-th choice of a prompt: seed + choice, so each can be asked for alone."""
        moved = {}
        if self.sampling.held_back_tokens:
            moved["held_back_until"] = float(n_prompt + self.min_tokens)
        if self.sampling.number("thoughts_begun_at") >= 0:
            moved["thoughts_begun_at"] = float(n_prompt)
        if not choice and not moved:
            return self.sampling
        numbers = tuple(sorted({**dict(self.sampling.numbers), **moved}.items())) if moved else self.sampling.numbers
        return dataclasses.replace(self.sampling, seed=(self.sampling.seed + choice) % SEEDS, numbers=numbers)


NO_PLAN = Plan(
    n=1,
    max_tokens=1,
    max_tokens_default=None,
    sampling=SamplingParams(temperature=0.0),
    stops=(),
    ignore_eos=False,
    stream=False,
    include_usage=False,
    echo=False,
    return_token_ids=False,
    cache_prompt=True,
    cache_salt="",
)
"""Of a body that asks for no tokens."""
