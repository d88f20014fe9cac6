"""Chat templates and tools: the syntax that a template writes, what it renders, and templates without tool support."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from relayline.coordinator.answers.syntax import HERMES, SYNTAXES, NamedBody, ObjectBody, Syntax, write_calls
from relayline.coordinator.answers.template import Conversation
from relayline.coordinator.text.chat import ChatTemplate, read_template
from relayline.coordinator.text.chat_choice import chat_template_of
from relayline.coordinator.text.tokenizer import Tokenizer
from relayline.deploy.testing.vocabulary_files import CHATML, IM_END, N_VOCAB, write_tokenizer
from relayline.wire.common.errors import InvalidRequestError, UsageError

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CALL = {"id": "abcdefgh9", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
CHAT: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Weather in Rome?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "abcdefgh9", "content": "sunny"},
]
HEAD = "{% if tools %}{{ tools | tojson }}\n{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
TAIL = "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"


def quoted(text: str) -> str:
    return "{{ " + json.dumps(text, ensure_ascii=False) + " }}"


def template_of(syntax: Syntax) -> str:
    """A template that writes calls in a syntax, as those of models do: with Jinja's own JSON, blanks and loops."""
    body = syntax.body
    if isinstance(body, ObjectBody):
        number = f'"{body.number_key}": "{{{{ loop.index0 }}}}", ' if body.number_key else ""
        written = (
            f'{{{number}"{body.name_key}": "{{{{ f.name }}}}", "{body.arguments_key}": {{{{ f.arguments | tojson }}}}}}'
        )
    elif isinstance(body, NamedBody):
        number = ":{{ loop.index0 }}" if body.is_numbered else ""
        written = f"{body.prefix}{{{{ f.name }}}}{number}{quoted(body.name_end)}{{{{ f.arguments | tojson }}}}"
    else:
        value = "{{ value if value is string else value | tojson }}"
        tags = f"{quoted(body.key_open)}{{{{ key }}}}{quoted(body.key_end)}{value}{quoted(body.value_end)}"
        loop = f"{{% for key, value in f.arguments.items() %}}{tags}{{% endfor %}}"
        written = f"{body.name_open}{{{{ f.name }}}}{quoted(body.name_end)}{loop}{quoted(body.end)}"
    call = f"{quoted(syntax.open)}{written}{quoted(syntax.close)}"
    between = f"{{% if not loop.last %}}{quoted(syntax.between)}{{% endif %}}"
    calls = f"{{% for c in m.tool_calls %}}{{% set f = c.function %}}{call}{between}{{% endfor %}}"
    return f"{HEAD}{{% if m.tool_calls %}}{quoted(syntax.begin)}{calls}{quoted(syntax.end)}{{% endif %}}{TAIL}"


def conversation_of(source: str | None, tokenizer: Tokenizer) -> Conversation:
    return Conversation(ChatTemplate(source, bos_text="<s>", eos_text="</s>"), tokenizer)


@pytest.mark.parametrize("syntax", SYNTAXES, ids=lambda syntax: syntax.label)
def test_the_syntax_is_the_one_that_a_template_writes(syntax: Syntax, tokenizer: Tokenizer) -> None:
    style = conversation_of(template_of(syntax), tokenizer).style
    assert (style.syntax.label, style.writes_calls, style.shows_tools, style.is_parallel) == (
        syntax.label,
        True,
        True,
        True,
    )


@pytest.mark.parametrize("syntax", SYNTAXES, ids=lambda syntax: syntax.label)
def test_a_chat_with_tools_reaches_a_template_that_knows_them(syntax: Syntax, tokenizer: Tokenizer) -> None:
    text = conversation_of(template_of(syntax), tokenizer).render(CHAT, [WEATHER], {})
    assert text == (
        f"[{json.dumps(WEATHER)}]\n<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\nWeather in Rome?<|im_end|>\n"
        f"<|im_start|>assistant\n{write_calls(syntax, [('weather', {'city': 'Rome'})])}<|im_end|>\n"
        "<|im_start|>tool\nsunny<|im_end|>\n<|im_start|>assistant\n"
    )


def test_without_tools_a_template_sees_none(tokenizer: Tokenizer) -> None:
    text = conversation_of(template_of(HERMES), tokenizer).render(CHAT[:2], [], {})
    assert text.startswith("<|im_start|>system\nBe brief.<|im_end|>")


# The differences between models' templates: written for these tests, each modelled on a real one.
ONE_CALL = (
    HEAD.replace("{% for", "{% set only = namespace(one=1) %}{% for", 1)
    + "{% if m.tool_calls %}{% if m.tool_calls | length != 1 %}{{ raise_exception('one call at a time') }}{% endif %}"
    + '{{ \'{"name": "\' + m.tool_calls[0].function.name + \'", "parameters": \' }}'
    + "{{ m.tool_calls[0].function.arguments | tojson }}}{% endif %}"
    + TAIL
)
TEXT_ARGUMENTS = (
    "{% for m in messages %}{% if m.content is none %}<｜Assistant｜><｜tool▁calls▁begin｜>{% for c in m.tool_calls %}"
    "{{ '<｜tool▁call▁begin｜>' + c.type + '<｜tool▁sep｜>' + c.function.name + '\\n```json\\n' "
    "+ c.function.arguments + '\\n```<｜tool▁call▁end｜>' }}"
    "{% if not loop.last %}{{ '\\n' }}{% endif %}{% endfor %}<｜tool▁calls▁end｜>"
    "{% else %}<｜{{ m.role }}｜>{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<｜Assistant｜><think>\n{% endif %}</think>"
)
THOUGHTS_FIRST = template_of(HERMES).replace(
    "<|im_start|>assistant\n{% endif %}", "<|im_start|>assistant\n<think>\n{% endif %}{# </think> #}"
)


@pytest.mark.parametrize(
    ("source", "label", "shows", "form", "is_parallel"),
    [
        (ONE_CALL, "llama", True, (False, False), False),
        (TEXT_ARGUMENTS, "deepseek-r1", False, (True, True), True),
        (THOUGHTS_FIRST, "hermes", True, (False, False), True),
    ],
    ids=["one call", "text arguments", "thoughts first"],
)
def test_templates_that_want_it_otherwise(
    source: str, label: str, shows: bool, form: tuple[bool, bool], is_parallel: bool, tokenizer: Tokenizer
) -> None:
    style = conversation_of(source, tokenizer).style
    assert (style.syntax.label, style.writes_calls, style.shows_tools) == (label, True, shows)
    assert (style.form.arguments_as_text, style.form.content_is_none) == form
    assert style.is_parallel == is_parallel


def test_a_template_that_shows_no_tools_has_them_explained_in_its_own_syntax(tokenizer: Tokenizer) -> None:
    text = conversation_of(TEXT_ARGUMENTS, tokenizer).render(CHAT, [WEATHER], {})
    assert text.startswith("<｜system｜>Be brief.\n\nYou may call")
    assert json.dumps(WEATHER) in text
    assert 'function<｜tool▁sep｜>NAME\n```json\n{"ARGUMENT": "VALUE"}\n```<｜tool▁call▁end｜>' in text
    assert 'function<｜tool▁sep｜>weather\n```json\n{"city": "Rome"}\n```' in text


NO_SYSTEM = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('no system turns') }}{% endif %}{% for m in messages %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('turns alternate') }}{% endif %}"
    "[{{ m.role }}] {{ m.content }}\n{% endfor %}[assistant]"
)


@pytest.mark.parametrize("source", [CHATML, NO_SYSTEM], ids=["chatml", "no system turns"])
def test_any_template_can_be_given_tools(source: str, tokenizer: Tokenizer) -> None:
    conversation = conversation_of(source, tokenizer)
    assert not conversation.style.writes_calls
    chat = [*CHAT[1:], {**CHAT[3], "content": "warm"}, {"role": "assistant", "content": "Sunny and warm."}, CHAT[1]]
    text = conversation.render(chat, [WEATHER], {})
    assert json.dumps(WEATHER) in text
    assert '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>' in text
    assert "<tool_response>\nsunny\n</tool_response>\n<tool_response>\nwarm\n</tool_response>" in text
    assert text.index("You may call") < text.index("Rome")


def test_only_results_are_joined(tokenizer: Tokenizer) -> None:
    echo = {"role": "assistant", "content": "<tool_response> is what I got"}
    text = conversation_of(NO_SYSTEM, tokenizer).render([*CHAT[1:], echo, CHAT[1]], [WEATHER], {})
    assert "[assistant] <tool_response> is what I got" in text


@pytest.mark.parametrize("role", ["system", "developer"])
def test_the_explanation_joins_the_systems_text(role: str, tokenizer: Tokenizer) -> None:
    parts = [{"type": "text", "text": "Be"}, {"type": "text", "text": "brief."}]
    chat = [{"role": role, "content": parts}, *CHAT[1:]]
    text = conversation_of(CHATML, tokenizer).render(chat, [WEATHER], {})
    assert text.startswith("<|im_start|>system\nBe\nbrief.\n\nYou may call")
    assert text.count("<|im_start|>system") == 1


def test_calls_of_earlier_turns_need_no_tools_now(tokenizer: Tokenizer) -> None:
    text = conversation_of(CHATML, tokenizer).render(CHAT, [], {})
    assert "<tool_call>" in text
    assert "You may call" not in text


@pytest.mark.parametrize("arguments", ["not JSON", "5", {"city": "Rome"}, ""])
def test_odd_arguments_of_earlier_turns_do_no_harm(arguments: Any, tokenizer: Tokenizer) -> None:
    call = {**CALL, "function": {"name": "weather", "arguments": arguments}}
    chat = [*CHAT[:2], {**CHAT[2], "tool_calls": [call]}]
    for source in (CHATML, template_of(HERMES)):
        assert "weather" in conversation_of(source, tokenizer).render(chat, [WEATHER], {})


@pytest.mark.parametrize("source", [None, "{% if", "{{ messages[0].nothing.at.all }}"])
def test_a_model_without_a_usable_template_is_no_failure_until_asked(source: str | None, tokenizer: Tokenizer) -> None:
    conversation = conversation_of(source, tokenizer)
    with pytest.raises(InvalidRequestError) as caught:
        conversation.render(CHAT, [WEATHER], {})
    assert caught.value.param == "messages"


def test_whether_a_prompt_has_opened_thoughts(tokenizer: Tokenizer) -> None:
    conversation = conversation_of(THOUGHTS_FIRST, tokenizer)
    assert conversation.is_thinking(conversation.render(CHAT[:2], [], {}))
    assert not conversation.is_thinking("<think>\n\n</think>\n\n")
    assert not conversation_of(CHATML, tokenizer).is_thinking("<think>\n")


def test_marks_that_are_control_tokens_are_shown_and_no_others(tmp_path: Path) -> None:
    controls = ["[TOOL_CALLS]", "[ARGS]", "[OTHER]"]
    tokenizer = Tokenizer.load(write_tokenizer(tmp_path / "tokenizer.gguf", controls=controls))
    mistral = next(syntax for syntax in SYNTAXES if syntax.label == "mistral")
    conversation = conversation_of(template_of(mistral), tokenizer)
    assert conversation.marks == {"[TOOL_CALLS]": N_VOCAB, "[ARGS]": N_VOCAB + 1}
    assert [conversation.piece(N_VOCAB + at) for at in range(3)] == [b"[TOOL_CALLS]", b"[ARGS]", b""]
    assert (conversation.piece(ord("h")), conversation.piece(IM_END)) == (b"h", b"")
    assert conversation_of(template_of(HERMES), tokenizer).marks == {}


def test_a_file_may_have_a_separate_template_for_tools(tmp_path: Path) -> None:
    path = write_tokenizer(tmp_path / "tokenizer.gguf", tool_template="[tools]" + template_of(HERMES))
    tokenizer = Tokenizer.load(path)
    conversation = Conversation(chat_template_of(tokenizer, None), tokenizer)
    assert conversation.style.writes_calls
    assert conversation.render(CHAT[:2], [], {}).startswith("<|im_start|>system")
    for text in (conversation.render(CHAT[:2], [WEATHER], {}), conversation.render(CHAT, [], {})):
        assert text.startswith("[tools]")


def test_a_template_in_a_file_stands_before_the_model_s_own(tmp_path: Path) -> None:
    path = write_tokenizer(tmp_path / "tokenizer.gguf", tool_template="[tools]" + template_of(HERMES))
    tokenizer = Tokenizer.load(path)
    given = tmp_path / "chat.jinja"
    given.write_text("[given é]" + template_of(HERMES), encoding="utf-8")
    conversation = Conversation(chat_template_of(tokenizer, given), tokenizer)
    for tools in ([], [WEATHER]):
        assert conversation.render(CHAT[:2], tools, {}).startswith("[given é]")


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "No such file"),
        (b"\xff", "not UTF-8 at byte 0"),
        (b"{% if", "does not compile"),
        (b"{{ " + b"9" * 5_000 + b" }}", "does not compile"),
    ],
)
def test_a_template_that_cannot_be_used_is_refused_in_one_line(
    content: bytes | None, says: str, tmp_path: Path
) -> None:
    path = tmp_path / "chat.jinja"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UsageError, match=says) as caught:
        read_template(path)
    assert "\n" not in str(caught.value)
