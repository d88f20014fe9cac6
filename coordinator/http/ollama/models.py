"""The served models as /api/tags, /api/ps and /api/show describe them. Pure."""

from __future__ import annotations

import datetime
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import msgspec

from relayline.coordinator.http.replies.shapes import utc_text

# A version of Ollama whose API has everything that is served here: clients ask for it, and refuse older ones.
API_VERSION = "0.13.0"
CHAT_PATH, GENERATE_PATH = "/api/chat", "/api/generate"
Reason = Literal["load", "unload"]
_NEVER = "9999-12-31T23:59:59Z"  # when a model is unloaded that nobody unloads


def without_answer(name: str, path: str, reason: Reason, now: datetime.datetime) -> bytes:
    """Return the body for a request to `path` that only loads or unloads a model. `now`: with its zone."""
    created = utc_text(now)
    text = {"message": {"role": "assistant", "content": ""}} if path == CHAT_PATH else {"response": ""}
    reply = {"model": name, "created_at": created, **text, "done": True, "done_reason": reason}
    return msgspec.json.encode(reply) + b"\n"


def listed(names: Sequence[str], created: int, metadata: Mapping[str, str], size_bytes: int) -> list[dict[str, Any]]:
    """Return the entries of /api/tags. `created`: unix seconds. `metadata`: of the model's file, as text."""
    modified = utc_text(datetime.datetime.fromtimestamp(created, datetime.UTC))
    return [
        {
            "name": name,
            "model": name,
            "modified_at": modified,
            "size": size_bytes,
            "digest": hashlib.sha256(f"{name} {sorted(metadata.items())}".encode()).hexdigest(),
            "details": _details(metadata),
        }
        for name in names
    ]


def running(entries: Sequence[Mapping[str, Any]], ctx_tokens: int) -> list[dict[str, Any]]:
    """Return the entries of /api/ps: all of them, for as long as the pipeline serves."""
    return [
        {**{key: value for key, value in entry.items() if key != "modified_at"}, "expires_at": _NEVER}
        | {"size_vram": entry["size"], "context_length": ctx_tokens}
        for entry in entries
    ]


def shown(
    entry: Mapping[str, Any],
    metadata: Mapping[str, str],
    capabilities: Sequence[str],
    template: str,
    ctx_tokens: int,
    recommended: Iterable[tuple[str, int | float]] = (),
) -> dict[str, Any]:
    """Return the answer of /api/show. The context is that of a stream here; the model may have been made for more.

    `recommended`: the model's sampling options.
    """
    architecture = metadata.get("general.architecture", "")
    info: dict[str, Any] = {key: _number_or_text(value) for key, value in metadata.items()}
    if architecture and ctx_tokens:
        info[f"{architecture}.context_length"] = ctx_tokens
    return {
        "modelfile": "",
        "parameters": "\n".join(f"{name:<30} {value:.9g}" for name, value in recommended),
        "template": template,
        "details": entry["details"],
        "model_info": info,
        "capabilities": list(capabilities),
        "modified_at": entry["modified_at"],
    }


def _details(metadata: Mapping[str, str]) -> dict[str, Any]:
    architecture = metadata.get("general.architecture", "")
    return {
        "parent_model": "",
        "format": "gguf",
        "family": architecture,
        "families": [architecture] if architecture else [],
        "parameter_size": metadata.get("general.size_label", ""),
        "quantization_level": _quantization(metadata.get("general.file_type", "")),
    }


def _quantization(file_type: str) -> str:
    """Return the name of a file's type, such as Q4_K_M; empty for one that is not known."""
    if not file_type:
        return ""
    from gguf import LlamaFileType  # slow to import, and seldom asked for

    try:
        name: str = LlamaFileType(int(file_type)).name
    except ValueError:
        return ""
    return name.removeprefix("MOSTLY_").removeprefix("ALL_")


def _number_or_text(value: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(value)
        except ValueError:
            continue
    return value
