"""How many examples a property test draws."""

from __future__ import annotations

import os

ALL = "RELAYLINE_EXAMPLES"  # `make test-nightly` says "all"


def thinned(n_examples: int) -> int:
    """Return a third of them, so that a run stays short; all of them by `make test-nightly`."""
    return n_examples if os.environ.get(ALL) == "all" else max(10, n_examples // 3)
