"""Items of responses and conversations as they are kept and shown: with an id, a status and the fields of their types.

Pure, and for a body's worker.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from relayline.coordinator.http.requests.inner_form import Fields, json_bytes

ID_CHARS = 48
KeptItem = tuple[str, bytes]  # its id and its JSON
# The type of an item -> what its id begins with.
PREFIXES = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
}
_STATUSES = ("in_progress", "completed", "incomplete")
# The type of a part -> the fields that clients' types demand, and clients may leave out when they send one.
_OF_PARTS: dict[str, Fields] = {
    "output_text": {"annotations": [], "logprobs": []},
    "input_image": {"detail": "auto"},
}


def new_id(prefix: str) -> str:
    """Return an id that cannot be guessed."""
    return f"{prefix}_{secrets.token_hex(ID_CHARS // 2)}"


def kept_items(items: Sequence[Fields]) -> list[KeptItem]:
    """Return items that have been read as a chat, each as its id and its JSON in a conversation.

    The ids are new: clients send items of other conversations, and some send each item twice.
    """
    kept = [_kept(item) for item in items]
    return [(item["id"], json_bytes(item)) for item in kept]


def _kept(item: Mapping[str, Any]) -> Fields:
    kind = item.get("type", "message")
    status = item.get("status")
    fields = {
        **item,
        "type": kind,
        "id": new_id(PREFIXES[kind]),
        "status": status if status in _STATUSES else "completed",
    }
    if kind == "message":
        fields["content"] = _parts(item["content"], is_output=item["role"] == "assistant")
    elif kind == "reasoning":
        fields["summary"] = item.get("summary") or []
    return {key: fields[key] for key in ("type", "id", "status", *item, "content", "summary") if key in fields}


def _parts(content: str | Sequence[Fields], *, is_output: bool) -> list[Fields]:
    if isinstance(content, str):
        content = [{"type": "output_text" if is_output else "input_text", "text": content}]
    return [{**_OF_PARTS.get(part["type"], {}), **part} for part in content]
