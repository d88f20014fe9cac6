"""Picks one session's next token from its logits.

A draw depends only on the logits, the session's options, the token's position and, with penalties or a grammar, the
session's earlier tokens. Its noise is a hash of (seed, position, token), and the filters keep no state. So a session
that was rebuilt elsewhere continues exactly, and sessions cannot influence one another. Small moves of the logits
rarely change the pick (`stage.sampling.draws`). A token that they move over the edge of a filter changes it only if
that token is the pick, because the others' noise stays the same.

Order: biases, penalties and bans (`stage.sampling.penalties`), what the grammar allows (`stage.sampling.constraint`),
top-n-sigma, top-k, typical-p, top-p, min-p, XTC, infill, temperature, draw. A request may ask for another order of the
filters and the temperature (`wire.common.sampler_order`). The filters keep what llama.cpp's of the same names keep
(`stage.sampling.filters`, `stage.sampling.sorting_filters`, `stage.sampling.infill`). The temperature may follow from
what they leave (`stage.sampling.dynamic_temperature`).

Mirostat stands in place of penalties and filters, adaptive-p in place of the plain draw. They alone have a state that
tokens do not tell: it travels with each sample, and comes back with the open (`stage.sampling.carried`).
"""

from __future__ import annotations

import dataclasses
import functools
import math
import threading
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from llguidance import LLTokenizer

from relayline.stage.sampling.adaptive import AdaptiveP
from relayline.stage.sampling.bans import Bans
from relayline.stage.sampling.constraint import Constraint
from relayline.stage.sampling.device_draws import DeviceDraws
from relayline.stage.sampling.draws import Draws, clipped, noise_keys
from relayline.stage.sampling.dry import Dry
from relayline.stage.sampling.dynamic_temperature import dynamic_temperature
from relayline.stage.sampling.filters import FilteredDraws, largest_tokens, sum_of
from relayline.stage.sampling.infill import Infill
from relayline.stage.sampling.mirostat import Mirostat
from relayline.stage.sampling.noise import Noise
from relayline.stage.sampling.penalties import Penalties, Repetition
from relayline.stage.sampling.sorting_filters import Filters, kept_behind, xtc_acts
from relayline.stage.sampling.thought_budget import ThoughtBudget
from relayline.stage.sampling.together import DrawsTogether
from relayline.wire.common.bounds import BIAS_MAX, LOGPROBS_MAX, PENALTY_MAX, PENALTY_TOKENS_MAX
from relayline.wire.common.errors import NativeError, NumericError, ProtocolError
from relayline.wire.common.sampler_fields import BY_NAME, check_numbers
from relayline.wire.common.sampler_order import order_of
from relayline.wire.common.thoughts import marks_from

_U64 = (1 << 64) - 1


@dataclasses.dataclass(frozen=True, slots=True)
class SamplingOptions:
    """How to pick tokens of one session."""

    temperature: float = 1.0  # 0 picks the largest logit and ignores the filters and the seed
    top_k: int = 0  # 0 keeps all
    top_p: float = 1.0  # 1.0 keeps all
    min_p: float = 0.0  # 0.0 keeps all
    seed: int = 0  # u64; the noise of a token depends on (seed, position, token) only
    n_logprobs: int = -1  # -1: no logprobs; 0: the chosen token's; k: also the k largest (at most LOGPROBS_MAX)
    frequency_penalty: float = 0.0  # taken off a token's logit for each time that it was said
    presence_penalty: float = 0.0  # taken off once if it was
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token, number added to its logit)
    grammar: str = ""  # only what fits it is picked, see stage.sampling.constraint; empty: everything
    numbers: Mapping[str, float] = dataclasses.field(default_factory=dict)  # of wire.common.sampler_fields
    allowed_tokens: tuple[int, ...] = ()  # see stage.sampling.bans, as the next two; empty: all
    held_back_tokens: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()

    dry_breakers: tuple[int, ...] = ()  # see stage.sampling.dry, as the next
    dry_sequences: tuple[tuple[int, ...], ...] = ()
    thought_marks: tuple[tuple[int, ...], ...] = ()  # see stage.sampling.thought_budget; empty: thoughts have no bound

    def number(self, name: str) -> float:
        """Return a number of the table of sampler fields, or its neutral value if it was not given."""
        return self.numbers.get(name, BY_NAME[name].neutral)

    def bans(self, n_vocab: int) -> Bans | None:
        """Return what may not be said, None for nothing. Raises ProtocolError."""
        if not (self.allowed_tokens or self.held_back_tokens or self.bad_words):
            return None
        until = int(self.number("held_back_until"))
        return Bans(n_vocab, self.allowed_tokens, self.held_back_tokens, until, self.bad_words)

    def dry(self, n_vocab: int) -> Dry | None:
        """Return what repetitions cost, None for nothing. Raises ProtocolError."""
        names = ("dry_multiplier", "dry_base", "dry_allowed_length", "dry_penalty_last_n")
        multiplier, base, allowed, n_latest = map(self.number, names)
        if not multiplier or not n_latest:
            return None
        return Dry.of((multiplier, base, allowed, n_latest), self.dry_breakers, self.dry_sequences, n_vocab)

    def thought_budget(self, n_vocab: int, vocabulary: LLTokenizer | None) -> ThoughtBudget | None:
        """Return the bound of its thoughts, None for no bound. Raises ProtocolError."""
        n_tokens_max, begun_at = map(self.number, ("thought_tokens_max", "thoughts_begun_at"))
        if n_tokens_max < 0:
            return None
        bytes_of = None if vocabulary is None else lambda tokens: vocabulary.decode_bytes([*tokens])
        marks = marks_from(self.thought_marks, n_vocab)
        return ThoughtBudget(marks, int(n_tokens_max), int(begun_at) if begun_at >= 0 else None, bytes_of)

    @property
    def mirostat(self) -> Mirostat | None:
        """Return the state of mirostat; None without it, or where the largest logit is picked."""
        version, tau, eta = map(self.number, ("mirostat", "mirostat_tau", "mirostat_eta"))
        if not version or self.temperature == 0:
            return None
        return Mirostat(int(version), tau, eta, self.temperature, self.numbers.get("mirostat_mu"))

    @property
    def adaptive(self) -> AdaptiveP | None:
        """Return the state of adaptive-p; None without it, or where mirostat or the largest logit decides."""
        target, decay = map(self.number, ("adaptive_target", "adaptive_decay"))
        if target < 0 or self.temperature == 0 or self.number("mirostat"):
            return None
        return AdaptiveP(target, decay, self.numbers.get("mirostat_mu"))

    @property
    def sorting_filters(self) -> Filters | None:
        """The filters that sort tokens, act in another order, or come before what looks at all that are left; None if
        none is asked for.
        """
        sigma, typical = self.number("top_n_sigma"), self.number("typical_p")
        xtc = self.number("xtc_threshold") if self.number("xtc_probability") else 1.0
        looks_at_all = self.number("infill") or self.number("dynatemp_range") or self.number("adaptive_target") >= 0
        order = int(self.number("sampler_order"))
        if sigma == 0 and typical == 1.0 and xtc > 0.5 and not looks_at_all and not order:
            return None
        return Filters(sigma, self.top_k, typical, self.top_p, self.min_p, xtc, order_of(order))

    def __post_init__(self) -> None:
        """Raise ProtocolError for values that the coordinator should never have sent."""
        for name, value, low, high in (
            ("temperature", self.temperature, 0.0, math.inf),
            ("top_k", self.top_k, 0, (1 << 31) - 1),
            ("top_p", self.top_p, 0.0, 1.0),
            ("min_p", self.min_p, 0.0, 1.0),
            ("seed", self.seed, 0, _U64),
            ("n_logprobs", self.n_logprobs, -1, LOGPROBS_MAX),
            ("frequency_penalty", self.frequency_penalty, -PENALTY_MAX, PENALTY_MAX),
            ("presence_penalty", self.presence_penalty, -PENALTY_MAX, PENALTY_MAX),
            *(("logit_bias", bias, -BIAS_MAX, BIAS_MAX) for _, bias in self.logit_bias),
        ):
            if not low <= value <= high:
                raise ProtocolError(f"sampling option {name} is {value}; it must be between {low} and {high}")
        check_numbers(self.numbers)


class Sampled(NamedTuple):
    """One picked token. Logprobs are natural logs of the softmax over the raw logits, before anything else."""

    token: int
    logprob: float | None  # None unless n_logprobs >= 0
    top: list[tuple[int, float]]  # (token, logprob), largest first, ties by token id; empty unless n_logprobs > 0
    mirostat_mu: float | None = None  # behind this token, with mirostat; or what adaptive-p carries


class Scratch:
    """Arrays over one vocabulary that every draw of a thread reuses."""

    def __init__(self, n_vocab: int) -> None:
        self.changed = np.empty(n_vocab, np.float32)  # logits with biases and penalties, and the grammar's bans
        self.draws = Draws(n_vocab)
        self.filtered = FilteredDraws(self.draws, n_vocab)
        self.noise = Noise(self.draws)
        self.together = DrawsTogether(self.draws, self.filtered, self.noise)

    @functools.cached_property
    def on_device(self) -> DeviceDraws:
        """Where rows of logits stay on a device."""
        return DeviceDraws(self.draws, self.filtered, self.noise)


_local = threading.local()


def scratch_of(n_vocab: int) -> Scratch:
    """Return this thread's scratch: 32 bytes a token, so one for all sessions of an engine and not one for each."""
    found: dict[int, Scratch] = _local.__dict__.setdefault("by_n_vocab", {})
    if n_vocab not in found:
        found.clear()  # an engine has one vocabulary; only tests meet a second
        found[n_vocab] = Scratch(n_vocab)
    return found[n_vocab]


class SessionSampler:
    """The sampler of one session. Not thread-safe."""

    def __init__(
        self,
        options: SamplingOptions,
        n_vocab: int,
        said: Sequence[int] = (),
        vocabulary: LLTokenizer | None = None,
        read: Sequence[int] = (),
    ) -> None:
        """`said` are the session's tokens so far; without a grammar the latest ones are enough.

        `read` are the latest of its prompt, for a repetition penalty.

        Raises ProtocolError, or InvalidRequestError for a grammar that cannot be used with this vocabulary.
        """
        self.options = options
        self._constraint: Constraint | None = None
        if options.grammar:
            self._constraint = Constraint(vocabulary, options.grammar, said)
            said = said[-PENALTY_TOKENS_MAX:]
        self._penalties: Penalties | None = None
        repetition = Repetition(options.number("repetition_penalty"), int(options.number("repeat_last_n")), [*read])
        frequency, presence, bans = options.frequency_penalty, options.presence_penalty, options.bans(n_vocab)
        dry, thoughts = options.dry(n_vocab), options.thought_budget(n_vocab, vocabulary)
        self._mirostat, self._adaptive = options.mirostat, options.adaptive
        if self._mirostat is not None:  # as in llama.cpp, it stands in place of all that looks at earlier tokens
            frequency, presence, repetition, dry = 0.0, 0.0, Repetition(), None
        is_changed = frequency or presence or options.logit_bias or not repetition.is_neutral
        if is_changed or any(each is not None for each in (bans, dry, thoughts)):
            self._penalties = Penalties(
                frequency, presence, options.logit_bias, said, n_vocab, repetition, bans, dry, thoughts
            )
        sorting = options.sorting_filters
        self._sorting = None if sorting is None else sorting.parts
        self._infill = Infill(vocabulary) if options.number("infill") and options.temperature > 0 else None
        self.n_vocab = n_vocab
        self.last: tuple[int, int] | None = None  # position of the token picked last, and that token
        self._is_open = True

    @property
    def is_greedy(self) -> bool:
        """Whether it picks the largest logit and looks at no other: then `take` does without the logits."""
        return (
            self.options.temperature == 0
            and self.options.n_logprobs < 0
            and self._penalties is None
            and self._constraint is None
        )

    def take(self, token: int, position: int) -> Sampled:
        """Pick the token of the largest logit, found elsewhere, for absolute `position`."""
        self.last = (position, token)
        return Sampled(token, None, [])

    @property
    def draws_plainly(self) -> bool:
        """Whether it draws, and its filters are top-k, top-p and min-p alone: see `stage.sampling.rows`."""
        return self.options.temperature > 0 and self._mirostat is None and self._sorting is None and self._is_open

    def sample(self, logits: npt.NDArray[np.float32], position: int) -> Sampled:
        """Pick the token for absolute `position` from `logits` (f32 [n_vocab], left unchanged).

        Raises NumericError if the largest logit is not a finite number, InvalidRequestError where its grammar cannot be
        followed any further.
        """
        largest = checked(float(logits.max()), position)
        changed, greatest = logits, largest
        if self.changes_logits:
            changed = scratch_of(self.n_vocab).changed
            self.change(logits, position, changed)
            greatest = checked_change(float(changed.max()), position)
        is_drawn = self.options.temperature > 0
        token = self._draw(changed, greatest, position) if is_drawn else int(changed.argmax())
        return self.picked(token, logits, largest, position)

    @property
    def changes_logits(self) -> bool:
        """Whether `change` has to be called before a pick."""
        return self._penalties is not None or self._constraint is not None

    def change(self, logits: npt.NDArray[np.float32], position: int, out: npt.NDArray[np.float32]) -> None:
        """Write into `out` the logits that the pick for a position is from (both f32 [n_vocab]).

        Raises InvalidRequestError where its grammar cannot be followed any further.
        """
        is_led = False
        if self._penalties is not None:
            is_led = self._penalties.apply(logits, position, out)
        else:
            np.copyto(out, logits)
        if self._constraint is None:
            return
        self._constraint.apply(position, out)
        if is_led and self._penalties is not None and out.max() == -np.inf:  # its grammar forbids that token
            self._penalties.apply(logits, position, out, ends_thoughts=False)
            self._constraint.apply(position, out)

    def picked(self, token: int, logits: npt.NDArray[np.float32], largest: float, position: int) -> Sampled:
        """Record the token picked for a position, and describe it. The logits are the model's, with their largest."""
        if self._penalties is not None:
            self._penalties.said(token)
        if self._constraint is not None:
            self._constraint.said(token)
        self.last = (position, token)
        mu = self._mirostat.mu if self._mirostat is not None else None
        if self._adaptive is not None:
            mu = self._adaptive.total
        if self.options.n_logprobs < 0:
            return Sampled(token, None, [], mu)
        return _with_logprobs(token, logits, largest, self.options.n_logprobs)._replace(mirostat_mu=mu)

    def score(self, logits: npt.NDArray[np.float32], position: int, token: int) -> Sampled:
        """Return the log probabilities at absolute `position` for a token that is already there; nothing is picked.

        Raises NumericError as `sample` does, ProtocolError for a token outside the vocabulary.
        """
        if token >= self.n_vocab:
            raise ProtocolError(f"token {token} to score is outside the vocabulary of {self.n_vocab}")
        largest = checked(float(logits.max()), position)
        return _with_logprobs(token, logits, largest, max(0, self.options.n_logprobs))

    def _draw(self, logits: npt.NDArray[np.float32], largest: float, position: int) -> int:
        if not self._is_open:
            raise NativeError("the session's sampler is closed")
        scratch, keys = scratch_of(self.n_vocab), noise_keys(self.options.seed, position)
        options, mirostat = self.options, self._mirostat
        if mirostat is not None:
            tokens = mirostat.kept(logits, position)
            kept = logits[tokens]
            token = scratch.draws.draw(kept, float(kept.max()), options.temperature, keys, tokens)
            mirostat.said(token, tokens, kept)
            return token
        if self._sorting is not None:
            (before, behind), probability = self._sorting, options.number("xtc_probability")
            if probability and not xtc_acts(options.seed, position, probability):
                before, behind = before.without_xtc(), behind.without_xtc()
            tokens = before.kept(logits)
            if self._infill is not None:
                sure = self._infill.kept(tokens, logits[tokens])
                if logits[sure].min() > -np.inf:  # else the end, where it may not come
                    tokens = sure
            kept = logits[tokens]
            temperature, reach = options.temperature, options.number("dynatemp_range")
            if reach:
                temperature = dynamic_temperature(kept, temperature, reach, options.number("dynatemp_exponent"))
            if behind.order and temperature > 0:
                tokens = kept_behind(behind, tokens, kept, temperature)
                kept = logits[tokens]
            if self._adaptive is not None:
                return _adapted(self._adaptive, tokens, kept, temperature, keys, position, scratch.draws)
            if temperature == 0:
                return int(tokens[kept.argmax()])
            return scratch.draws.draw(kept, float(kept.max()), temperature, keys, tokens)
        if options.top_k == 0 and options.top_p == 1.0 and options.min_p == 0.0:
            return scratch.draws.draw(logits, largest, options.temperature, keys)
        return scratch.filtered.draw(
            logits, largest, options.temperature, keys, top_k=options.top_k, top_p=options.top_p, min_p=options.min_p
        )

    def close(self) -> None:
        """Refuse further draws. May be called twice."""
        self._is_open = False


def _adapted(
    adaptive: AdaptiveP,
    tokens: npt.NDArray[np.int32],
    kept: npt.NDArray[np.float32],
    temperature: float,
    keys: tuple[int, int],
    position: int,
    draws: Draws,
) -> int:
    """Draw one of the kept tokens, of which `kept` are the logits, by how near its chance is to the target."""
    wide = kept.astype(np.float64)
    weights = np.exp((wide - wide.max()) / clipped(temperature))
    chances = weights / weights.sum()
    logits = adaptive.logits(chances, position)
    if temperature == 0:
        adaptive.said(1.0)
        return int(tokens[kept.argmax()])
    token = draws.draw(logits, float(logits.max()), 1.0, keys, tokens)
    adaptive.said(float(chances[int(np.searchsorted(tokens, token))]))
    return token


def checked(largest: float, position: int) -> float:
    """Return a row's largest logit. Raises NumericError if it is not a finite number."""
    if not math.isfinite(largest):
        raise NumericError(f"the logits for position {position} are not finite")
    return largest


def checked_change(largest: float, position: int) -> float:
    """Return the largest logit of a row that was changed. Raises NumericError if it is not a finite number."""
    if not math.isfinite(largest):
        raise NumericError(f"no token allowed at position {position} has a finite logit")
    return largest


def _with_logprobs(token: int, logits: npt.NDArray[np.float32], largest: float, n_top: int) -> Sampled:
    scratch, top = scratch_of(logits.size), list[tuple[int, float]]()
    shifted = np.subtract(logits, np.float32(largest), out=scratch.changed)
    if n_top > 0:
        n_top = min(n_top, logits.size)
        leaders = largest_tokens(logits, n_top, scratch.draws, scratch.draws.maxima(logits))
        order = leaders[np.argsort(-logits[leaders], kind="stable")]
        top = [(int(leader), float(shifted[leader])) for leader in order]
    chosen = float(shifted[token])
    log_total = math.log(sum_of(np.exp(shifted, out=shifted)))
    return Sampled(token, chosen - log_total, [(leader, logit - log_total) for leader, logit in top])
