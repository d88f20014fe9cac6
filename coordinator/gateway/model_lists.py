"""The models of all pipelines, in the forms in which clients ask for them. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from relayline.coordinator.gateway.router import Backend, Health
from relayline.coordinator.http.ollama.models import listed, running
from relayline.wire.common.phase import Phase

_LOADED = "loaded"
# What llama-server's router says of a model, by the states of its pipelines: the first one that fits.
_STATUS = {
    Health.READY.value: _LOADED,
    Phase.WAKING.value: "loading",
    Health.PAUSED.value: "loading",
    Phase.DRAINING.value: _LOADED,
}


class _Status(msgspec.Struct):
    value: str = ""


class _Card(msgspec.Struct):
    status: _Status
    id: str = ""
    created: int = 0
    max_model_len: int = 0


def openai_list(cards: Mapping[str, bytes]) -> bytes:
    """Return the body of /v1/models. `cards`: the entry of each model, as JSON."""
    names, data = list(cards), [msgspec.Raw(card) for card in cards.values()]
    ends = {"first_id": names[0], "last_id": names[-1]} if names else {"first_id": "", "last_id": ""}
    return msgspec.json.encode({"object": "list", "data": data, **ends, "has_more": False})


def with_status(card: bytes, backends: Iterable[Backend]) -> bytes:
    """Return a model's entry with llama-server's `status`: whether one of its pipelines has it in memory."""
    states = [backend.state for backend in backends]
    status = next((status for state, status in _STATUS.items() if state in states), "unloaded")
    return card.rstrip()[:-1] + b',"status":{"value":"%b"}}' % status.encode()


def ollama_list(cards: Mapping[str, bytes], *, loaded_only: bool) -> bytes:
    """Return the body of /api/tags, or of /api/ps with those that are in memory: what OpenAI's entries, with their
    states, say of them.
    """
    entries: list[dict[str, Any]] = []
    for name, raw in cards.items():
        card = msgspec.json.decode(raw, type=_Card)
        if loaded_only and card.status.value != _LOADED:
            continue
        (entry,) = listed([name], card.created, {}, 0)
        entries += [entry | each for each in running([entry], card.max_model_len)]
    return msgspec.json.encode({"models": entries})
