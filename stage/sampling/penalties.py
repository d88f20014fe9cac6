"""A session's changes to its logits before a pick: biases, bans, and penalties for earlier tokens. Pure.

Penalties as OpenAI defines them, over the tokens that were generated, not those of the prompt: a token's logit loses
`presence_penalty` if it is among the latest PENALTY_TOKENS_MAX, and `frequency_penalty` for each time it is.

The repetition penalty is that of vLLM and llama.cpp. For a token among the latest ones, the prompt's included, a
positive logit is divided by the penalty and any other one multiplied. Bans come next, and the end of thoughts that are
too long comes last. The open of a session brings the
tokens generated before it; picks here are recorded. If a position is picked again, only the tokens before it count:
retried equals once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from relayline.stage.sampling.bans import Bans
from relayline.stage.sampling.dry import Dry
from relayline.stage.sampling.thought_budget import ThoughtBudget
from relayline.wire.common.bounds import LOGIT_BIAS_MAX, PENALTY_TOKENS_MAX
from relayline.wire.common.errors import InternalError, ProtocolError


def biases_of(tokens: Sequence[int], biases: Sequence[float]) -> tuple[tuple[int, float], ...]:
    """Return (token, bias) pairs as a coordinator sent them. Raises ProtocolError where they are no pairs."""
    if len(tokens) != len(biases):
        raise ProtocolError(f"{len(biases)} logit biases came for {len(tokens)} tokens")
    return tuple(zip(tokens, biases, strict=True))


@dataclasses.dataclass(frozen=True, slots=True)
class Repetition:
    """The repetition penalty of one session."""

    penalty: float = 1.0  # 1.0 changes nothing
    n_latest: int = PENALTY_TOKENS_MAX  # tokens that it looks at
    read: Sequence[int] = ()  # the latest tokens of the prompt

    @property
    def is_neutral(self) -> bool:
        """Whether nothing changes."""
        return self.penalty == 1.0 or self.n_latest == 0


class Penalties:
    """Biases and penalties of one session."""

    def __init__(
        self,
        frequency: float,
        presence: float,
        biases: Sequence[tuple[int, float]],
        said: Sequence[int],
        n_vocab: int,
        repetition: Repetition | None = None,
        bans: Bans | None = None,
        dry: Dry | None = None,
        thoughts: ThoughtBudget | None = None,
    ) -> None:
        """Raise ProtocolError for tokens outside the vocabulary, or too many."""
        self._repetition = repetition or Repetition()
        if max(self._repetition.read, default=0) >= n_vocab or len(self._repetition.read) > PENALTY_TOKENS_MAX:
            raise ProtocolError("the end of a prompt is too long, or has tokens outside the vocabulary")
        self._bans, self._dry, self._thoughts = bans, dry, thoughts
        tokens = [token for token, _ in biases]
        if len(tokens) > LOGIT_BIAS_MAX or len(said) > PENALTY_TOKENS_MAX:
            raise ProtocolError(f"{len(tokens)} logit biases and {len(said)} tokens of the answer are too many")
        if max((*tokens, *said), default=0) >= n_vocab:
            raise ProtocolError(f"a logit bias or a token of the answer is outside the vocabulary of {n_vocab}")
        self._frequency, self._presence = frequency, presence
        self._bias_tokens = np.array(tokens, np.int64)
        self._biases = np.array([bias for _, bias in biases], np.float32)
        self._said = list(said)
        self._position: int | None = None  # of the next token; the first sample sets it

    def apply(
        self,
        logits: npt.NDArray[np.float32],
        position: int,
        out: npt.NDArray[np.float32],
        *,
        ends_thoughts: bool = True,
    ) -> bool:
        """Write into `out` the changed logits for the token at `position` (both f32 [n_vocab]).

        Returns whether only one token is left, which ends thoughts that are too long. `ends_thoughts` False: such
        thoughts go on.

        Raises InternalError for a position beyond the next one: the tokens before it are not known here.
        """
        self._go_to(position)
        np.copyto(out, logits)
        np.add.at(out, self._bias_tokens, self._biases)
        if self._frequency or self._presence:
            tokens, counts = np.unique(np.array(self._said[-PENALTY_TOKENS_MAX:], np.int64), return_counts=True)
            out[tokens] -= (self._frequency * counts + self._presence).astype(np.float32)
        if not self._repetition.is_neutral:
            self._repeat(out)
        if self._dry is not None:
            self._dry.apply(out, self._latest(self._dry.n_latest))
        if self._bans is not None:
            self._bans.apply(out, position, self._said[max(0, len(self._said) - self._bans.looks_back) :])
        return ends_thoughts and self._thoughts is not None and self._thoughts.apply(out, position, self._said)

    def _repeat(self, out: npt.NDArray[np.float32]) -> None:
        tokens = np.unique(np.array(self._latest(self._repetition.n_latest), np.int64))
        logits, penalty = out[tokens], np.float32(self._repetition.penalty)
        out[tokens] = np.where(logits > 0, logits / penalty, logits * penalty)

    def _latest(self, n_latest: int) -> list[int]:
        """Return the latest tokens of prompt and answer, the newest last."""
        latest = self._said[-n_latest:]
        if n_before := n_latest - len(latest):
            latest = [*self._repetition.read[-n_before:], *latest]
        return latest

    def said(self, token: int) -> None:
        """Record the token picked from the logits that `apply` wrote."""
        self._said.append(token)
        if len(self._said) > 2 * PENALTY_TOKENS_MAX:  # more than is looked at, for positions that come again
            del self._said[:PENALTY_TOKENS_MAX]
        if self._position is not None:
            self._position += 1
            if self._thoughts is not None:
                self._thoughts.said(self._said, self._position)

    def _go_to(self, position: int) -> None:
        n_again = 0 if self._position is None else self._position - position
        if n_again < 0:
            raise InternalError(
                f"position {position} was sampled out of order: {-n_again} tokens before it are missing"
            )
        if n_again:
            del self._said[-n_again:]
        self._position = position
