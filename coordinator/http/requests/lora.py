"""llama-server's `lora`: scales of the LoRA adapters of one request. Pure.

A pipeline computes a request with the adapters that have no name, and with at most one that has, each at the scale of
the setting. So `lora` chooses among these, and what it asks beyond that is refused.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from relayline.coordinator.http.requests.bodies import LoraScale
from relayline.wire.common.errors import InvalidRequestError
from relayline.wire.model_files.adapter_texts import AdapterText


def listed(adapters: Sequence[AdapterText], may_use: Collection[str] = ()) -> list[dict[str, object]]:
    """Return the adapters as GET /lora-adapters shows them, those without names and those of `may_use`; empty: all.

    `scale`: of a request that chooses none. `served_scale`: of one that has it.
    """
    return [
        {
            "id": number,
            "path": Path(adapter.path).name,
            "scale": 0.0 if adapter.name else adapter.scale,
            "name": adapter.name,
            "served_scale": adapter.scale,
            "task_name": "",
            "prompt_prefix": "",
        }
        for number, adapter in enumerate(adapters)
        if not (may_use and adapter.name) or adapter.name in may_use
    ]


def model_of(model: str, asked: Sequence[LoraScale] | None, adapters: Sequence[AdapterText]) -> str:
    """Return the model's name that chooses what a request's `lora` asks for; without it the same name.

    Raises InvalidRequestError.
    """
    if not asked:
        return model
    scales = {each.id: each.scale for each in asked}
    if len(scales) < len(asked):
        raise _refused("has one id twice")
    if unknown := [number for number in scales if not 0 <= number < len(adapters)]:
        raise _refused(f"id {unknown[0]} is not there; GET /lora-adapters lists {len(adapters)}")
    named = [adapters[number].name for number, scale in scales.items() if scale and adapters[number].name]
    if len(named) > 1:
        raise _refused(f"a request has at most one of {' and '.join(named)}")
    _check_scales(scales, adapters)
    names = [each.name for each in adapters if each.name]
    if model in names and named != [model]:
        raise _refused(f"the model {model!r} is an adapter of its own; send no lora, or another model")
    return named[0] if named else model


def _check_scales(scales: Mapping[int, float], adapters: Sequence[AdapterText]) -> None:
    for number, adapter in enumerate(adapters):
        scale = scales.get(number, 0.0)
        if scale != adapter.scale and (scale or not adapter.name):
            off = " or 0" if adapter.name else ""
            raise _refused(f"the scale of id {number} can only be {adapter.scale:g}{off} here, got {scale:g}")


def _refused(text: str) -> InvalidRequestError:
    return InvalidRequestError.of_field("lora", text)
