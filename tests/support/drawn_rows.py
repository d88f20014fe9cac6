"""Rows of logits, and options of draws from them, for tests that compare ways to sample."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st

# Arguments of SamplingOptions that keep a part of the tokens, or choose the draw.
FILTERS: dict[str, st.SearchStrategy[Any]] = {
    "top_p": st.one_of(st.sampled_from([0.0, 0.05, 0.9, 1.0, 1.0]), st.floats(0, 1)),
    "min_p": st.sampled_from([0.0, 0.0, 0.05, 1.0]),
    "seed": st.integers(0, 2**64 - 1),
}
# Arguments of `logits_of`: from rows of equal logits to rows with one clear winner.
LOGITS: dict[str, st.SearchStrategy[Any]] = {
    "seed": st.integers(0, 10**6),
    "spread": st.sampled_from([0.0, 0.01, 1.0, 3.0, 8.0]),
    "step": st.sampled_from([0.0, 0.5, 2.0]),
    "lead": st.sampled_from([0.0, 12.0]),
}


def logits_of(seed: int, n_vocab: int, spread: float, step: float = 0.0, lead: float = 0.0) -> np.ndarray:
    """A row of logits: `step` above 0 rounds them, which makes ties, and `lead` lets one token stand out."""
    logits = (np.random.default_rng(seed).standard_normal(n_vocab) * spread).astype(np.float32)
    if step:
        logits = (np.round(logits / step) * step).astype(np.float32)
    logits[seed % n_vocab] += np.float32(lead)
    return logits
