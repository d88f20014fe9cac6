"""The temperature of one draw by how sure the model is: llama.cpp's dynamic temperature (`temp-ext`). Pure.

The entropy of the tokens that the filters leave, as a share of the most that so many can have, says where the
temperature lies. It goes from `temperature - reach`, but not below 0, for one sure token, to `temperature + reach` for
tokens that are all as likely. It depends on the logits alone, so a draw still depends on seed and position alone.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from relayline.stage.sampling.draws import clipped

Logits = npt.NDArray[np.float32]


def dynamic_temperature(logits: Logits, temperature: float, reach: float, exponent: float) -> float:
    """Return the temperature for a draw from tokens with these logits, all finite; 0 for the largest one.

    One token is drawn at `temperature`, whatever it is.
    """
    if logits.size < 2:
        return temperature
    temperature = clipped(temperature)  # infinite, it would leave no temperature at all
    shifted = logits.astype(np.float64) - float(logits.max())
    weights = np.exp(shifted)
    total = float(weights.sum())
    # Of chances w / total the entropy is log(total) - sum(w log w) / total.
    entropy = math.log(total) - float((weights * shifted).sum()) / total
    share = min(max(entropy / math.log(logits.size), 0.0), 1.0)
    least = max(0.0, temperature - reach)
    return float(least + (temperature + reach - least) * share**exponent)
