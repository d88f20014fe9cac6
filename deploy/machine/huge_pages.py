"""Starts processes with weights so that glibc asks for huge pages under them. Linux; elsewhere nothing happens.

A step of one row takes as long as its weights take to read. On pages of 4 KiB that depends on how these happen to lie,
on huge ones it does not, and is as quick as the luckiest of the others (docs/results/host.md). glibc (2.35 and
newer) asks for them if its environment says so as a process starts; the kernel gives them where transparent huge pages
are `madvise` or `always`. GLIBC_TUNABLES that name the tunable themselves are left alone.

A huge page has 2 MiB where an ordinary one has 4 KiB. Arm kernels with pages of 16 or 64 KiB have huge ones of 32 or
512 MiB, and glibc would make every heap a multiple of that: there nothing is asked for.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

COMMANDS = ("stage", "calibrate")
TUNABLE = "glibc.malloc.hugetlb"
HUGE_PAGE_BYTES_MAX = 2 << 20
HUGE_PAGE_SIZE = Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size")
_VARIABLE = "GLIBC_TUNABLES"


def environment_of(arguments: Sequence[str], environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment that `relayline` is to be started in with these arguments, the first its command."""
    tunables = environment.get(_VARIABLE, "")
    if not arguments or arguments[0] not in COMMANDS or TUNABLE in tunables or not _are_small():
        return dict(environment)
    return {**environment, _VARIABLE: ":".join(filter(None, (tunables, f"{TUNABLE}=1")))}


def _are_small() -> bool:
    if not sys.platform.startswith("linux"):
        return False
    try:
        return int(HUGE_PAGE_SIZE.read_text()) <= HUGE_PAGE_BYTES_MAX
    except (OSError, ValueError):  # the kernel has none, so glibc finds none
        return True


def restart_with_huge_pages(arguments: Sequence[str]) -> None:
    """Start this program again, in the right environment. Returns if it already has it."""
    environment = environment_of(arguments, os.environ)
    if sys.executable and environment != dict(os.environ):
        with contextlib.suppress(OSError):  # it continues unchanged
            os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)
