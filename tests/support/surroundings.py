"""Keeps from tests what a user's environment says to relayline and to the libraries under it."""

from __future__ import annotations

import os

PROXIES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")
SIZES = ("COLUMNS", "LINES", "FORCE_COLOR", "TTY_COMPATIBLE")  # how commands fill a terminal that is none
# Flags of relayline, its telemetry, and keys and addresses of other services.
PREFIXES = ("RELAYLINE_", "OTEL_", "OPENAI_", "HF_")
OF_THE_SUITE = {
    f"RELAYLINE_{name}"
    for name in (
        "CLUSTER_SEED", "EXAMPLES", "JAEGER", "KERNELS", "OWN_PROCESSES", "SANITIZED", "TEST_DEVICE", "VOCABULARIES",
    )
}  # fmt: skip

proxies: dict[str, str] = {}
"""Those of the user, for what a test has to download."""


def forget_users() -> None:
    """Remove the variables of a user. What a test needs of them it sets after this."""
    for name in [*os.environ]:
        if name.lower() in PROXIES:
            proxies[name] = os.environ.pop(name)
        elif name in SIZES or (name.startswith(PREFIXES) and name not in OF_THE_SUITE):
            del os.environ[name]
