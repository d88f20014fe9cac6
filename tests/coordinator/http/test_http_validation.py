"""Refusals and their form, and that no body at all causes a 500."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import re
from collections.abc import Callable, Iterator
from typing import Any, Literal

import aiohttp
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relayline.coordinator.http.edge.errors import MESSAGE_CHARS_MAX, error_body, plain_body
from relayline.coordinator.http.edge.limits import HttpLimits
from relayline.coordinator.http.requests import validation
from relayline.coordinator.http.requests.bodies import ChatBody, CompletionBody, decode_body
from relayline.coordinator.http.requests.plan import Plan
from relayline.coordinator.http.requests.prompts import check_tokens, fit_tokens, split_prompt
from relayline.coordinator.text.tokenizer import Tokenizer
from relayline.deploy.testing.vocabulary_files import N_VOCAB, write_tokenizer
from relayline.stage.sampling.sampler import SamplingOptions
from relayline.wire.common.bounds import GRAMMAR_TOKENS_MAX
from relayline.wire.common.errors import ContextLengthError, InvalidRequestError, ModelNotFoundError
from relayline.wire.pb.relayline.v1 import relayline_pb2 as pb
from tests.support.examples import thinned
from tests.support.http_support import MODEL, FakeGenerator, serving

LIMITS = HttpLimits()
SEED = 11
USER = {"role": "user", "content": "hi"}


def test_an_empty_body_is_called_empty() -> None:
    with pytest.raises(InvalidRequestError, match=r"^the body is empty; send a JSON object$"):
        decode_body(b"", ChatBody)


def completion_plan(**fields: object) -> Plan:
    body = decode_body(json.dumps({"prompt": "x", **fields}).encode(), CompletionBody)
    return validation.plan_completion(body, LIMITS, SEED)


def chat_plan(**fields: object) -> Plan:
    body = decode_body(json.dumps({"messages": [USER], **fields}).encode(), ChatBody)
    return validation.plan_chat(body, LIMITS, SEED)


def test_defaults() -> None:
    for plan in (completion_plan(), chat_plan()):
        assert (plan.n, plan.max_tokens, plan.stops, plan.stream, plan.ignore_eos) == (1, None, (), False, False)
        sampling = plan.sampling
        assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (1.0, 1.0, 0, 0.0)
        assert (sampling.seed, sampling.n_logprobs) == (SEED, -1)
    assert completion_plan().max_tokens_default == 16
    assert chat_plan().max_tokens_default is None


def test_every_honoured_field_arrives() -> None:
    fields = {"temperature": 0.5, "top_p": 0.9, "top_k": 40, "min_p": 0.05, "seed": 5, "n": 2, "max_tokens": 9}
    for plan in (completion_plan(**fields), chat_plan(**fields)):
        sampling = plan.sampling
        assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.9, 40, 0.05)
        assert (plan.n, plan.max_tokens, sampling.seed) == (2, 9, 5)
        assert [plan.sampling_of(choice).seed for choice in range(3)] == [5, 6, 7]
    assert chat_plan(max_tokens=9, max_completion_tokens=4).max_tokens == 4
    assert completion_plan(stop="a").stops == ("a",)
    assert completion_plan(stop=["a", "b"], ignore_eos=True, echo=True).stops == ("a", "b")
    assert completion_plan(logprobs=0).sampling.n_logprobs == 0
    assert chat_plan(logprobs=True).sampling.n_logprobs == 0
    assert chat_plan(logprobs=True, top_logprobs=20).sampling.n_logprobs == 20
    assert completion_plan(top_k=-1).sampling.top_k == 0
    for top_k in (N_VOCAB + 1, (1 << 31) - 1, 1 << 31, 1 << 70):
        kept = completion_plan(top_k=top_k).sampling.top_k
        assert N_VOCAB < kept <= top_k, "as good as all"
        SamplingOptions(top_k=pb.SessionOptions(top_k=kept).top_k)  # fits the wire, and the last stage takes it


def test_penalties_and_biases_are_read() -> None:
    plan = completion_plan(frequency_penalty=0.5, presence_penalty=-1, logit_bias={"7": -100, "5": 1.5, "6": 0})
    assert (plan.sampling.frequency_penalty, plan.sampling.presence_penalty) == (0.5, -1)
    assert plan.sampling.logit_bias == ((5, 1.5), (7, -100))
    assert plan.sampling_of(1).logit_bias == plan.sampling.logit_bias
    assert plan.sampling.is_penalised
    assert not completion_plan(logit_bias={"5": 1}).sampling.is_penalised


def test_seeds_wrap_at_64_bits() -> None:
    assert completion_plan(seed=-2).sampling.seed == 2**64 - 2
    assert completion_plan(seed=-2).sampling_of(2).seed == 0
    assert completion_plan(seed=2**70 + 3).sampling.seed == 3


NEUTRAL = {
    "frequency_penalty": 0,
    "presence_penalty": 0.0,
    "logit_bias": {},
    "response_format": {"type": "text"},
    "stop": None,
    "stream_options": None,
    "user": "u",
    "metadata": {"a": "b"},
    "store": True,
    "service_tier": None,
    "priority": 0,
    "safety_identifier": "s",
    "prompt_cache_key": "k",
    "verbosity": "low",
    "reasoning_effort": "none",
    "parallel_tool_calls": True,
    "something_new": [1, {"x": None}],
    "tool_choice": "auto",
    "repetition_penalty": 1.0,
    "repeat_penalty": 1,
    "typical_p": 1.0,
    "mirostat": 0,
    "repeat_last_n": 64,  # of no penalty
    "top_n_sigma": -1,
    "xtc_probability": 0,
    "xtc_threshold": 0.3,
    "dry_multiplier": 0.0,
    "dynatemp_range": 0,
    "dynatemp_exponent": 2.0,  # of no range
    "min_tokens": 0,
    "stop_token_ids": [],
    "bad_words": [],
    "skip_special_tokens": True,
    "length_penalty": 1.0,
    "grammar": "",
    "guided_json": None,
    "prediction": {"type": "content", "content": ""},
}


def test_neutral_and_unknown_fields_change_nothing() -> None:
    assert completion_plan(**NEUTRAL, best_of=1, suffix="") == completion_plan()
    assert completion_plan(n=2, best_of=2).n == 2
    assert chat_plan(**NEUTRAL | {"tools": [], "modalities": ["text"], "tool_choice": "none"}) == chat_plan()


PREDICTIONS = [
    *("text", ["text"], 5, True, {}, {"content": "text"}),
    *({"type": kind, "content": "text"} for kind in ("", "text", None, 5, ["content"])),
    *({"type": "content", "content": content} for content in (5, 0, False, {}, {"type": "text", "text": "x"})),
    *({"type": "content", "content": [part]} for part in ("x", None, True, 0.5, {"text": "x"}, {"type": "text"})),
    {"type": "content", "content": [{"type": "text", "text": "x"}, {"type": "text", "text": 5}]},
    {"type": "content", "content": [{"type": "refusal", "refusal": "x", "text": "x"}]},
    {"type": "content", "content": [5, "x"]},
    {"type": "content", "content": [5, True]},
]


@pytest.mark.parametrize(("field", "instead"), [("functions", "send tools"), ("function_call", "send tool_choice")])
def test_older_fields_name_those_of_today(field: str, instead: str) -> None:
    with pytest.raises(InvalidRequestError, match=rf"^{field}: .*; {instead}$"):
        chat_plan(**{field: [{"name": "f"}]})


@pytest.mark.parametrize(
    ("plan", "fields", "param"),
    [
        (completion_plan, {"max_tokens": 0}, "max_tokens"),
        (completion_plan, {"max_tokens": "9"}, "max_tokens"),
        (completion_plan, {"max_tokens": 1.5}, "max_tokens"),
        (completion_plan, {"max_tokens": True}, "max_tokens"),
        (completion_plan, {"n": 0}, "n"),
        (completion_plan, {"n": LIMITS.choices_per_prompt_max + 1}, "n"),
        (completion_plan, {"temperature": -0.1}, "temperature"),
        (completion_plan, {"temperature": 2.1}, "temperature"),
        (completion_plan, {"top_p": 1.1}, "top_p"),
        (completion_plan, {"top_k": -2}, "top_k"),
        (completion_plan, {"min_p": -1}, "min_p"),
        (completion_plan, {"seed": "x"}, "seed"),
        (completion_plan, {"stop": ["a", 1]}, "stop[1]"),
        (completion_plan, {"stop": ""}, "stop"),
        (completion_plan, {"stop": ["a"] * (LIMITS.stops_max + 1)}, "stop"),
        (completion_plan, {"stop": "x" * (LIMITS.stop_chars_max + 1)}, "stop"),
        (completion_plan, {"logprobs": 21}, "logprobs"),
        (completion_plan, {"logprobs": True}, "logprobs"),
        (completion_plan, {"echo": True, "logprobs": 1, "stream": True}, "stream"),
        (completion_plan, {"prompt_logprobs": 1, "stream": True}, "stream"),
        (completion_plan, {"prompt_logprobs": -1}, "prompt_logprobs"),
        (completion_plan, {"best_of": 2}, "best_of"),
        (completion_plan, {"suffix": "end", "echo": True}, "suffix"),
        (completion_plan, {"stream": "yes"}, "stream"),
        (completion_plan, {"stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        (completion_plan, {"stream_options": {}}, "stream_options"),
        (chat_plan, {"stream": False, "stream_options": {"include_usage": True}}, "stream_options"),
        (completion_plan, {"return_tokens_as_token_ids": True}, "return_tokens_as_token_ids"),
        (chat_plan, {"echo": True}, "echo"),
        (completion_plan, {"frequency_penalty": 2.5}, "frequency_penalty"),
        (completion_plan, {"presence_penalty": -2.1}, "presence_penalty"),
        (completion_plan, {"logit_bias": {"5": 101}}, "logit_bias[...]"),
        (completion_plan, {"logit_bias": {"-5": 1}}, "logit_bias"),
        (completion_plan, {"logit_bias": {"a": 1}}, "logit_bias"),
        (completion_plan, {"logit_bias": {"7": 1, "007": 1}}, "logit_bias"),
        (completion_plan, {"logit_bias": {str(token): 1 for token in range(301)}}, "logit_bias"),
        (completion_plan, {"prompt": [1, 2.5]}, "prompt[1]"),
        (completion_plan, {"prompt": None}, "prompt"),
        (chat_plan, {"messages": []}, "messages"),
        (chat_plan, {"messages": [{"content": "x"}]}, "messages[0].role"),
        (chat_plan, {"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        (chat_plan, {"logprobs": 3}, "logprobs"),
        (chat_plan, {"top_logprobs": 3}, "top_logprobs"),
        (chat_plan, {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        (chat_plan, {"response_format": {"type": "xml"}}, "response_format"),
        (chat_plan, {"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (
            chat_plan,
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            "response_format.json_schema",
        ),
        (chat_plan, {"tools": [{"type": "function"}]}, "tools[0]"),
        (completion_plan, {"tools": [{}]}, "tools"),
        (chat_plan, {"tool_choice": "required"}, "tool_choice"),
        (chat_plan, {"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
        (chat_plan, {"function_call": {"name": "f"}}, "function_call"),
        (chat_plan, {"audio": {"voice": "x"}}, "audio"),
        (completion_plan, {"mirostat": 3}, "mirostat"),
        (completion_plan, {"repeat_penalty": -0.9}, "repeat_penalty"),
        (chat_plan, {"grammar": ["root ::= x"]}, "grammar"),
        (chat_plan, {"guided_choice": [1]}, "guided_choice[0]"),
        (chat_plan, {"structured_outputs": {"structural_tag": "a"}}, "structured_outputs"),
        (chat_plan, {"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex"),
        (chat_plan, {"guided_json": {}, "structured_outputs": {"regex": "a"}}, "structured_outputs.regex"),
        (completion_plan, {"json_schema": {"type": "object"}, "ignore_eos": True}, "ignore_eos"),
        (chat_plan, {"functions": [{}]}, "functions"),
        (chat_plan, {"modalities": ["text", "audio"]}, "modalities"),
        *(
            (plan, {"prediction": wrong}, "prediction")
            for plan in (completion_plan, chat_plan)
            for wrong in PREDICTIONS
        ),
    ],
)
def test_refusals_name_the_field(plan: Callable[..., Plan], fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        plan(**fields)
    assert caught.value.param == param
    assert param in caught.value.message
    assert "\n" not in caught.value.message


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        (b"", "the body is empty"),
        (b"{", "not valid JSON"),
        (b'{"prompt": "x"} trailing', "not valid JSON"),
        (b'{"prompt": NaN}', "not valid JSON"),
        (b'{"prompt": "\xff"}', "not UTF-8"),
        # From Python 3.14 on, C code goes as deep as its stack has room.
        (b'{"x": ' + b"[" * 2_000_000, "nested too deeply"),
        (b"[]", "the body: expected object, got array"),
        (b"{}", "prompt: required field is missing"),
    ],
)
def test_bodies_that_are_no_request(raw: bytes, text: str) -> None:
    with pytest.raises(InvalidRequestError, match=text):
        decode_body(raw, CompletionBody)


class _Inner(msgspec.Struct):
    word: Literal["a", "b"] | None = msgspec.field(name="said", default=None)


class _Outer(msgspec.Struct):
    inner: _Inner | None = None


@pytest.mark.parametrize(
    ("kind", "body", "says"),
    [
        (
            ChatBody,
            {"messages": [{"role": "user", "content": ""}], "reasoning_effort": "lot"},
            "reasoning_effort: 'lot' is none of none, minimal, low, medium, high, xhigh, max",
        ),
        (_Outer, {"inner": {"said": "c"}}, "inner.said: 'c' is none of a, b"),
    ],
)
def test_a_word_that_is_none_of_a_field_names_them(kind: Any, body: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        decode_body(msgspec.json.encode(body), kind)
    assert caught.value.message == says


@pytest.mark.parametrize(
    ("prompt", "parts"),
    [
        ("text", ["text"]),
        ([1, 2], [[1, 2]]),
        (["a", "b"], ["a", "b"]),
        ([[1], [2, 3]], [[1], [2, 3]]),
        ([], None),
        ([1, "a"], None),
        (["a", [1]], None),
        (["a"] * (LIMITS.choices_max // 2 + 1), None),
    ],
)
def test_prompt_forms(prompt: Any, parts: list[str | list[int]] | None) -> None:
    if parts is not None:
        assert split_prompt(prompt, 2, LIMITS) == parts
        return
    with pytest.raises(InvalidRequestError) as caught:
        split_prompt(prompt, 2, LIMITS)
    assert caught.value.param == "prompt"


@pytest.mark.parametrize("plan", [completion_plan, chat_plan])
def test_prediction_forms(plan: Callable[..., Plan]) -> None:
    def predicted(*texts: str) -> str:
        parts = [{"type": "text", "text": text} for text in texts]
        return plan(prediction={"type": "content", "content": parts}).prediction

    assert plan(prediction={"type": "content", "content": " a\n"}).prediction == " a\n"
    assert predicted("if x:\n", "    y") == "if x:\n    y", "nothing comes between parts"
    for nothing in (None, {"type": "content"}, *({"type": "content", "content": none} for none in (None, "", []))):
        assert plan(prediction=nothing) == plan()
    assert predicted("", "") == ""
    assert plan(prediction={"type": "content", "content": [5, 0, 7]}).prediction == (5, 0, 7)


def test_long_predictions() -> None:
    limits = HttpLimits(prediction_chars_max=4)
    for content, n_chars in (("größ", 4), ("größe", 5), ([{"type": "text", "text": "abc"}] * 2, 6)):
        body = decode_body(
            json.dumps({"prompt": "x", "prediction": {"type": "content", "content": content}}).encode(), CompletionBody
        )
        if n_chars <= 4:
            assert validation.plan_completion(body, limits, SEED).prediction == content
            continue
        with pytest.raises(InvalidRequestError, match=f"prediction: at most 4 characters, got {n_chars}") as caught:
            validation.plan_completion(body, limits, SEED)
        assert caught.value.param == "prediction"


def test_fitting_the_context() -> None:
    def fit(n_prompt: int, plan: Plan, ctx_tokens: int, param: str, is_strict: bool = False) -> int:
        return fit_tokens(n_prompt, plan, ctx_tokens, param, is_strict=is_strict)

    assert fit(10, completion_plan(), 100, "prompt") == 16
    assert fit(90, completion_plan(), 100, "prompt") == 10
    assert fit(90, completion_plan(max_tokens=10), 100, "prompt") == 10
    assert fit(90, completion_plan(max_tokens=11), 100, "prompt") == 10
    assert fit(90, completion_plan(max_tokens=10), 100, "prompt", is_strict=True) == 10
    assert fit(10, chat_plan(), 100, "messages") == 90
    for n_prompt, plan, n_wanted, is_strict in [
        (90, completion_plan(max_tokens=11), 11, True),
        (100, completion_plan(), 1, False),
        (100, chat_plan(max_tokens=7), 1, False),
    ]:
        with pytest.raises(ContextLengthError) as caught:
            fit(n_prompt, plan, 100, "prompt", is_strict=is_strict)
        assert caught.value.message == (
            f"This model's maximum context length is 100 tokens. However, you requested {n_prompt + n_wanted} tokens "
            f"({n_prompt} in the prompt, {n_wanted} in the completion). "
            "Please reduce the length of the prompt or completion."
        )
        assert caught.value.param == "prompt"
    with pytest.raises(InvalidRequestError, match="no tokens"):
        fit(0, completion_plan(), 100, "prompt")
    shaped = {"response_format": {"type": "json_object"}}
    assert fit(10, chat_plan(**shaped), 1 << 20, "messages") == GRAMMAR_TOKENS_MAX
    assert fit(10, completion_plan(**shaped), 1 << 20, "messages") == 16
    assert fit(10, chat_plan(**shaped, max_tokens=GRAMMAR_TOKENS_MAX), 1 << 20, "messages") == GRAMMAR_TOKENS_MAX
    too_many = chat_plan(**shaped, max_tokens=GRAMMAR_TOKENS_MAX + 1)
    assert fit(10, too_many, 1 << 20, "messages") == GRAMMAR_TOKENS_MAX
    with pytest.raises(InvalidRequestError, match=f"max_tokens: at most {GRAMMAR_TOKENS_MAX} with response_format"):
        fit(10, too_many, 1 << 20, "messages", is_strict=True)


def test_model_names() -> None:
    for name in (None, "", MODEL):
        assert validation.check_model(name, MODEL, LIMITS) == MODEL
    with pytest.raises(ModelNotFoundError, match="'other' does not exist"):
        validation.check_model("other", MODEL, LIMITS)


@pytest.mark.parametrize("bad", [-1, N_VOCAB, 1 << 70])
def test_token_ids_outside_the_vocabulary(bad: int) -> None:
    check_tokens([0, N_VOCAB - 1], N_VOCAB, "prompt")
    with pytest.raises(InvalidRequestError, match="index 1"):
        check_tokens([0, bad], N_VOCAB, "prompt")


# --- no body causes a 500 ---------------------------------------------------------------------------------------------

Post = Callable[[str, bytes], tuple[int, dict[str, Any]]]


@pytest.fixture(scope="module")
def post(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Post]:
    """Posts to one long-lived server, for the many examples of hypothesis."""
    tokenizer = Tokenizer.load(write_tokenizer(tmp_path_factory.mktemp("tok") / "tokenizer.gguf"))
    with asyncio.Runner() as runner:
        stack = contextlib.AsyncExitStack()

        async def start() -> aiohttp.ClientSession:
            served = await stack.enter_async_context(serving(tokenizer, FakeGenerator(ctx_tokens=200)))
            return await stack.enter_async_context(aiohttp.ClientSession(served.url))

        session = runner.run(start())

        async def send(path: str, raw: bytes) -> tuple[int, dict[str, Any]]:
            async with session.post(path, data=raw) as reply:
                text = await reply.read()
                is_json = reply.content_type == "application/json"
                return reply.status, json.loads(text) if is_json else {}

        yield lambda path, raw: runner.run(send(path, raw))
        runner.run(stack.aclose())


PATHS = st.sampled_from(["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"])
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=10),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
FIELDS = sorted({*CompletionBody.__struct_fields__, *ChatBody.__struct_fields__, "content", "tokens"})
MESSAGE = st.fixed_dictionaries({"role": st.text(max_size=5) | JSON, "content": st.text(max_size=20) | JSON})
PREDICTION = st.fixed_dictionaries({"type": st.just("content"), "content": st.text(max_size=20) | JSON})
PLAUSIBLE = st.one_of(
    st.integers(-2, 300),
    st.floats(-1, 3),
    st.booleans(),
    st.text(max_size=10),
    st.lists(st.integers(-1, 300), max_size=5),
    st.lists(MESSAGE | st.text(max_size=5), max_size=3),
    PREDICTION,
)
REQUIRED = {"prompt": st.text(max_size=9), "messages": st.lists(MESSAGE, max_size=3), "content": st.text(max_size=9)}
BODY = st.fixed_dictionaries({}, optional=REQUIRED).flatmap(
    lambda base: st.dictionaries(st.sampled_from(FIELDS), JSON | PLAUSIBLE, max_size=4).map(lambda more: base | more)
)


def check(status: int, body: dict[str, Any]) -> None:
    assert status in (200, 400, 404)
    if status != 200:
        assert set(body["error"]) == {"message", "type", "param", "code"}
        assert body["error"]["message"]
        assert "\n" not in body["error"]["message"]


@settings(max_examples=thinned(300))
@given(path=PATHS, body=BODY | JSON)
def test_no_json_body_is_a_500(post: Post, path: str, body: object) -> None:
    check(*post(path, json.dumps(body).encode()))


@settings(max_examples=thinned(60))
@given(path=PATHS, raw=st.binary(max_size=60))
def test_no_bytes_are_a_500(post: Post, path: str, raw: bytes) -> None:
    status, body = post(path, raw)
    check(status, body)
    assert status == 400


@pytest.mark.parametrize("make", [completion_plan, chat_plan])
@pytest.mark.parametrize(
    ("sent", "numbers"),
    [
        ({"repetition_penalty": 1.2}, {"repetition_penalty": 1.2}),
        ({"repeat_penalty": 1.2}, {"repetition_penalty": 1.2, "repeat_last_n": validation.REPEAT_LAST_DEFAULT}),
        ({"repeat_penalty": 1.2, "repeat_last_n": -1}, {"repetition_penalty": 1.2}),
        ({"repetition_penalty": 0.5, "repeat_last_n": 9.0}, {"repetition_penalty": 0.5, "repeat_last_n": 9}),
        ({"repetition_penalty": 0.5, "repeat_last_n": 10**6}, {"repetition_penalty": 0.5}),
        ({"typ_p": 0.9, "top_n_sigma": 1}, {"typical_p": 0.9, "top_n_sigma": 1}),
        ({"xtc_probability": 0.5}, {"xtc_probability": 0.5}),
        ({"xtc_probability": 0.5, "xtc_threshold": 0.2}, {"xtc_probability": 0.5, "xtc_threshold": 0.2}),
        ({"mirostat": 2, "mirostat_tau": 4}, {"mirostat": 2, "mirostat_tau": 4}),
        ({"mirostat_mode": 1, "mirostat_tau": 5}, {"mirostat": 1}),
        ({"mirostat": 0, "mirostat_tau": 4, "mirostat_eta": 0.2}, {}),
        ({"dynatemp_range": 0.5, "dynatemp_exponent": 2}, {"dynatemp_range": 0.5, "dynatemp_exponent": 2}),
        ({"dynatemp_range": -0.3, "dynatemp_exponent": 2}, {}),
        ({"adaptive_target": 0, "adaptive_decay": 0.5}, {"adaptive_target": 0, "adaptive_decay": 0.5}),
        ({"adaptive_target": -0.01, "adaptive_decay": 0.5}, {}),
    ],
)
def test_sampler_fields_go_to_the_stage_as_numbers(make: Any, sent: dict[str, Any], numbers: dict[str, float]) -> None:
    assert dict(make(**sent).sampling.numbers) == numbers


@pytest.mark.parametrize(
    ("sent", "text"),
    [
        ({"repetition_penalty": 1000}, "repetition_penalty: must be a number between 0.01 and 100, got 1000"),
        ({"repeat_last_n": 1.5}, "repeat_last_n: must be a whole number"),
        ({"typical_p": 1.5}, "typical_p: must be a number"),
        ({"mirostat": 3}, "mirostat: must be a whole number between 0 and 2"),
        ({"smoothing_factor": 0.5}, "smoothing_factor: not supported"),
        ({"dynatemp_range": 0.5, "dynatemp_exponent": -1}, "dynatemp_exponent: must be a number between 0 and 100"),
        ({"dry_multiplier": -1}, "dry_multiplier: must be a number between 0 and 100"),
        ({"skip_special_tokens": False}, "skip_special_tokens: not supported by this server yet; only true"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens: more than max_tokens"),
        ({"min_tokens": 5, "guided_regex": "a"}, "min_tokens: not together with guided_regex"),
        ({"bad_words": [" "]}, "bad_words: each word must have at least one character"),
        ({"logit_bias": [[-1, 5]]}, "logit_bias: -1 is not a token id"),
        ({"logit_bias": [[1, True]]}, "logit_bias"),
        ({"allowed_token_ids": [-1]}, "allowed_token_ids"),
        ({"dry_multiplier": 1, "dry_sequence_breakers": "a, b"}, "dry_sequence_breakers: a text of them is a list"),
    ],
)
def test_sampler_fields_that_cannot_be_kept_are_refused(sent: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidRequestError, match=re.escape(text)) as caught:
        completion_plan(**sent)
    assert "\n" not in caught.value.message


@pytest.mark.parametrize(
    ("sent", "breakers"),
    [
        (["a", "\n"], ("a", "\n")),
        ('["\\n", ":", "\\"", "*"]', ("\n", ":", '"', "*")),  # as SillyTavern sends it, and the next as ooba shows it
        ('"\\n", ":"', ("\n", ":")),
        ("", ()),
        (None, validation.DRY_BREAKERS),
    ],
)
def test_forms_of_sequence_breakers(sent: object, breakers: tuple[str, ...]) -> None:
    assert completion_plan(dry_sequence_breakers=sent).dry_texts == ()
    assert completion_plan(dry_sequence_breakers=sent, dry_multiplier=0.8).dry_texts == tuple(breakers)


def test_forms_of_logit_bias() -> None:
    listed = completion_plan(logit_bias=[[7, -5], [3, 1.5], [5, False], ["no", -2], [9, 0]])
    assert listed.sampling.logit_bias == ((3, 1.5), (5, -100.0), (7, -5))
    assert listed.bias_texts == (("no", -2),)


@pytest.mark.parametrize("field", ["max_tokens", "n_predict"])
def test_a_limit_of_minus_one_is_the_context(field: str) -> None:
    for plan in (completion_plan(**{field: -1}), chat_plan(**{field: -1})):
        assert (plan.max_tokens, plan.max_tokens_default) == (None, None)
    assert chat_plan(max_completion_tokens=-1, max_tokens=3).max_tokens is None


def test_an_n_predict_of_0_reads_the_prompt() -> None:
    """llama.cpp's web page sends it with a whole chat, so that the next turn begins sooner."""
    for plan in (completion_plan(n_predict=0), chat_plan(n_predict=0)):
        assert plan.max_tokens == 1


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
@pytest.mark.parametrize("limit", [0, -2])
def test_other_limits_below_one_are_refused(field: str, limit: int) -> None:
    with pytest.raises(InvalidRequestError, match=f"^{field}: expected int >= ") as caught:
        chat_plan(**{field: limit})
    assert caught.value.param == field


def test_a_seed_of_minus_one_is_random() -> None:
    body = decode_body(b'{"prompt": "x", "seed": -1}', CompletionBody)
    assert [validation.plan_completion(body, LIMITS, seed).sampling.seed for seed in (4, 5)] == [4, 5]


def test_whole_numbers_may_be_written_as_floats() -> None:
    plan = completion_plan(max_tokens=2.0, seed=7.0, top_k=40.0, n=1.0)
    assert (plan.max_tokens, plan.sampling.seed, plan.sampling.top_k, plan.n) == (2, 7, 40, 1)
    for sent in ({"max_tokens": 2.5}, {"n": 1e300}):
        with pytest.raises(InvalidRequestError, match="expected int"):
            completion_plan(**sent)


def test_held_back_tokens_are_banned_up_to_a_position() -> None:
    plan = completion_plan(min_tokens=5)
    plan = dataclasses.replace(plan, sampling=dataclasses.replace(plan.sampling, held_back_tokens=(2,)))
    assert plan.sampling_of(0, 10).number("held_back_until") == 15
    assert completion_plan().sampling_of(0, 10).numbers == ()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"web_search_options": {}}, "web_search_options"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [USER, {"role": "system", "content": None}]}, "messages[1].content"),
    ],
)
def test_unsupported_chat_fields_are_refused(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        chat_plan(**fields)
    assert caught.value.param == param


def test_an_error_does_not_repeat_a_long_value() -> None:
    long = "\x1b[31m" + "x" * 100_000
    for body in (error_body(InvalidRequestError(long)), plain_body(404, long, "route_not_found")):
        assert len(body.error.message) < MESSAGE_CHARS_MAX + 100
        assert body.error.message.isprintable()


@pytest.mark.parametrize(
    ("sent", "looks_back"),
    [({"mirostat": 2}, True), ({"adaptive_target": 0}, True), ({"adaptive_target": -1, "dynatemp_range": 1}, False)],
)
def test_an_answer_whose_sampler_has_a_state_is_not_sampled_ahead(sent: dict[str, Any], looks_back: bool) -> None:
    assert completion_plan(**sent).sampling.looks_back == looks_back
