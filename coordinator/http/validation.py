"""From a well-typed body to a plan that can be run: every rule that one field's type cannot say. Pure.

Each refusal is one line that says what is wrong with which field. Fields that would change the answer and are not
supported are refused rather than ignored, unless their value changes nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from relayline.coordinator.http.bodies import ChatBody, CompletionBody, GenerationBody
from relayline.coordinator.http.limits import HttpLimits
from relayline.coordinator.http.structure import Shape, shape_of
from relayline.coordinator.http.tools import Offered, check_calls, offered_by
from relayline.coordinator.sessions.generation import SamplingParams
from relayline.wire.common.bounds import GRAMMAR_TOKENS_MAX
from relayline.wire.common.errors import ContextLengthError, InvalidRequestError, ModelNotFoundError

COMPLETION_TOKENS_DEFAULT = 16  # OpenAI's default for /v1/completions; a chat goes on to the end of the context
_U64 = 1 << 64
TOP_K_MAX = (1 << 31) - 1  # more than any vocabulary has, hence the same as all; the most that stages accept

# What servers of this kind know beside OpenAI's fields, and OpenAI's of before tools -> values that change nothing.
# Null, 0, false and empty ones change nothing either.
NEUTRAL: dict[str, tuple[object, ...]] = {
    "functions": (),
    "function_call": ("none", "auto"),
    "repetition_penalty": (1, -1),
    "repeat_penalty": (1, -1),
    "typical_p": (1,),
    "mirostat": (),
}

NEUTRAL_OF_COMPLETIONS: dict[str, tuple[object, ...]] = {"tools": (), "tool_choice": ("none", "auto")}
REASONING_FORMATS = ("auto", "deepseek", "none")

Prompts = str | Sequence[int | str | list[int]]


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """What a checked request wants, the same for both routes."""

    n: int  # choices per prompt
    max_tokens: int | None  # as asked for; None when the client left it open
    max_tokens_default: int | None  # when left open: this many, or None for all that the context leaves
    sampling: SamplingParams  # of the first choice; the others derive their seed from it
    stops: tuple[str, ...]
    ignore_eos: bool
    stream: bool
    include_usage: bool
    echo: bool
    return_token_ids: bool
    cache_prompt: bool
    prediction: str | tuple[int, ...] = ""  # what the client expects the answer to be like, as text or token ids
    shape: Shape | None = None  # that the answer must have; its grammar goes into `sampling`
    offered: Offered | None = None  # tools
    splits_reasoning: bool = True  # a chat's thoughts are told apart from what it says

    def sampling_of(self, choice: int) -> SamplingParams:
        """Return the sampling of the n-th choice of any prompt: seed + choice, so each can be asked for alone."""
        return dataclasses.replace(self.sampling, seed=(self.sampling.seed + choice) % _U64)


def plan_completion(body: CompletionBody, limits: HttpLimits, random_seed: int) -> Plan:
    """Check a /v1/completions body. `random_seed` (u64) is used when the client sent none."""
    n = _choices(body, limits)
    _refuse(body, NEUTRAL_OF_COMPLETIONS)
    if body.best_of not in (None, 1, n):
        raise _unsupported("best_of", "only 1 or the value of n")
    if body.suffix:
        raise _unsupported("suffix", "only an empty one")
    n_logprobs = -1 if body.logprobs is None else body.logprobs
    if body.echo and n_logprobs >= 0:
        raise InvalidRequestError("echo: log probabilities of prompt tokens are not supported", param="echo")
    return _plan(body, limits, n, body.max_tokens, COMPLETION_TOKENS_DEFAULT, n_logprobs, random_seed)


def plan_chat(body: ChatBody, limits: HttpLimits, random_seed: int) -> Plan:
    """Check a /v1/chat/completions body. `random_seed` (u64) is used when the client sent none."""
    if body.audio:
        raise _unsupported("audio", "send none")
    if body.modalities and set(body.modalities) != {"text"}:
        raise _unsupported("modalities", 'only ["text"]')
    if body.top_logprobs and not body.logprobs:
        raise InvalidRequestError("top_logprobs: needs logprobs to be true", param="top_logprobs")
    n_logprobs = (body.top_logprobs or 0) if body.logprobs else -1
    if body.reasoning_format not in (None, *REASONING_FORMATS):
        names = ", ".join(REASONING_FORMATS)
        raise InvalidRequestError(f"reasoning_format: must be one of {names}", param="reasoning_format")
    check_calls(body.messages)
    max_tokens = body.max_completion_tokens or body.max_tokens
    plan = _plan(body, limits, _choices(body, limits), max_tokens, None, n_logprobs, random_seed)
    offered = offered_by(body)
    if offered and offered.is_required and plan.shape:
        text = f"the answer is a call of a tool; send no {plan.shape.param}, or tool_choice auto"
        raise InvalidRequestError(f"tool_choice: {text}", param="tool_choice")
    if offered and plan.ignore_eos:
        raise InvalidRequestError("ignore_eos: an answer that calls tools ends by itself", param="ignore_eos")
    return dataclasses.replace(plan, offered=offered, splits_reasoning=body.reasoning_format != "none")


def split_prompt(prompt: Prompts, n: int, limits: HttpLimits) -> list[str | list[int]]:
    """Return the prompts of a /v1/completions body: a text, token ids, several texts, or several lists of ids."""
    if isinstance(prompt, str):
        return [prompt]
    ids = [item for item in prompt if isinstance(item, int)]
    if ids and len(ids) == len(prompt):
        return [ids]
    if not prompt or ids:
        raise InvalidRequestError("prompt: must be text, token ids, a list of texts or of token id lists", "prompt")
    several = [item if isinstance(item, str) else [*item] for item in prompt if not isinstance(item, int)]
    if len({type(item) for item in several}) > 1:
        raise InvalidRequestError("prompt: texts and token id lists cannot be mixed", "prompt")
    if len(several) * n > limits.choices_max:
        raise InvalidRequestError(
            f"prompt: {len(several)} prompts with n={n} are {len(several) * n} choices; at most {limits.choices_max}",
            param="prompt",
        )
    return several


def check_tokens(tokens: Sequence[int], n_vocab: int, param: str) -> None:
    """Refuse token ids outside the vocabulary; llama.cpp would abort on them."""
    if not tokens or (min(tokens) >= 0 and max(tokens) < n_vocab):
        return
    for at, token in enumerate(tokens):
        if not 0 <= token < n_vocab:
            raise InvalidRequestError(f"{param}: token {token} at index {at} is not in [0, {n_vocab})", param=param)


def fit_tokens(n_prompt: int, plan: Plan, ctx_tokens: int, param: str, *, is_strict: bool = False) -> int:
    """Return how many tokens to generate after a prompt of `n_prompt` tokens.

    As many as the client asked for, or as the context leaves if that is less; with `is_strict` that is an error.
    Raises InvalidRequestError for an empty prompt, ContextLengthError when what was asked for cannot fit.
    """
    if n_prompt < 1:
        raise InvalidRequestError(f"{param}: the prompt has no tokens", param=param)
    room = ctx_tokens - n_prompt
    grammar_of = plan.shape.param if plan.shape else "tools" if plan.sampling.grammar else ""
    limit = min(room, GRAMMAR_TOKENS_MAX) if grammar_of else room
    wanted = plan.max_tokens
    if wanted is None:
        wanted = min(limit, limit if plan.max_tokens_default is None else plan.max_tokens_default)
    elif not is_strict:
        wanted = min(limit, wanted)
    elif grammar_of and wanted > GRAMMAR_TOKENS_MAX:
        text = f"at most {GRAMMAR_TOKENS_MAX} with {grammar_of}, got {wanted}"
        raise InvalidRequestError(f"max_tokens: {text}", "max_tokens")
    wanted = max(wanted, 1)
    if wanted > room:
        raise ContextLengthError.of_request(ctx_tokens, n_prompt, wanted, param)
    return wanted


def nanoseconds(text: str, param: str) -> int:
    """Return a moment of the coordinator's clock as given in a query; raises InvalidRequestError naming `param`."""
    is_number = text.isascii() and text.isdigit() and len(text) < len(str(_U64))
    if not is_number:
        raise InvalidRequestError(f"{param}: must be whole nanoseconds, like now_ns of an earlier answer", param=param)
    return int(text)


def check_model(name: str | None, model_id: str, limits: HttpLimits) -> str:
    """Return the name to answer under. No name at all means the one model there is."""
    if not name or name == model_id:
        return model_id
    if limits.any_model_name or name in limits.model_aliases:
        return name
    raise ModelNotFoundError(f"the model {name[:200]!r} does not exist; this server has {model_id!r}", param="model")


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
    shape = shape_of(body)
    if shape and body.ignore_eos:
        raise InvalidRequestError(f"ignore_eos: an answer ends where {shape.param} ends", param="ignore_eos")
    sampling = SamplingParams(
        temperature=1.0 if body.temperature is None else body.temperature,
        top_k=min(max(0, body.top_k or 0), TOP_K_MAX),
        top_p=1.0 if body.top_p is None else body.top_p,
        min_p=body.min_p or 0.0,
        seed=(random_seed if body.seed is None else body.seed) % _U64,
        n_logprobs=n_logprobs,
        frequency_penalty=body.frequency_penalty or 0.0,
        presence_penalty=body.presence_penalty or 0.0,
        logit_bias=_biases(body.logit_bias or {}),
    )
    return Plan(
        n=n,
        max_tokens=max_tokens,
        max_tokens_default=max_tokens_default,
        sampling=sampling,
        stops=_stops(body.stop, limits),
        ignore_eos=bool(body.ignore_eos),
        stream=bool(body.stream),
        include_usage=bool(body.stream_options and body.stream_options.include_usage),
        echo=isinstance(body, CompletionBody) and bool(body.echo),
        return_token_ids=bool(body.return_token_ids),
        cache_prompt=body.cache_prompt is not False,
        prediction=_prediction(body.prediction, limits),
        shape=shape,
    )


def _choices(body: GenerationBody, limits: HttpLimits) -> int:
    n = body.n or 1
    if n > limits.choices_per_prompt_max:
        raise InvalidRequestError(f"n: at most {limits.choices_per_prompt_max} choices, got {n}", param="n")
    return n


def _biases(biases: Mapping[str, float]) -> tuple[tuple[int, float], ...]:
    for token in biases:
        is_number = token.isascii() and token.isdigit() and len(token) <= len(str(1 << 32))
        if not is_number or str(int(token)) != token:  # 007 would be 7 once more
            raise InvalidRequestError(f"logit_bias: {token[:40]!r} is no token id", param="logit_bias")
    return tuple(sorted((int(token), bias) for token, bias in biases.items() if bias))


def _stops(stop: str | list[str] | None, limits: HttpLimits) -> tuple[str, ...]:
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if len(stops) > limits.stops_max:
        raise InvalidRequestError(f"stop: at most {limits.stops_max} strings, got {len(stops)}", param="stop")
    for text in stops:
        if not 1 <= len(text) <= limits.stop_chars_max:
            raise InvalidRequestError(f"stop: each string has 1 to {limits.stop_chars_max} characters", param="stop")
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
    return InvalidRequestError(f"prediction: {text}", param="prediction")


def _refuse(body: GenerationBody, unsupported: Mapping[str, tuple[object, ...]]) -> None:
    for param, neutral in unsupported.items():
        value = getattr(body, param)
        if value and value not in neutral:
            raise _unsupported(param, f"only {neutral[0]}" if neutral else "send none")


def _unsupported(param: str, allowed: str) -> InvalidRequestError:
    return InvalidRequestError(f"{param}: not supported by this server yet; {allowed}", param=param)
