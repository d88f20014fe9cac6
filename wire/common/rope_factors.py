"""The choice between two sets of rope factors, where a model has two (phi3's "longrope"). Pure.

Such a model was trained up to its original context with the short set, and beyond with the long one. llama.cpp takes
the long one where a sequence has more cells than the original context (llama_model::get_rope_factors). The cells of a
unified cache are those of all lanes, rounded up. So stages could rotate the same position differently, and thirty-two
short streams would be rotated like long ones. Here only the largest length of a lane decides.
"""

from __future__ import annotations

import dataclasses

LONG_FACTORS = "rope_factors_long.weight"
ORIGINAL_CONTEXT = "rope.scaling.original_context_length"  # behind the family's prefix, as the next
CONTEXT = "context_length"  # llama.cpp's value where a file does not state its original context


@dataclasses.dataclass(frozen=True, slots=True)
class LongRope:
    """That a model has two sets of rope factors."""

    architecture: str
    """GGUF general.architecture."""
    original_tokens: int
    """The original context: lanes of up to so many tokens are turned by the short set."""

    @property
    def key(self) -> str:
        """The metadata key that llama.cpp reads the original context from."""
        return f"{self.architecture}.{ORIGINAL_CONTEXT}"

    def takes_long(self, ctx_tokens: int) -> bool:
        """Return whether lanes of this many tokens use the long set."""
        return ctx_tokens > self.original_tokens
