"""The models of all pipelines, in the forms in which clients ask for them. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from relayline.coordinator.gateway.router import Backend, Health
from relayline.coordinator.http.ollama.models import listed, running
from relayline.wire.common.phase import Phase

# What llama-server's router says of a model, by the states of its pipelines: the first one that fits.
_STATUS = {
    Health.READY.value: "loaded",
    Phase.WAKING.value: "loading",
    Health.PAUSED.value: "loading",
    Phase.DRAINING.value: "loaded",
}


class _Card(msgspec.Struct):
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


def ollama_list(cards: Mapping[str, bytes]) -> bytes:
    """Return the body of /api/tags and /api/ps: what OpenAI's entries say of them."""
    entries: list[dict[str, Any]] = []
    for name, raw in cards.items():
        card = msgspec.json.decode(raw, type=_Card)
        (entry,) = listed([name], card.created, {}, 0)
        entries += [entry | each for each in running([entry], card.max_model_len)]
    return msgspec.json.encode({"models": entries})
