"""From a well-typed body to a plan that can be run: every rule that one field's type cannot express. Pure. Each refusal
is one line that names the field and its error. Fields that would change the answer and are not supported are refused
rather than ignored, unless their value changes nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from relayline.coordinator.http.edge.limits import HttpLimits
from relayline.coordinator.http.requests.bodies import ChatBody, CompletionBody, GenerationBody, MessageBody
from relayline.coordinator.http.requests.plan import SEEDS, Plan
from relayline.coordinator.http.requests.structure import Shape, shape_of
from relayline.coordinator.http.requests.tools import check_calls, offered_by
from relayline.coordinator.sessions.generation import SamplingParams
from relayline.coordinator.sessions.model_names import without_latest
from relayline.coordinator.sessions.tenants import tier_of, turn_of
from relayline.coordinator.text.line_end import LineEnd
from relayline.wire.common.bounds import BIAS_MAX, CTX_TOKENS_MAX
from relayline.wire.common.errors import InvalidRequestError, ModelNotFoundError
from relayline.wire.common.sampler_fields import BY_NAME, HTTP_FIELDS
from relayline.wire.common.texts import counted, whole_number
from relayline.wire.common.thoughts import read_last_words

COMPLETION_TOKENS_DEFAULT = 16  # OpenAI's default for /v1/completions; a chat continues to the end of the context
_U64 = 1 << 64
_MAX_TOKENS_MAX = _U64 - 1  # more than any context holds, and the most that msgpack can carry
NO_LIMIT = -1  # as a client's limit of tokens: as many as the context has room for
TOP_K_MAX = (1 << 31) - 1  # more than any vocabulary has, hence the same as all; the most that stages accept

# Fields of other servers, and OpenAI's from before tools -> values without effect. Null, 0, false and empty ones have
# no effect either.
NEUTRAL: dict[str, tuple[object, ...]] = {
    "functions": (),
    "function_call": ("none", "auto"),
    "smoothing_factor": (),
    "truncate_prompt_tokens": (),
    "return_tokens_as_token_ids": (),
    "logits_processors": (),
    "use_beam_search": (),
    "length_penalty": (1,),
    "chat_template": (),
    "grammar_lazy": (),
}
_REMEDIES = {"functions": "send tools", "function_call": "send tool_choice"}  # where another field does the same
# Fields whose false would change the answer.
NEUTRAL_IF_TRUE = ("skip_special_tokens",)
# Tokens that llama-server's `repeat_penalty` and DRY look at; vLLM's `repetition_penalty`: all
REPEAT_LAST_DEFAULT = 64
DRY_BREAKERS = ("\n", ":", '"', "*")  # llama-server's

NEUTRAL_OF_COMPLETIONS: dict[str, tuple[object, ...]] = {"tools": (), "tool_choice": ("none", "auto")}
REASONING_FORMATS = ("auto", "deepseek", "none")


def plan_completion(body: CompletionBody, limits: HttpLimits, random_seed: int) -> Plan:
    """Check a /v1/completions body. `random_seed` (u64) is used when the client sent none.

    Raises InvalidRequestError.
    """
    n = _choices(body, limits)
    _refuse(body, NEUTRAL_OF_COMPLETIONS)
    if body.best_of not in (None, 1, n):
        raise _unsupported("best_of", "only 1 or the value of n")
    if body.suffix and (body.echo or not isinstance(body.prompt, str)):
        raise InvalidRequestError.of_field("suffix", "only with one prompt of text, and without echo")
    n_logprobs = -1 if body.logprobs is None else body.logprobs
    if body.echo and n_logprobs >= 0 and body.stream:
        raise InvalidRequestError.of_field("stream", "not together with echo and logprobs")
    is_echo_alone = bool(body.echo) and body.max_tokens == 0
    max_tokens = 1 if is_echo_alone else _limit("max_tokens", body.max_tokens)
    is_open = NO_LIMIT in (max_tokens, body.n_predict)
    default = None if is_open else COMPLETION_TOKENS_DEFAULT
    plan = _plan(body, limits, n, max_tokens, default, n_logprobs, random_seed)
    return dataclasses.replace(plan, shows_prompt_alone=is_echo_alone)


def plan_chat(body: ChatBody, limits: HttpLimits, random_seed: int) -> Plan:
    """Check a /v1/chat/completions body. `random_seed` (u64) is used when the client sent none.

    Raises InvalidRequestError.
    """
    if body.audio:
        raise _unsupported("audio", "send none")
    if body.echo:
        raise _unsupported("echo", "send none in a chat")
    if body.modalities and set(body.modalities) != {"text"}:
        raise _unsupported("modalities", 'only ["text"]')
    if body.top_logprobs and not body.logprobs:
        raise InvalidRequestError.of_field("top_logprobs", "needs logprobs to be true")
    n_logprobs = (body.top_logprobs or 0) if body.logprobs else -1
    last = body.messages[-1]
    if body.continue_final_message and (last.role != "assistant" or not last.content or last.tool_calls):
        text = "the last message must be the assistant's, with text and without calls"
        raise InvalidRequestError.of_field("continue_final_message", text)
    if body.continue_final_message and body.add_generation_prompt:
        text = "not together with continue_final_message, which begins no new turn; send one of them"
        raise InvalidRequestError.of_field("add_generation_prompt", text)
    if body.reasoning_format not in (None, *REASONING_FORMATS):
        names = ", ".join(REASONING_FORMATS)
        raise InvalidRequestError.of_field("reasoning_format", f"must be one of {names}")
    check_messages(body.messages)
    max_tokens = _limit("max_completion_tokens", body.max_completion_tokens)
    max_tokens = _limit("max_tokens", body.max_tokens) if max_tokens is None else max_tokens
    plan = _plan(body, limits, _choices(body, limits), max_tokens, None, n_logprobs, random_seed)
    offered = offered_by(body)
    if offered and offered.is_required and plan.shape:
        text = f"the answer is a call of a tool; send no {plan.shape.param}, or tool_choice auto"
        raise InvalidRequestError.of_field("tool_choice", text)
    if offered and offered.needs_grammar:
        _check_lists(body, "tools")
    if offered and plan.ignore_eos:
        raise InvalidRequestError.of_field("ignore_eos", "not together with tools, whose calls end the answer")
    return dataclasses.replace(
        plan,
        offered=offered,
        splits_reasoning=body.reasoning_format != "none",
        thought_tokens_max=_thought_budget(body, limits),
        last_words=_last_words(body, limits),
    )


def _thought_budget(body: ChatBody, limits: HttpLimits) -> int | None:
    """Return the most tokens of each block of thoughts; None for any number."""
    names = ("thinking_token_budget", "thinking_budget_tokens", "reasoning_budget_tokens")
    asked = {name: value for name in names if (value := getattr(body, name)) is not None}
    if len(set(asked.values())) > 1:
        raise InvalidRequestError.of_field(list(asked)[-1], f"{' and '.join(asked)} differ; send one of them")
    budget = next(iter(asked.values()), limits.reasoning_budget)
    return None if budget < 0 else min(budget, CTX_TOKENS_MAX)


def _last_words(body: ChatBody, limits: HttpLimits) -> str:
    if body.reasoning_budget_message is None:
        return limits.reasoning_budget_message
    try:
        return read_last_words(body.reasoning_budget_message)
    except ValueError as error:
        raise InvalidRequestError.of_field("reasoning_budget_message", f"must be {error}") from None


def check_messages(messages: Sequence[MessageBody]) -> None:
    """Refuse messages that no template can show: calls without a name, turns without a content."""
    check_calls(messages)
    for index, message in enumerate(messages):
        if message.content is None and message.role in ("user", "system", "developer", "tool"):
            param = f"messages[{index}].content"
            raise InvalidRequestError.of_field(param, "required field is missing")


def nanoseconds(text: str, param: str) -> int:
    """Return a moment of the coordinator's clock as given in a query; raises InvalidRequestError naming `param`."""
    found = whole_number(text, len(str(_U64)) - 1)
    if found is None:
        raise InvalidRequestError.of_field(param, "must be whole nanoseconds, like now_ns of an earlier answer")
    return found


def check_model(name: str | None, model_id: str, limits: HttpLimits) -> str:
    """Return the name to answer under. No name at all means the one model there is. Raises ModelNotFoundError."""
    if not name or model_id in (name, without_latest(name)):
        return model_id
    name = without_latest(name)
    if limits.any_model_name or name in limits.model_aliases or name in limits.adapters:
        return name
    served = ", ".join(map(repr, (model_id, *limits.adapters)))
    raise ModelNotFoundError(f"the model {name[:200]!r} does not exist; this server has {served}", param="model")


def _plan(
    body: GenerationBody,
    limits: HttpLimits,
    n: int,
    max_tokens: int | None,
    max_tokens_default: int | None,
    n_logprobs: int,
    random_seed: int,
) -> Plan:
    _refuse(body, NEUTRAL)
    _refuse_untrue(body)
    if body.web_search_options is not None:  # empty ones ask for a search too
        raise _unsupported("web_search_options", "send none")
    shape = shape_of(body)
    _check_lists(body, shape.param if shape else "")
    if max_tokens is None and body.n_predict not in (None, NO_LIMIT, -2):
        max_tokens = max(1, body.n_predict)  # 0 only reads the prompt; llama-server always picks the first token
    max_tokens = None if max_tokens in (None, NO_LIMIT) else min(max_tokens, _MAX_TOKENS_MAX)
    _check_together(body, shape, max_tokens)
    biases, bias_texts = _biases(body.logit_bias or {})
    n_prompt_logprobs = -1 if body.prompt_logprobs is None else body.prompt_logprobs
    sampling = _sampling(body, biases, max(n_logprobs, n_prompt_logprobs), random_seed)
    options = body.stream_options
    return Plan(
        n=n,
        max_tokens=max_tokens,
        max_tokens_default=max_tokens_default,
        sampling=sampling,
        stops=_stops(body.stop, limits),
        ignore_eos=bool(body.ignore_eos),
        stream=bool(body.stream),
        include_usage=bool(options and options.include_usage),
        echo=isinstance(body, CompletionBody) and bool(body.echo),
        return_token_ids=bool(body.return_token_ids),
        cache_prompt=body.cache_prompt is not False,
        cache_salt=body.cache_salt or "",
        prediction=_prediction(body.prediction, limits),
        shape=shape,
        min_tokens=body.min_tokens or 0,
        stop_tokens=tuple(sorted(set(body.stop_token_ids or ()))),
        shows_stop=bool(body.include_stop_str_in_output),
        bad_words=tuple(body.bad_words or ()),
        bias_texts=bias_texts,
        dry_texts=dry_texts(body) if "dry_multiplier" in dict(sampling.numbers) else (),
        n_logprobs=n_logprobs,
        n_prompt_logprobs=n_prompt_logprobs,
        continuous_usage=bool(options and options.include_usage and options.continuous_usage_stats),
        shows_timings=bool(body.timings_per_token),
        shows_progress=bool(body.return_progress and body.stream),
        line_end=_line_end(body),
        service_tier=(tier := tier_of(body.service_tier)),
        turn=turn_of(body.priority or 0, tier),
    )


def _sampling(
    body: GenerationBody, biases: tuple[tuple[int, float], ...], n_logprobs: int, random_seed: int
) -> SamplingParams:
    """Return how tokens are picked; what the client left out has its usual value."""
    return SamplingParams(
        temperature=1.0 if body.temperature is None else body.temperature,
        top_k=min(max(0, body.top_k or 0), TOP_K_MAX),
        top_p=1.0 if body.top_p is None else body.top_p,
        min_p=body.min_p or 0.0,
        seed=(random_seed if body.seed in (None, -1) else body.seed) % SEEDS,
        n_logprobs=n_logprobs,
        frequency_penalty=body.frequency_penalty or 0.0,
        presence_penalty=body.presence_penalty or 0.0,
        logit_bias=biases,
        numbers=_numbers(body),
        allowed_tokens=tuple(sorted(set(body.allowed_token_ids or ()))),
    )


def _line_end(body: GenerationBody) -> LineEnd:
    """Return the lines behind which the answer ends; numbers beyond all texts and times become the largest."""
    n_indent, within_ms = body.n_indent or 0, max(0, body.t_max_predict_ms or 0)
    return LineEnd(min(n_indent, _MAX_TOKENS_MAX), min(within_ms, _MAX_TOKENS_MAX))


def _limit(param: str, asked: int | None) -> int | None:
    """Return a limit of tokens, NO_LIMIT for none. Raises InvalidRequestError for 0."""
    if asked == 0:
        raise InvalidRequestError.of_field(param, "expected int >= 1, or -1 for no limit")
    return asked


def _check_together(body: GenerationBody, shape: Shape | None, max_tokens: int | None) -> None:
    """Refuse fields that contradict each other."""
    if body.min_tokens and max_tokens is not None and body.min_tokens > max_tokens:
        raise InvalidRequestError.of_field("min_tokens", f"more than max_tokens, which is {max_tokens}")
    if shape and body.ignore_eos:
        raise InvalidRequestError.of_field("ignore_eos", f"not together with {shape.param}, whose end ends the answer")
    if body.prompt_logprobs is not None and body.stream:
        raise InvalidRequestError.of_field("stream", "not together with prompt_logprobs")
    if body.stream_options is not None and not body.stream:
        raise InvalidRequestError.of_field("stream_options", "only together with stream")


def dry_texts(body: GenerationBody) -> tuple[str, ...]:
    """Return what breaks a sequence that repeats. Raises InvalidRequestError."""
    sent = body.dry_sequence_breakers
    if isinstance(sent, str):
        text = sent.strip()
        try:
            sent = msgspec.json.decode(text if text.startswith("[") else f"[{text}]", type=list[str])
        except msgspec.DecodeError:
            text = 'a text of them is a list in JSON, such as ["\\n", ":"]'
            raise InvalidRequestError.of_field("dry_sequence_breakers", text) from None
    return tuple(DRY_BREAKERS if sent is None else sent)


def _choices(body: GenerationBody, limits: HttpLimits) -> int:
    n = body.n or 1
    if n > limits.choices_per_prompt_max:
        raise InvalidRequestError.of_field("n", f"at most {counted(limits.choices_per_prompt_max, 'choice')}, got {n}")
    return n


def _biases(
    sent: Mapping[str, float] | Sequence[tuple[int | str, float]],
) -> tuple[tuple[tuple[int, float], ...], tuple[tuple[str, float], ...]]:
    """Return biases of tokens and of texts, from OpenAI's form or llama-server's; false means "never"."""
    if isinstance(sent, Mapping):
        for token in sent:
            if str(whole_number(token, len(str(1 << 32)))) != token:  # 007 would be 7 a second time
                raise InvalidRequestError.of_field("logit_bias", f"{token[:40]!r} is not a token id")
        return tuple(sorted((int(token), bias) for token, bias in sent.items() if bias)), ()
    biases = [(key, -BIAS_MAX if bias is False else bias) for key, bias in sent]
    tokens = {key: bias for key, bias in biases if isinstance(key, int)}
    if min(tokens, default=0) < 0:
        raise InvalidRequestError.of_field("logit_bias", f"{min(tokens)} is not a token id")
    texts = tuple((key, bias) for key, bias in biases if isinstance(key, str) and key and bias)
    return tuple(sorted((token, bias) for token, bias in tokens.items() if bias)), texts


def _stops(stop: str | list[str] | None, limits: HttpLimits) -> tuple[str, ...]:
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if len(stops) > limits.stops_max:
        raise InvalidRequestError.of_field("stop", f"at most {limits.stops_max} strings, got {len(stops)}")
    for text in stops:
        if not 1 <= len(text) <= limits.stop_chars_max:
            raise InvalidRequestError.of_field("stop", f"each string has 1 to {limits.stop_chars_max} characters")
    return stops


def _prediction(sent: Any, limits: HttpLimits) -> str | tuple[int, ...]:
    """Return the text of a prediction, parts as one, or its token ids; empty predicts nothing."""
    if sent is None:
        return ""
    if not isinstance(sent, Mapping):
        raise _bad_prediction("must be an object with type and content")
    if sent.get("type") != "content":
        raise _bad_prediction('type must be "content"')
    content = sent.get("content")
    parts = content if isinstance(content, list) else [{"type": "text", "text": "" if content is None else content}]
    texts: list[str] = []
    if parts and all(type(part) is int for part in parts):  # as in a prompt of /v1/completions
        return tuple(parts)
    for part in parts:
        text = part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None
        if not isinstance(text, str):
            raise _bad_prediction("content must be text, or a list of text parts, or of token ids")
        texts.append(text)
    n_chars = sum(map(len, texts))
    if n_chars > limits.prediction_chars_max:
        raise _bad_prediction(f"at most {limits.prediction_chars_max} characters, got {n_chars}")
    return "".join(texts)


def _bad_prediction(text: str) -> InvalidRequestError:
    return InvalidRequestError.of_field("prediction", text)


def _refuse(body: GenerationBody, unsupported: Mapping[str, tuple[object, ...]]) -> None:
    for param, neutral in unsupported.items():
        value = getattr(body, param)
        if value and value not in neutral:
            raise _unsupported(param, _REMEDIES.get(param) or (f"only {neutral[0]}" if neutral else "send none"))


def _refuse_untrue(body: GenerationBody) -> None:
    for param in NEUTRAL_IF_TRUE:
        if getattr(body, param) not in (None, True):
            raise _unsupported(param, "only true")


def _numbers(body: GenerationBody) -> tuple[tuple[str, float], ...]:
    """Return the numbers of the table of sampler fields that change something, by name."""
    found: dict[str, float] = {}
    for param, field in HTTP_FIELDS.items():
        value = getattr(body, param)
        if value is None or value in field.off or (field.is_off_below and value < field.low):
            continue
        value = min(value, field.high) if field.is_whole and not field.is_kind else value
        if not field.low <= value <= field.high or (field.is_whole and value != int(value)):
            kind = "a whole number" if field.is_whole else "a number"
            text = f"must be {kind} between {field.low:g} and {field.high:g}, got {value:g}"
            raise InvalidRequestError.of_field(param, text)
        if value != field.neutral:
            found[field.name] = value
    found = {name: value for name, value in found.items() if BY_NAME[name].only_with in ("", *found)}
    if "repetition_penalty" in found and body.repeat_penalty is not None and body.repeat_last_n is None:
        found["repeat_last_n"] = REPEAT_LAST_DEFAULT
    if "dry_multiplier" in found and body.dry_penalty_last_n is None:
        found["dry_penalty_last_n"] = REPEAT_LAST_DEFAULT
    return tuple(sorted(found.items()))


def _check_lists(body: GenerationBody, shape_param: str) -> None:
    """Refuse token lists that cannot be kept together with the shape of an answer, and a length that contradicts."""
    for param in ("min_tokens", "allowed_token_ids", "bad_words", "stop_token_ids"):
        if shape_param and getattr(body, param):
            text = f"not together with {shape_param}, which defines the answer's form and its end"
            raise InvalidRequestError.of_field(param, text)
    if not all(word.strip() for word in body.bad_words or ()):
        raise InvalidRequestError.of_field("bad_words", "each word must have at least one character")


def _unsupported(param: str, allowed: str) -> InvalidRequestError:
    return InvalidRequestError.of_field(param, f"not supported by this server yet; {allowed}")
