"""The body of POST /v1/responses as a type, and the fields that are refused because they would change the answer."""

from __future__ import annotations

import re
from typing import Annotated, Any

from msgspec import Meta, Struct

from relayline.coordinator.http.requests.bodies import LogprobCount, Positive, Salt, Share
from relayline.wire.common.errors import InvalidRequestError

ITEMS_MAX = 16_384  # of one input, like a chat's messages
# As OpenAI has them: pairs, and characters of their keys and values. Each event with the whole response repeats them.
METADATA_MAX, METADATA_KEY_CHARS_MAX, METADATA_VALUE_CHARS_MAX = 16, 64, 512
Metadata = Annotated[
    dict[
        Annotated[str, Meta(max_length=METADATA_KEY_CHARS_MAX)],
        Annotated[str, Meta(max_length=METADATA_VALUE_CHARS_MAX)],
    ],
    Meta(max_length=METADATA_MAX),
]


class Reasoning(Struct):
    """`reasoning`."""

    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None


class TextConfig(Struct):
    """`text`."""

    format: dict[str, Any] | None = None
    verbosity: str | None = None  # a hint, which no template knows


class ConversationName(Struct):
    """`conversation`, in its longer form."""

    id: str


class ResponsesBody(Struct, kw_only=True):
    """POST /v1/responses. None means absent."""

    model: str | None = None
    input: str | Annotated[list[dict[str, Any]], Meta(max_length=ITEMS_MAX)] | None = None
    instructions: str | None = None
    max_output_tokens: Positive | None = None
    max_tool_calls: int | None = None  # of hosted tools, of which there are none
    metadata: Metadata | None = None
    parallel_tool_calls: bool | None = None
    previous_response_id: str | None = None
    prompt_cache_key: str | None = None
    reasoning: Reasoning | None = None
    safety_identifier: str | None = None
    store: bool | None = None
    stream: bool | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    text: TextConfig | None = None
    tool_choice: Any = None
    tools: list[Any] | None = None
    top_logprobs: LogprobCount | None = None
    top_p: Share | None = None
    user: str | None = None
    service_tier: str | None = None
    cache_salt: Salt | None = None  # as vLLM has it
    include: list[str] | None = None
    background: bool | None = None
    conversation: str | ConversationName | None = None
    # Not served; see NEUTRAL.
    prompt: Any = None
    truncation: Any = None
    moderation: Any = None
    context_management: Any = None


# Fields that are not served -> values without effect, and the client's alternative.
NEUTRAL: dict[str, tuple[tuple[object, ...], str]] = {
    "prompt": ((), "stored prompts are not served here; send instructions and input"),
    "truncation": (("disabled", "auto"), "send disabled or auto; an input that is too long is refused either way"),
    "moderation": ((), "send none"),
    "context_management": (([],), "send none"),
}


def conversation_id(sent: str | ConversationName | None) -> str | None:
    """Return the id of a conversation in either form."""
    return sent.id if isinstance(sent, ConversationName) else sent


def check_served(body: ResponsesBody) -> None:
    """Raise InvalidRequestError for fields that are not served."""
    for param, (neutral, remedy) in NEUTRAL.items():
        value = getattr(body, param)
        if value is not None and value not in neutral:
            raise InvalidRequestError.of_field(param, f"not supported by this server; {remedy}")
    if body.background and body.store is False:
        raise InvalidRequestError.of_field("store", "a background response has to be stored; leave it out")


# Tools that run at OpenAI, or whose calls only its own models make. Some have a date at their end.
_HOSTED = frozenset({
    "apply_patch", "code_interpreter", "computer", "computer_use_preview", "file_search", "image_generation",
    "local_shell", "mcp", "shell", "tool_search", "web_search", "web_search_preview",
})  # fmt: skip
_DATE = re.compile(r"_[0-9]{4}_[0-9]{2}_[0-9]{2}$")


def is_hosted(kind: object) -> bool:
    """Return whether a tool's type is one that nothing here can run."""
    return isinstance(kind, str) and _DATE.sub("", kind[:64]) in _HOSTED
