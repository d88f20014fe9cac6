"""A limit of this process's memory for a while: what a client's file unpacks to must not take all that a host has."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager

from relayline.wire.common.memory import address_space_bytes


@contextmanager
def no_more_memory_than(n_bytes: int) -> Iterator[None]:
    """Let this process have so many bytes more for a while; where it asks for more, llama.cpp ends it.

    So a header that lies takes this process down, and not the host.
    """
    before = resource.getrlimit(resource.RLIMIT_AS)
    soft = [each for each in before if each != resource.RLIM_INFINITY]
    if (now_bytes := address_space_bytes()) is not None:  # else not Linux: headers were checked
        soft.append(now_bytes + n_bytes)
    resource.setrlimit(resource.RLIMIT_AS, (min(soft, default=resource.RLIM_INFINITY), before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
