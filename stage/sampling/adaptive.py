"""Adaptive-p: tokens whose chance is near a target are the likeliest ones. Pure.

As llama.cpp's sampler of this name. It comes last, in place of the plain draw: chances near the target get the largest
logits. The target moves against the chances of the latest tokens, so that they come to the wanted one on average. Their
sum, in which older ones weigh less, is all that has to be kept (`stage.sampling.carried`).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from relayline.stage.sampling.carried import Carried

WIDTH, PEAK, SHARPNESS = 0.3, 5.0, 10.0  # llama.cpp's

Logits = npt.NDArray[np.float32]
Chances = npt.NDArray[np.float64]
Tokens = npt.NDArray[np.int32]


class AdaptiveP:
    """The state of one session."""

    def __init__(self, target: float, decay: float, total: float | None) -> None:
        """`total` is the sum that the tokens so far have left; None for a session that has picked nothing."""
        self._target, self._decay = target, decay
        self._carried = Carried(target / (1 - decay) if total is None else total)

    @property
    def total(self) -> float:
        """The weighted sum of the chances of the tokens so far. An f32."""
        return self._carried.value

    def logits(self, chances: Chances, position: int) -> Logits:
        """Return the logits that a token is drawn from, of tokens with these chances. Raises as `Carried.go_to`."""
        self._carried.go_to(position)
        target = min(max(2 * self._target - self.total * (1 - self._decay), 0.0), 1.0)
        distances = np.abs(chances - target) / WIDTH
        return (PEAK - SHARPNESS * distances**2 / (1 + distances)).astype(np.float32)

    def said(self, chance: float) -> None:
        """Record the chance of the token that was picked."""
        self._carried.follow(chance + self._decay * self.total)
