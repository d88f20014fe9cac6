"""Chat templates: what they may use, how messages reach them, and that a template's failure is the request's error."""

from __future__ import annotations

from typing import Any

import pytest

from relayline.coordinator.text.chat import ChatTemplate
from relayline.deploy.testing.vocabulary_files import CHATML
from relayline.wire.common.errors import InvalidRequestError

USER = {"role": "user", "content": "hi"}


def render(source: str, *messages: dict[str, Any], **variables: Any) -> str:
    return ChatTemplate(source, bos_text="<s>", eos_text="</s>").render(messages or (USER,), variables)


def test_a_common_template() -> None:
    text = render(CHATML, {"role": "system", "content": "be brief"}, USER)
    assert text == "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_special_texts_and_variables_by_name() -> None:
    assert render("{{ bos_token }}{{ mood }}{{ eos_token }}", mood="calm") == "<s>calm</s>"
    assert render("{{ bos_token }}", bos_token="forged") == "<s>"


def test_the_assistant_is_to_speak_unless_the_caller_says_otherwise() -> None:
    assert render("{{ add_generation_prompt }}") == "True"
    assert render("{{ add_generation_prompt }}", add_generation_prompt=False) == "False"


def test_a_template_made_for_tools_works_without_them() -> None:
    assert render("{% for tool in tools %}x{% endfor %}{{ tools is defined }}") == "False"


def test_blocks_leave_no_blank_lines() -> None:
    assert render("{% for m in messages %}\n  {% if true %}\n{{ m.content }}\n  {% endif %}\n{% endfor %}") == "hi\n"


def test_tojson_keeps_html_and_accents() -> None:
    assert render("{{ {'a': '<é>'} | tojson }}") == '{"a": "<é>"}'
    assert render("{{ [1] | tojson(indent=1) }}") == "[\n 1\n]"


def test_loop_controls_and_generation_blocks() -> None:
    assert render("{% for m in messages %}{{ m.content }}{% break %}{% endfor %}", USER, USER) == "hi"
    assert render("{% for m in messages %}{% generation %}<{{ m.content }}>{% endgeneration %}{% endfor %}") == "<hi>"


def test_strftime_now() -> None:
    assert render("{{ strftime_now('%Y') }}").isdigit()


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("plain", "plain"),
        (None, ""),
        ([], ""),
        ([{"type": "text", "text": "one"}, {"type": "text", "text": "two"}], "one\ntwo"),
    ],
)
def test_content_reaches_the_template_as_one_text(content: object, text: str) -> None:
    assert render("{{ messages[0].content }}", {"role": "user", "content": content}) == text


@pytest.mark.parametrize("part", [{"type": "image_url", "image_url": {"url": "x"}}, {"type": "x"}, "text", 5])
def test_a_part_that_is_not_text_is_named(part: object) -> None:
    with pytest.raises(InvalidRequestError, match="only text parts") as caught:
        render(CHATML, USER, {"role": "user", "content": [{"type": "text", "text": "see"}, part]})
    assert caught.value.param == "messages[1].content[1]"


def test_a_text_part_without_text_is_not_called_another_kind() -> None:
    with pytest.raises(InvalidRequestError, match="a part of type text needs a string `text`"):
        render(CHATML, USER, {"role": "user", "content": [{"type": "text"}]})


def test_developer_is_system_to_templates_that_do_not_know_it() -> None:
    message = {"role": "developer", "content": "x"}
    assert render("{{ messages[0].role }}", message) == "system"
    assert render("{# developer #}{{ messages[0].role }} {{ messages[0].content }}", message) == "developer x"


def test_tool_call_arguments_are_objects_to_the_template() -> None:
    source = "{{ messages[0].tool_calls[0].function.arguments | tojson }}"
    for arguments, text in (('{"a":1}', '{"a": 1}'), ("not json", '{"arguments": "not json"}'), ("", "{}")):
        call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
        assert render(source, {"role": "assistant", "content": None, "tool_calls": [call]}) == text


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[0].content + 1 }}",
        "{{ messages[7].content.x }}",
        "{{ 1 / 0 }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{% for i in range(10000000) %}{% endfor %}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    ],
)
def test_whatever_a_template_does_wrong_is_one_line_of_the_request(source: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        render(source)
    assert caught.value.param == "messages"
    assert "\n" not in caught.value.message


def test_the_templates_own_refusal_is_shown() -> None:
    with pytest.raises(InvalidRequestError, match="refuses this chat: roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")


@pytest.mark.parametrize("source", [None, "{% if %}"])
def test_no_usable_template_points_at_completions(source: str | None) -> None:
    with pytest.raises(InvalidRequestError, match="use /v1/completions"):
        ChatTemplate(source).render([USER])


PARTS = (
    "{% for m in messages %}<{{ m.role }}>{% for part in m.content %}{% if part.type == 'text' %}{{ part.text }}"
    "{% endif %}{% endfor %}{% endfor %}"
)


@pytest.mark.parametrize("content", ["SECRET", [{"type": "text", "text": "SECRET"}]])
def test_a_template_that_reads_parts_gets_parts(content: Any) -> None:
    messages = ({"role": "system", "content": "be brief"}, {"role": "user", "content": content})
    assert render(PARTS, *messages) == "<system>be brief<user>SECRET"


LOOP = "{% for m in messages %}{% if m.role in known %}[{{ m.role }}]{{ m.content }}{% endif %}{% endfor %}"


@pytest.mark.parametrize("before", ["", "{# by the developers #}", "{% set developer_preamble = 1 %}"])
def test_developer_turns_are_not_lost_where_the_template_only_has_the_word(before: str) -> None:
    source = before + "{% set known = ('system', 'user', 'assistant') %}" + LOOP
    assert render(source, {"role": "developer", "content": "RULE"}, USER) == "[system]RULE[user]hi"
    knowing = "{% set known = ('system', 'developer', 'user') %}" + LOOP
    assert render(knowing, {"role": "developer", "content": "RULE"}, USER) == "[developer]RULE[user]hi"


@pytest.mark.parametrize("refusal", ["", "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}"])
def test_system_turns_that_a_template_does_not_take_stand_before_the_first_user_turn(refusal: str) -> None:
    source = refusal + "{% set known = ('user', 'assistant') %}" + LOOP
    system_turns = {"role": "system", "content": "be brief"}, {"role": "developer", "content": "be kind"}
    answer = {"role": "assistant", "content": "yes"}
    assert render(source, *system_turns, USER, answer, USER) == "[user]be brief\n\nbe kind\n\nhi[assistant]yes[user]hi"


def test_a_role_that_nobody_knows_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="'robot' is not a role; use one of system, ") as caught:
        render(CHATML, {"role": "robot", "content": "x"})
    assert caught.value.param == "messages[0].role"
    assert render("{# knows ipython #}{{ messages[0].role }}", {"role": "ipython", "content": "x"}) == "ipython"


NINE = (
    "{% for m in messages %}{% for call in m.tool_calls or [] %}{% if call.id|length != 9 %}"
    "{{ raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{% endif %}{{ call.id }}"
    "{% endfor %}{% if m.role == 'tool' %}={{ m.tool_call_id }}{% endif %}{% endfor %}"
)


@pytest.mark.parametrize("foreign", ["call_0123456789abcdef", "é", "abcdefgh1"])
def test_ids_of_other_servers_are_made_to_fit(foreign: str) -> None:
    call = {"id": foreign, "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = (
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "x", "tool_call_id": foreign},
    )
    mine, _, results = render(NINE, *messages).partition("=")
    assert mine == results
    assert (len(mine), mine == foreign) == (9, foreign == "abcdefgh1")
