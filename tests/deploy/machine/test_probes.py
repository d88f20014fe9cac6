"""The rough idea of a machine's speed: measured in silence, whatever its BLAS says."""

from __future__ import annotations

import numpy as np
import pytest

from relayline.deploy.machine import facts


def test_a_blas_that_warns_is_not_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    """On Arm some report an overflow in a product of ones."""
    monkeypatch.setattr(facts, "FLOPS_PROBE_SIZE", 8)
    monkeypatch.setattr(np, "ones", lambda shape, dtype: np.full(shape, np.finfo(dtype).max, dtype))
    assert facts._one_core_flops.__wrapped__() > 0
