"""IPv6 of this machine, for tests that connect by it."""

from __future__ import annotations

import socket

import pytest


def need_ipv6() -> None:
    """Skip a test where nobody can listen at ::1, as in many containers."""
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            pass
    except OSError as error:
        pytest.skip(f"this machine has no ::1: {error.strerror}")
