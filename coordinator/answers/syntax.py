"""The styles in which models write tool calls and mark their reasoning. Pure data, and one writer.

A model writes calls as in its training, and its chat template writes earlier turns' calls the same way. So the model's
style is found by letting its template write a call (`coordinator/answers/template.py`). The texts here are those of the
models' templates, blanks included. A grammar made of them keeps the model on familiar text.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any


@dataclasses.dataclass(frozen=True, slots=True)
class Thinking:
    """The marks around a model's thoughts."""

    open: str
    close: str


THINKING = (
    Thinking("<think>", "</think>"),  # DeepSeek R1, Qwen3, GLM, MiniMax, Nemotron, ...
    Thinking("[THINK]", "[/THINK]"),  # Magistral, Ministral
    Thinking("<seed:think>", "</seed:think>"),
    Thinking("<|START_THINKING|>", "<|END_THINKING|>"),  # Command A, R7B
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ObjectBody:
    """A call is one JSON object."""

    name_key: str = "name"
    arguments_key: str = "arguments"
    number_key: str = ""  # before the name: the call's number, as a text


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NamedBody:
    """A call is a name and then the arguments as one JSON object."""

    name_end: str
    id_mark: str = ""  # between name and name_end, before the model's id; each call gets an id of ours instead
    prefix: str = ""  # of every name
    is_numbered: bool = False  # names end in ":" and the call's number, and all of that is the call's id


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TaggedBody:
    """A call is a name, then each argument between tags: a string as it is, any other value as JSON."""

    name_open: str = ""
    name_end: str = ""
    key_open: str
    key_end: str  # up to the value
    value_end: str
    end: str = ""


Body = ObjectBody | NamedBody | TaggedBody


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Syntax:
    """One way of writing calls: begin (open body close), more of them with `between` in between, end."""

    label: str
    begin: str = ""
    open: str = ""
    close: str = ""
    between: str = ""
    end: str = ""
    body: Body
    bare_open: str = ""  # the beginning of a body, where models at times forget `open`

    @property
    def trigger(self) -> str:
        """A mark that no answer without calls contains.

        Empty: an answer is all calls, and shows it by its first brace.
        """
        return self.begin.rstrip("[ \n") or self.open.rstrip()


HERMES = Syntax(label="hermes", open="<tool_call>\n", close="\n</tool_call>", between="\n", body=ObjectBody())
_XML = TaggedBody(
    name_open="<function=",
    name_end=">\n",
    key_open="<parameter=",
    key_end=">",
    value_end="</parameter>\n",
    end="</function>",
)

SYNTAXES = (
    HERMES,  # Hermes, Qwen2.5, Qwen3, QwQ, Granite 4, MiMo, Bielik, ...
    Syntax(
        label="qwen3-coder",  # Qwen3-Coder, Qwen3.5, Nemotron 3, Step
        open="<tool_call>\n",
        close="\n</tool_call>",
        between="\n",
        body=dataclasses.replace(_XML, key_end=">\n", value_end="\n</parameter>\n"),
        bare_open="<function=",
    ),
    Syntax(label="seed-oss", open="<seed:tool_call>\n", close="\n</seed:tool_call>", between="\n", body=_XML),
    Syntax(
        label="glm",  # GLM 4.5, 4.6
        open="<tool_call>",
        close="</tool_call>",
        between="\n",
        body=TaggedBody(
            name_end="\n",
            key_open="<arg_key>",
            key_end="</arg_key>\n<arg_value>",
            value_end="</arg_value>\n",
        ),
    ),
    Syntax(
        label="glm-tight",  # GLM 4.7
        open="<tool_call>",
        close="</tool_call>",
        body=TaggedBody(key_open="<arg_key>", key_end="</arg_key><arg_value>", value_end="</arg_value>"),
    ),
    Syntax(
        label="minimax-m2",
        begin="<minimax:tool_call>\n",
        open='<invoke name="',
        close="</invoke>",
        between="\n",
        end="\n</minimax:tool_call>",
        body=TaggedBody(name_end='">\n', key_open='<parameter name="', key_end='">', value_end="</parameter>\n"),
    ),
    Syntax(
        label="mistral",  # Small 3.2, Devstral, Magistral, Ministral
        open="[TOOL_CALLS]",
        body=NamedBody(name_end="[ARGS]", id_mark="[CALL_ID]"),
    ),
    Syntax(label="mistral-nemo", begin="[TOOL_CALLS][", between=", ", end="]", body=ObjectBody()),
    Syntax(
        label="deepseek",  # V3.1
        begin="<｜tool▁calls▁begin｜>",
        open="<｜tool▁call▁begin｜>",
        close="<｜tool▁call▁end｜>",
        end="<｜tool▁calls▁end｜>",
        body=NamedBody(name_end="<｜tool▁sep｜>"),
    ),
    Syntax(
        label="deepseek-r1",  # V3, R1
        begin="<｜tool▁calls▁begin｜>",
        open="<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
        close="\n```<｜tool▁call▁end｜>",
        between="\n",
        end="<｜tool▁calls▁end｜>",
        body=NamedBody(name_end="\n```json\n"),
    ),
    Syntax(
        label="kimi-k2",
        begin="<|tool_calls_section_begin|>",
        open="<|tool_call_begin|>",
        close="<|tool_call_end|>",
        end="<|tool_calls_section_end|>",
        body=NamedBody(name_end="<|tool_call_argument_begin|>", prefix="functions.", is_numbered=True),
    ),
    Syntax(
        label="command-r7b",  # and Command A
        begin="<|START_ACTION|>[\n    ",
        between=",\n    ",
        end="\n]<|END_ACTION|>",
        body=ObjectBody(name_key="tool_name", arguments_key="parameters", number_key="tool_call_id"),
    ),
    Syntax(label="nemotron", begin="<TOOLCALL>[", between=", ", end="]</TOOLCALL>", body=ObjectBody()),
    Syntax(label="apriel", begin="<tool_calls>[", between=", ", end="]</tool_calls>", body=ObjectBody()),
    Syntax(label="minimax-m1", begin="<tool_calls>\n", between="\n", end="\n</tool_calls>", body=ObjectBody()),
    Syntax(label="functionary", open="<function=", close="</function>", body=NamedBody(name_end=">")),  # v3.1
    Syntax(label="llama", between="; ", body=ObjectBody(arguments_key="parameters")),  # Llama 3.1, 3.2, 3.3
)


def write_calls(syntax: Syntax, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    """Return calls (name, arguments) as a model with this syntax writes them."""
    bodies = [_written(syntax.body, name, arguments, number) for number, (name, arguments) in enumerate(calls)]
    whole = syntax.between.join(f"{syntax.open}{body}{syntax.close}" for body in bodies)
    return f"{syntax.begin}{whole}{syntax.end}"


def _written(body: Body, name: str, arguments: Mapping[str, Any], number: int) -> str:
    if isinstance(body, ObjectBody):
        numbered = {body.number_key: str(number)} if body.number_key else {}
        return _json({**numbered, body.name_key: name, body.arguments_key: arguments})
    if isinstance(body, NamedBody):
        numbered_name = f"{body.prefix}{name}:{number}" if body.is_numbered else f"{body.prefix}{name}"
        return f"{numbered_name}{body.name_end}{_json(arguments)}"
    tags = [
        f"{body.key_open}{key}{body.key_end}{value if isinstance(value, str) else _json(value)}{body.value_end}"
        for key, value in arguments.items()
    ]
    return f"{body.name_open}{name}{body.name_end}{''.join(tags)}{body.end}"


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
