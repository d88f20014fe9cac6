"""llama-server's sampling settings: its defaults, its names, and the settings used for an answer. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from relayline.coordinator.http.requests.bodies import CompletionBody
from relayline.coordinator.http.requests.plan import Plan
from relayline.coordinator.http.requests.validation import REPEAT_LAST_DEFAULT, dry_texts
from relayline.coordinator.sessions.generation import SamplingParams
from relayline.wire.common.errors import InvalidRequestError
from relayline.wire.common.sampler_order import TEMPERATURE, USUAL, number_of

# llama-server's defaults, where they differ from those of OpenAI's completions.
DEFAULTS: Mapping[str, Any] = MappingProxyType(
    {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05, "n_predict": -1}
)
# In the order in which they usually act, which is llama-server's default; two act only if they are asked for.
INFILL, ADAPTIVE = "infill", "adaptive_p"
_FIRST = ("penalties", "dry")
ORDER = (*_FIRST, *USUAL[:-1], INFILL, TEMPERATURE, ADAPTIVE)
SAMPLERS = tuple(name for name in ORDER if name not in (INFILL, ADAPTIVE))
SAMPLER_LETTERS: Mapping[str, str] = MappingProxyType(dict(zip("edskypmxita", ORDER, strict=True)))
# llama-server's other names of them, today's and earlier ones; `-` and `_` may be left out, capitals are small ones.
_ALIASES = {"nucleus": "top_p", "temp": "temperature", "typ": "typ_p", "typicalp": "typ_p", "typical": "typ_p"}
_NAMES = {name.replace("_", ""): name for name in ORDER} | _ALIASES
_GONE = ("tfsz", "tfs")  # a sampler that llama-server has no more, and that clients still list
# Settings that this server does not have, with the values by which llama-server shows them as off.
_FIXED: Mapping[str, Any] = MappingProxyType(
    {
        "n_keep": 0,
        "n_discard": 0,
        "min_keep": 0,
        "grammar_lazy": False,
        "grammar_triggers": (),
        "preserved_tokens": (),
        "chat_format": "Content-only",
        "reasoning_format": "none",
        "reasoning_in_content": False,
        "generation_prompt": "",
        "samplers": SAMPLERS,
        "speculative.types": "none",
        "post_sampling_probs": False,
        "backend_sampling": False,
        "lora": (),
    }
)

_OF_ANSWERS = ("grammar_lazy", "grammar_triggers", "preserved_tokens")  # GET /props does not show them


def default_settings(recommended: Iterable[tuple[str, int | float]] = ()) -> dict[str, Any]:
    """Return the settings of a body that says none, for GET /props. `recommended`: by the model."""
    usual = {
        "seed": -1,
        "temperature": DEFAULTS["temperature"],
        "dynatemp_range": 0.0,
        "dynatemp_exponent": 1.0,
        "top_k": DEFAULTS["top_k"],
        "top_p": DEFAULTS["top_p"],
        "min_p": DEFAULTS["min_p"],
        "top_n_sigma": -1.0,
        "xtc_probability": 0.0,
        "xtc_threshold": 0.1,
        "typical_p": 1.0,
        "repeat_last_n": REPEAT_LAST_DEFAULT,
        "repeat_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "dry_multiplier": 0.0,
        "dry_base": 1.75,
        "dry_allowed_length": 2,
        "dry_penalty_last_n": REPEAT_LAST_DEFAULT,
        "mirostat": 0,
        "mirostat_tau": 5.0,
        "mirostat_eta": 0.1,
        "adaptive_target": -1.0,
        "adaptive_decay": 0.9,
        "max_tokens": -1,
        "n_predict": -1,
        "ignore_eos": False,
        "stream": False,
        "n_probs": 0,
        "timings_per_token": False,
        **{name: value for name, value in _FIXED.items() if name not in _OF_ANSWERS},
    }
    return usual | dict(recommended)


def generation_settings(plan: Plan, sent: CompletionBody, body: CompletionBody) -> dict[str, Any]:
    """Return the settings used: of a checked plan, the body as sent, and as understood."""
    sampling, numbers = plan.sampling, dict(plan.sampling.numbers)
    n_predict = -1 if plan.max_tokens is None else plan.max_tokens
    return (
        default_settings()
        | {name: _FIXED[name] for name in _OF_ANSWERS}
        | {
            "seed": sampling.seed,
            "temperature": sampling.temperature,
            "dynatemp_range": numbers.get("dynatemp_range", 0.0),
            "dynatemp_exponent": numbers.get("dynatemp_exponent", 1.0),
            "top_k": sampling.top_k,
            "top_p": sampling.top_p,
            "min_p": sampling.min_p,
            "top_n_sigma": numbers.get("top_n_sigma", -1.0),
            "xtc_probability": numbers.get("xtc_probability", 0.0),
            "xtc_threshold": numbers.get("xtc_threshold", 0.1),
            "typical_p": numbers.get("typical_p", 1.0),
            "repeat_last_n": int(numbers.get("repeat_last_n", REPEAT_LAST_DEFAULT)),
            "repeat_penalty": numbers.get("repetition_penalty", 1.0),
            "presence_penalty": sampling.presence_penalty,
            "frequency_penalty": sampling.frequency_penalty,
            "dry_multiplier": numbers.get("dry_multiplier", 0.0),
            "dry_base": numbers.get("dry_base", 1.75),
            "dry_allowed_length": int(numbers.get("dry_allowed_length", 2)),
            "dry_penalty_last_n": int(numbers.get("dry_penalty_last_n", REPEAT_LAST_DEFAULT)),
            "dry_sequence_breakers": dry_texts(body),
            "reasoning_format": "deepseek",
            "mirostat": int(numbers.get("mirostat", 0)),
            "mirostat_tau": numbers.get("mirostat_tau", 5.0),
            "mirostat_eta": numbers.get("mirostat_eta", 0.1),
            "adaptive_target": numbers.get("adaptive_target", -1.0),
            "adaptive_decay": numbers.get("adaptive_decay", 0.9),
            "stop": plan.stops,
            "max_tokens": n_predict,
            "n_predict": n_predict,
            "ignore_eos": plan.ignore_eos,
            "stream": plan.stream,
            "logit_bias": [{"bias": bias, "token": token} for token, bias in sampling.logit_bias],
            "n_probs": max(0, plan.n_logprobs),
            "grammar": body.grammar or "",
            "samplers": _samplers(getattr(sent, "samplers", None)),
            "timings_per_token": bool(sent.timings_per_token),
            "lora": [{"id": each.id, "scale": each.scale} for each in body.lora or () if each.scale],
        }
    )


def _samplers(sent: list[str] | str | None) -> list[str] | tuple[str, ...]:
    if sent is None:
        return SAMPLERS
    return [SAMPLER_LETTERS[letter] for letter in sent] if isinstance(sent, str) else sampler_names(sent)


def sampler_names(sent: Iterable[str]) -> list[str]:
    """Return samplers by their usual names, each once; those that there are not as they were sent."""
    plain = {each: each.lower().replace("-", "").replace("_", "") for each in sent}
    return [*dict.fromkeys(_NAMES.get(name, each) for each, name in plain.items() if name not in _GONE)]


def order_number(samplers: Sequence[str], sampling: SamplingParams) -> int:
    """Return the number of the order in which a request's samplers are to act: 0 for the usual one.

    Those that do nothing may stand anywhere, and so may adaptive-p, which comes last wherever it stands, as in
    llama.cpp. Raises InvalidRequestError for an order that there is not.
    """
    if sampling.temperature == 0 or sampling.number("mirostat"):
        return 0
    acting = [name for name in samplers if name != ADAPTIVE and _acts(name, sampling)]
    rank = {name: at for at, name in enumerate(_FIRST)} | dict.fromkeys(USUAL, 2) | {INFILL: 3}
    if INFILL in acting:
        rank[TEMPERATURE] = 4
    if acting != sorted(acting, key=rank.__getitem__):
        text = f"penalties come first, then dry; {INFILL} comes behind the filters and before temperature"
        raise InvalidRequestError.of_field("samplers", text)
    order = [name for name in acting if name in USUAL]
    return 0 if order == sorted(order, key=USUAL.index) else number_of(order)


def _acts(sampler: str, sampling: SamplingParams) -> bool:
    """Return whether a sampler that is listed does anything."""
    numbers = dict(sampling.numbers)
    match sampler:
        case "penalties":
            return sampling.is_penalised or "repetition_penalty" in numbers
        case "dry":
            return "dry_multiplier" in numbers
        case "top_k":
            return sampling.top_k > 0
        case "typ_p":
            return "typical_p" in numbers
        case "top_p":
            return sampling.top_p < 1
        case "min_p":
            return sampling.min_p > 0
        case "xtc":
            return "xtc_probability" in numbers
        case "temperature":
            return sampling.temperature != 1 or "dynatemp_range" in numbers
    return sampler in numbers
