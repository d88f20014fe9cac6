"""The input of `certify` for both sides: seeded prompts of ordinary tokens, alone and several at once. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

# Of the pipeline's prefill: below a tile of attention, as short prompts travel. Prompts below are shorter and longer.
PREFILL_CHUNK_ROWS = 60
PROMPT_ALONE = 150  # tokens: two whole chunks and a part of one
PROMPTS_MIXED = (1, 5, 17, 40, 70)  # tokens; one needs no separate prefill step, one needs two
N_LANES = len(PROMPTS_MIXED)


@dataclasses.dataclass(frozen=True, slots=True)
class Script:
    """One session to be run."""

    label: str
    """How reports name it."""
    prompt: tuple[int, ...]
    """Token ids."""
    temperature: float
    """0 for greedy. Every second session of a mixed batch draws instead, so that a model which falls into repeating
    itself is still compared in many different contexts."""
    seed: int
    """Of the draws."""


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """One side's results for a script."""

    script: Script
    tokens: tuple[int, ...]
    """Generated tokens; the last one was never fed back."""
    logits: npt.NDArray[np.float32]
    """f32 [len(tokens), n_vocab]: row i is what tokens[i] was chosen from. Row 0 is the prefill's."""

    @property
    def history(self) -> tuple[int, ...]:
        """Return every token that was fed: the prompt and all generated tokens but the last."""
        return self.script.prompt + self.tokens[:-1]


def context_needed(n_steps: int) -> int:
    """Return the tokens per stream that the longest session needs."""
    return max(PROMPT_ALONE, *PROMPTS_MIXED) + n_steps + 1


def draw_batches(tokens: npt.NDArray[np.int32], seeds: Sequence[int]) -> tuple[tuple[Script, ...], ...]:
    """Return batches of sessions that run at once: for each seed one session alone, then several of all lengths.

    `tokens` are the ids to draw from (plain_tokens). The same tokens and seeds always give the same scripts.
    """
    batches: list[tuple[Script, ...]] = []
    for seed in seeds:
        random = np.random.default_rng(seed)

        def prompt(length: int, random: np.random.Generator = random) -> tuple[int, ...]:
            return tuple(int(token) for token in random.choice(tokens, length))

        prefix = f"seed {seed}, " if len(seeds) > 1 else ""
        batches.append((Script(f"{prefix}alone, {PROMPT_ALONE} tokens", prompt(PROMPT_ALONE), 0.0, seed),))
        batches.append(
            tuple(
                Script(f"{prefix}mixed, {length} token{'s' * (length > 1)}", prompt(length), float(place % 2), seed)
                for place, length in enumerate(PROMPTS_MIXED)
            )
        )
    return tuple(batches)
