"""A number that changes with every token of a session and cannot be derived from tokens. Pure.

Each sample reports it, and the open of a session brings it back: see `stage.sampling.mirostat` and
`stage.sampling.adaptive`. If a position is picked again, the number before it counts.
"""

from __future__ import annotations

import numpy as np

from relayline.wire.common.bounds import PENALTY_TOKENS_MAX
from relayline.wire.common.errors import InternalError
from relayline.wire.common.sampler_fields import BY_NAME

_BOUNDS = BY_NAME["mirostat_mu"]  # a stage refuses an open with a number outside


class Carried:
    """The number of one session, an f32."""

    def __init__(self, value: float) -> None:
        """`value` is that before the first sample."""
        self._values = [_as_f32(value)]  # before each of the latest positions, the next one last
        self._position: int | None = None  # of the next token; the first sample sets it

    @property
    def value(self) -> float:
        """The number that the next token is picked with."""
        return self._values[-1]

    def go_to(self, position: int) -> None:
        """Go to the position that is picked next, which may have been picked before.

        Raises InternalError for a position beyond the next one: the tokens before it are not known here.
        """
        n_again = 0 if self._position is None else self._position - position
        if not 0 <= n_again < len(self._values):
            raise InternalError(f"position {position} was sampled out of order: the token before it is not known")
        if n_again:
            del self._values[-n_again:]
        self._position = position

    def follow(self, value: float) -> None:
        """Record the number behind the token that was picked."""
        self._values.append(_as_f32(min(max(value, _BOUNDS.low), _BOUNDS.high)))
        if len(self._values) > 2 * PENALTY_TOKENS_MAX:  # more than ever comes again
            del self._values[:PENALTY_TOKENS_MAX]
        if self._position is not None:
            self._position += 1


def _as_f32(value: float) -> float:
    """Return the number in its wire form: so a rebuilt session continues exactly."""
    return float(np.float32(value))
