"""The messages between an application and its workers (`body_worker.py`): what is asked for, and checked requests."""

from __future__ import annotations

import array
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal

from msgspec import Struct

from relayline.coordinator.answers.harmony import HARMONY
from relayline.coordinator.answers.syntax import HERMES, SYNTAXES
from relayline.coordinator.answers.template import ToolStyle
from relayline.coordinator.http.edge.limits import HttpLimits
from relayline.coordinator.http.requests.plan import Plan
from relayline.coordinator.media.parts import TEXT_ALONE, MediaFile, Takes
from relayline.coordinator.text.chat import CallForm, ChatTemplate
from relayline.wire.common.bounds import CTX_TOKENS_MAX

PromptRoute = Literal[
    "completions",
    "chat",
    "responses",
    "messages",
    "counted",
    "transcriptions",
    "ollama_chat",
    "ollama_generate",
    "llama",
    "infill",
    "embeddings",
    "rerank",
    "score",
]
"""Of bodies that become prompts: each is answered by a `Prepared`."""
Route = Literal[
    PromptRoute,
    "style",
    "references",
    "conversation",
    "conversation_items",
    "conversation_update",
    "tokenize",
    "detokenize",
    "template",
    "grammar",
]
Phase = Literal["reading", "template", "tokens"]  # a worker's activity
Enter = Callable[[Phase], None]
"""Says that an activity begins: which one it was, should it take too much."""

_SYNTAXES = {syntax.label: syntax for syntax in (*SYNTAXES, HERMES, HARMONY)}


class Style(Struct):
    """A ToolStyle by name."""

    syntax: str
    writes_calls: bool
    shows_tools: bool
    arguments_as_text: bool
    content_is_none: bool
    is_parallel: bool
    fault: str = ""  # why the template cannot be used

    @classmethod
    def of(cls, style: ToolStyle, fault: str = "") -> Style:
        """Name a style."""
        form = style.form
        return cls(
            style.syntax.label,
            style.writes_calls,
            style.shows_tools,
            form.arguments_as_text,
            form.content_is_none,
            style.is_parallel,
            fault,
        )

    def tool_style(self) -> ToolStyle:
        """Return the style."""
        form = CallForm(self.arguments_as_text, self.content_is_none)
        return ToolStyle(_SYNTAXES[self.syntax], self.writes_calls, self.shows_tools, form, self.is_parallel)


class Setting(Struct):
    """The facts that all requests to one application share."""

    model_id: str
    limits: HttpLimits
    template: str | None
    tool_template: str | None  # where chats with tools have another
    bos_text: str
    eos_text: str
    style: Style | None = None  # None until it has been found out
    takes: Takes = TEXT_ALONE  # what chats may hold besides text


class Asked(Struct):
    """A request to a worker; the body comes with it."""

    route: Route
    ctx_tokens: int = 0  # 0 while that is not known
    seed: int = 0  # for a request that brings none
    wants_content: bool = False  # prompts as JSON, for telemetry
    n_context: int = 0  # bytes before the body: the context that it refers to


@dataclasses.dataclass(frozen=True, slots=True)
class Work:
    """One request in a worker's hands."""

    asked: Asked
    raw: bytes | bytearray  # its body
    enter: Enter

    @property
    def ctx_tokens(self) -> int:
        """Tokens that a prompt may have at the most: of the context, or while that is not known of any."""
        return self.asked.ctx_tokens or CTX_TOKENS_MAX


class Prepared(Struct):
    """A checked request."""

    model: str
    plan: Plan  # without what only its grammar is made of, and without the text of its prediction
    prompts: list[bytes]  # i32 token ids, each inside the vocabulary
    echoes: list[str]  # the prompts as text, empty without `echo`
    prediction: bytes  # i32 token ids
    is_thinking: bool  # the prompt of a chat has begun the model's thoughts
    grammar_task: bytes  # for the route "grammar"; empty where there is none to be made
    input_json: str  # what telemetry records of the prompts, where wanted
    start_ns: int  # of tokenising; of the monotonic clock
    end_ns: int
    answer_options: bytes = b""  # of another dialect: msgpack of the fields that its answer repeats
    media: list[MediaFile] = []  # of a chat; in its prompt, -1 represents the first, -2 the second
    is_plain: bool = False  # a prompt, and no chat
    rows: Any = ()  # ImageRows in place of these, once the coordinator has put them in

    @property
    def n_tokens(self) -> int:
        """Tokens of all prompts together, each image or audio file as one."""
        return sum(map(len, self.prompts)) // array.array("i").itemsize


def setting_of(model_id: str, limits: HttpLimits, chat: ChatTemplate, takes: Takes = TEXT_ALONE) -> Setting:
    """Return the setting of an application; `takes`: what its chats may hold besides text."""
    tool_template = chat.for_tools.source if chat.for_tools is not chat else None
    return Setting(model_id, limits, chat.source, tool_template, chat.bos_text, chat.eos_text, takes=takes)


def packed(tokens: Sequence[int]) -> bytes:
    """Return token ids as `Prepared` holds them."""
    return array.array("i", tokens).tobytes()


def unpacked(tokens: bytes) -> tuple[int, ...]:
    """Return token ids as a worker packed them."""
    found = array.array("i")
    found.frombytes(tokens)
    return tuple(found)
