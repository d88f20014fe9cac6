"""Orders to the fork server: u32 with the size of what follows, then one JSON object. A socket may come with one."""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Mapping
from typing import Any

_SIZE = struct.Struct("<I")
ORDER_BYTES_MAX = 16 * 1024


def order_frame(order: Mapping[str, Any]) -> bytes:
    """Return an order as it is sent."""
    content = json.dumps(order).encode()
    return _SIZE.pack(len(content)) + content


def read_order(control: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """Return the next order, and the file descriptors that came with it; None when the other end is closed."""
    head, given, _, _ = socket.recv_fds(control, _SIZE.size, 1, socket.MSG_WAITALL)
    if len(head) < _SIZE.size:
        return None
    (size,) = _SIZE.unpack(head)
    content = control.recv(size, socket.MSG_WAITALL) if size <= ORDER_BYTES_MAX else b""
    return (json.loads(content), given) if len(content) == size else None
