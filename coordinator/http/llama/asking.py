"""From the body of POST /completion or /infill to a completion. For a body's worker.

llama-server's fields that would change an answer are taken, or refused in one line. An omitted field has llama-server's
default, which is not OpenAI's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from relayline.coordinator.http.edge.limits import HttpLimits
from relayline.coordinator.http.llama.settings import (
    ADAPTIVE,
    DEFAULTS,
    INFILL,
    ORDER,
    SAMPLER_LETTERS,
    generation_settings,
    order_number,
    sampler_names,
)
from relayline.coordinator.http.requests.bodies import (
    Bias,
    CompletionBody,
    LogprobCount,
    Positive,
    decode_body,
)
from relayline.coordinator.http.requests.defaults import with_recommended
from relayline.coordinator.http.requests.plan import Plan
from relayline.coordinator.http.requests.validation import NO_LIMIT
from relayline.coordinator.text.tokenizer import FillIn, Tokenizer
from relayline.wire.common.bounds import CTX_TOKENS_MAX, LOGIT_BIAS_MAX
from relayline.wire.common.errors import InvalidRequestError, NotServedError
from relayline.wire.common.texts import whole_number

PROMPTS_MAX = 1_024  # in one body; fewer fit its choices
RESPONSE_FIELDS_MAX = 64
EXTRA_MAX = 1_024  # chunks of `input_extra`
RANDOM_SEED = (1 << 32) - 1  # llama.cpp's LLAMA_DEFAULT_SEED
_SNIPPET = "\n\n--- snippet ---\n\n"  # between chunks where the vocabulary has no token for it
# What each sampler of `samplers` does nothing with, by the names of the body's fields.
_OFF: dict[str, dict[str, Any]] = {
    "penalties": {
        "repeat_penalty": None,
        "repetition_penalty": None,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
    },
    "dry": {"dry_multiplier": None},
    "top_n_sigma": {"top_n_sigma": None},
    "top_k": {"top_k": 0},
    "typ_p": {"typical_p": None, "typ_p": None},
    "top_p": {"top_p": 1.0},
    "min_p": {"min_p": 0.0},
    "xtc": {"xtc_probability": None},
    "temperature": {"temperature": 1.0, "dynatemp_range": None},
    ADAPTIVE: {"adaptive_target": None},
}
# Fields that say something of another server's insides, or that change nothing at these values.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "post_sampling_probs": (),
    "min_keep": (),
    "reasoning_budget_tokens": (-1,),
}


class Chunk(Struct, kw_only=True):
    """One entry of `input_extra`."""

    text: str
    filename: str | None = None


class LlamaBody(CompletionBody, kw_only=True):
    """POST /completion."""

    prompt: Any = None  # text, token ids, a mixture, {"prompt_string": ...}, or a list of these
    temperature: float | None = None  # below 0 as 0: the likeliest token
    logit_bias: (
        Annotated[dict[str, Bias | Literal[False]], Meta(max_length=LOGIT_BIAS_MAX)]  # by ids and by texts
        | Annotated[list[tuple[int | str, Bias | Literal[False]]], Meta(max_length=LOGIT_BIAS_MAX)]
        | None
    ) = None
    n_probs: LogprobCount | None = None
    n_cmpl: Positive | None = None
    return_tokens: bool | None = None
    response_fields: Annotated[list[str], Meta(max_length=RESPONSE_FIELDS_MAX)] | None = None
    samplers: list[str] | str | None = None  # a text: a letter for each
    post_sampling_probs: Any = None
    min_keep: Any = None
    reasoning_budget_tokens: Any = None


class InfillBody(LlamaBody, kw_only=True):
    """POST /infill."""

    prompt: str | None = None  # comes after the prefix
    input_prefix: str
    input_suffix: str
    input_extra: Annotated[list[Chunk], Meta(max_length=EXTRA_MAX)] | None = None


class AnswerOptions(Struct):
    """The parts of a body that its answer repeats or obeys."""

    settings: dict[str, Any]
    texts: list[str]  # of the prompts
    stream: bool
    timings_per_token: bool
    return_tokens: bool
    response_fields: list[str]


@dataclasses.dataclass(frozen=True, slots=True)
class Read:
    """A body as a completion, with its prompts as the worker takes them."""

    body: CompletionBody
    prompts: Sequence[str | list[int]]
    wants: LlamaBody


def read(raw: bytes | bytearray, tokenizer: Tokenizer, limits: HttpLimits) -> Read:
    """Return the body of /completion. Raises InvalidRequestError."""
    sent = decode_body(raw, LlamaBody)
    if sent.prompt is None:
        raise InvalidRequestError.of_field("prompt", "required field is missing")
    body = _with_defaults(sent, limits)
    prompts = [_prompt(each, tokenizer) for each in _prompts(sent.prompt)]
    _check_count(prompts, body.n or 1, limits)
    return Read(body, prompts, sent)


def in_its_form(found: Read, plan: Plan) -> Plan:
    """Return the plan of a body of this form. Raises InvalidRequestError.

    Its answers always have timings, and may be of any length; its samplers may act in another order.
    """
    samplers, sampling = found.wants.samplers, plan.sampling
    if samplers is not None and (number := order_number(_listed(samplers), sampling)):
        numbers = tuple(sorted((*sampling.numbers, ("sampler_order", float(number)))))
        sampling = dataclasses.replace(sampling, numbers=numbers)
    return dataclasses.replace(plan, sampling=sampling, shows_timings=True, max_tokens_default=None)


def read_infill(raw: bytes | bytearray, tokenizer: Tokenizer, limits: HttpLimits, ctx_tokens: int) -> Read:
    """Return the body of /infill. Raises InvalidRequestError, NotServedError for a vocabulary without its tokens."""
    fill_in = tokenizer.fill_in
    if fill_in is None:
        text = "this model has no fill-in-the-middle tokens (fim_pre, fim_suf, fim_mid); use /completion"
        raise NotServedError(f"infill: {text}")
    sent = decode_body(raw, InfillBody)
    body = _with_defaults(sent, limits)
    extra = _extra(sent.input_extra or [], tokenizer, fill_in)
    around = filled_in(tokenizer, sent.input_prefix, sent.input_suffix, sent.prompt or "")
    begin = [tokenizer.bos] if tokenizer.adds_bos and tokenizer.bos is not None else []
    n_more = body.max_tokens or (body.n_predict if body.n_predict and body.n_predict > 0 else 1)
    room = max(0, ctx_tokens - len(begin) - len(around) - n_more)
    kept = extra[max(0, len(extra) - room) :] if room else []  # the end of it stands nearest to the gap
    return Read(body, [[*kept, *begin, *around]], sent)


def filled_in(tokenizer: Tokenizer, prefix: str, suffix: str, more: str = "", param: str = "input_prefix") -> list[int]:
    """Return the prompt that asks for the text between two texts. Raises NotServedError, ContextLengthError."""
    tokens = tokenizer.fill_in
    if tokens is None:
        raise NotServedError("suffix: this model has no fill-in-the-middle tokens; send none")

    def plain(text: str, where: str) -> list[int]:
        return tokenizer.encode(text, add_special=False, parse_special=False, param=where) if text else []

    before = [*plain(prefix, param), *(tokenizer.encode(more, add_special=False) if more else [])]
    return [tokens.prefix, *before, tokens.suffix, *plain(suffix, "suffix"), tokens.middle]


def answer_options(read_: Read, plan: Plan, texts: list[str]) -> bytes:
    """Return the fields that the answer repeats, as msgpack."""
    sent = read_.wants
    settings = generation_settings(plan, sent, read_.body)
    return msgspec.msgpack.encode(
        AnswerOptions(
            settings,
            texts,
            plan.stream,
            bool(sent.timings_per_token),
            bool(sent.return_tokens),
            sent.response_fields or [],
        )
    )


def _with_defaults(sent: LlamaBody, limits: HttpLimits) -> CompletionBody:
    """Return the body as a completion: llama-server's names and defaults as those of a completion."""
    sent = with_recommended(sent, limits.recommended)
    for name, neutral in _NEUTRAL.items():
        value = getattr(sent, name)
        if value and value not in neutral:
            allowed = f"only {neutral[0]}" if neutral else "send none"
            raise InvalidRequestError.of_field(name, f"not supported by this server yet; {allowed}")
    fields = {name: getattr(sent, name) for name in CompletionBody.__struct_fields__}
    for name, value in DEFAULTS.items():
        if fields[name] is None:
            fields[name] = value
    fields |= _OFF[ADAPTIVE] if sent.samplers is None else _without(_listed(sent.samplers))
    if isinstance(sent.logit_bias, dict):
        fields["logit_bias"] = [(_id_or_text(key), bias) for key, bias in sent.logit_bias.items()]
    fields["temperature"] = max(0.0, fields["temperature"])
    n_probs = sent.n_probs if sent.n_probs is not None else sent.logprobs
    fields["logprobs"] = n_probs or None
    fields["n"] = sent.n_cmpl or sent.n
    fields["return_token_ids"] = True
    fields["stream_options"] = None  # every answer's last event has its counts
    if sent.seed == RANDOM_SEED:
        fields["seed"] = -1
    if sent.n_predict is not None:  # its first name for this counts most; the first token is always picked
        fields["max_tokens"] = max(1, sent.n_predict) if sent.n_predict >= 0 else None
    elif sent.max_tokens == NO_LIMIT:
        fields["max_tokens"] = None
    return CompletionBody(**(fields | {"prompt": ""}))


def _id_or_text(key: str) -> int | str:
    found = whole_number(key, len(str(1 << 32)))
    return key if found is None else found


def _listed(samplers: list[str] | str) -> list[str]:
    """Return samplers by their usual names. Raises InvalidRequestError."""
    names = _of_letters(samplers) if isinstance(samplers, str) else sampler_names(samplers)
    if not set(names) <= set(ORDER) or len(set(names)) < len(names):
        raise InvalidRequestError.of_field("samplers", f"only some of {', '.join(ORDER)}, each once")
    return names


def _of_letters(letters: str) -> list[str]:
    unknown = next((letter for letter in letters if letter not in SAMPLER_LETTERS), None)
    if unknown is not None:
        text = f"{unknown!r} is not a sampler's letter; use {''.join(SAMPLER_LETTERS)}"
        raise InvalidRequestError.of_field("samplers", text)
    return [SAMPLER_LETTERS[letter] for letter in letters]


def _without(samplers: list[str]) -> dict[str, Any]:
    """Return the fields that turn off what `samplers` leaves out, and on what it adds."""
    left_out = {field: off for name in _OFF if name not in samplers for field, off in _OFF[name].items()}
    return {INFILL: float(INFILL in samplers), **left_out}


def _prompts(sent: Any) -> list[Any]:
    """Return the prompts of a body: a list with a number in it is one prompt."""
    if not isinstance(sent, list) or any(isinstance(part, int) for part in sent):
        return [sent]
    if not 0 < len(sent) <= PROMPTS_MAX:
        raise InvalidRequestError.of_field("prompt", f"a list has 1 to {PROMPTS_MAX} prompts")
    return sent


def _prompt(sent: Any, tokenizer: Tokenizer) -> str | list[int]:
    if isinstance(sent, dict):
        if sent.get("multimodal_data"):
            raise InvalidRequestError.of_field("prompt", "multimodal_data is not supported; send text")
        sent = sent.get("prompt_string")
    if isinstance(sent, str):
        return sent
    if isinstance(sent, list) and sent and len(sent) <= CTX_TOKENS_MAX:
        ids: list[int] = []
        for at, part in enumerate(sent):
            if isinstance(part, str):
                ids += tokenizer.encode(part, add_special=at == 0)
            elif type(part) is int and abs(part) < 1 << 31:
                ids.append(part)
            else:
                break
        else:
            return ids
    text = "must be text, token ids, a mixture of both, an object with prompt_string, or a list of these"
    raise InvalidRequestError.of_field("prompt", text)


def _check_count(prompts: Sequence[str | list[int]], n: int, limits: HttpLimits) -> None:
    if len(prompts) * n > limits.choices_max:
        text = f"{len(prompts)} prompts with n_cmpl={n} are {len(prompts) * n} answers; at most {limits.choices_max}"
        raise InvalidRequestError.of_field("prompt", text)


def _extra(chunks: Sequence[Chunk], tokenizer: Tokenizer, fill_in: FillIn) -> list[int]:
    """Return the text before the gap's file, in the models' own format (arXiv 2409.12186)."""

    def plain(text: str) -> list[int]:
        return tokenizer.encode(text, add_special=False, parse_special=False, param="input_extra") if text else []

    found = [fill_in.repository, *plain("myproject\n")] if fill_in.repository is not None else []
    for chunk in chunks:
        if fill_in.file is None:
            found += plain(_SNIPPET)
        else:
            found += [fill_in.file, *plain(f"{chunk.filename or 'tmp'}\n")]
        found += plain(chunk.text)
    if fill_in.file is not None:
        found += [fill_in.file, *plain("filename\n")]
    return [token for token in found if token is not None]
