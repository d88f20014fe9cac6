"""The models of all pipelines, in the forms in which clients ask for them. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import msgspec

from relayline.coordinator.gateway.router import Backend, Health
from relayline.coordinator.http.ollama.models import listed, running
from relayline.wire.common.phase import Phase

_LOADED, _LOADING, _UNLOADED = "loaded", "loading", "unloaded"
# What llama-server's router says of a model, by the states of its pipelines: the first one that fits.
_STATUS = {
    Health.READY.value: _LOADED,
    Phase.WAKING.value: _LOADING,
    Phase.LOADING.value: _LOADING,
    Phase.RECOVERING.value: _LOADING,
    Phase.UNREACHABLE.value: _LOADING,
    Phase.DRAINING.value: _LOADED,
}
_EXIT_CODE = 1  # of a model that has failed: there is no process of its own that would have ended with another


class Status(NamedTuple):
    """What llama-server's router says of a model."""

    value: str
    has_failed: bool = False

    @property
    def is_running(self) -> bool:
        """Whether the model is in memory, or on its way there."""
        return self.value != _UNLOADED

    def fields(self) -> dict[str, Any]:
        """Return the `status` of the model's entry. A pipeline has no command line that could be shown."""
        failed = {"failed": True, "exit_code": _EXIT_CODE} if self.has_failed else {}
        return {"value": self.value, "args": [], **failed}

    def event(self, model: str) -> bytes:
        """Return the event of /models/sse that tells of it."""
        failed = {"exit_code": _EXIT_CODE} if self.has_failed else {}
        data = {"status": self.value, **failed}
        return msgspec.json.encode({"model": model, "event": "status_change", "data": data})


RELOADED = b'{"model":"*","event":"models_reload"}'  # the event that tells of other names


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


def status_of(backends: Iterable[Backend]) -> Status:
    """Return the status of a model: whether one of its pipelines has it in memory."""
    backends = tuple(backends)
    states = {backend.state for backend in backends}
    value = next((status for state, status in _STATUS.items() if state in states), _UNLOADED)
    if value != _UNLOADED:
        return Status(value)
    if any(backend.is_loading for backend in backends):
        return Status(_LOADING)
    return Status(_UNLOADED, states == {Health.DEAD.value} or any(backend.has_failed for backend in backends))


def with_status(card: bytes, status: Status) -> bytes:
    """Return a model's entry with llama-server's `status`."""
    return card.rstrip()[:-1] + b',"status":%b}' % msgspec.json.encode(status.fields())


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
