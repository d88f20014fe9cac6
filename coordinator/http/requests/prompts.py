"""The prompts of a request: as texts or tokens, and whether they fit the context. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from relayline.coordinator.http.edge.limits import HttpLimits
from relayline.coordinator.http.requests.plan import Plan
from relayline.wire.common.bounds import CTX_TOKENS_MAX, GRAMMAR_TOKENS_MAX
from relayline.wire.common.errors import ContextLengthError, InvalidRequestError

PROMPT_TOKENS_MAX = CTX_TOKENS_MAX  # of one request, all its prompts together

Prompts = str | Sequence[int | str | list[int]]


def split_prompt(prompt: Prompts, n: int, limits: HttpLimits) -> list[str | list[int]]:
    """Return the prompts of a /v1/completions body: a text, token ids, several texts, or several lists of ids.

    Raises InvalidRequestError.
    """
    if isinstance(prompt, str):
        return [prompt]
    ids = [item for item in prompt if isinstance(item, int)]
    if ids and len(ids) == len(prompt):
        return [ids]
    if not prompt or ids:
        raise InvalidRequestError.of_field("prompt", "must be text, token ids, a list of texts or of token id lists")
    several = [item if isinstance(item, str) else [*item] for item in prompt if not isinstance(item, int)]
    if len({type(item) for item in several}) > 1:
        raise InvalidRequestError.of_field("prompt", "texts and token id lists cannot be mixed")
    if len(several) * n > limits.choices_max:
        raise InvalidRequestError.of_field(
            "prompt", f"{len(several)} prompts with n={n} are {len(several) * n} choices; at most {limits.choices_max}"
        )
    return several


def check_tokens(tokens: Sequence[int], n_vocab: int, param: str) -> None:
    """Refuse token ids outside the vocabulary; llama.cpp would abort on them."""
    if not tokens or (min(tokens) >= 0 and max(tokens) < n_vocab):
        return
    for at, token in enumerate(tokens):
        if not 0 <= token < n_vocab:
            raise InvalidRequestError.of_field(param, f"token {token} at index {at} is not in [0, {n_vocab})")


def check_fit(lengths: Sequence[int], ctx_tokens: int) -> None:
    """Raise ContextLengthError for prompts of these lengths, in tokens, that cannot fit."""
    longest = max(lengths, default=0)
    if longest > ctx_tokens:
        raise ContextLengthError.of_prompt(ctx_tokens, f"{longest} tokens", "prompt")
    if sum(lengths) > PROMPT_TOKENS_MAX:
        raise ContextLengthError(
            f"prompt: the prompts of one request have at most {PROMPT_TOKENS_MAX} tokens", "prompt"
        )


def fit_tokens(n_prompt: int, plan: Plan, ctx_tokens: int, param: str, *, is_strict: bool) -> int:
    """Return how many tokens to generate after a prompt of `n_prompt` tokens.

    As many as the client asked for, or the rest of the context if that is less; with `is_strict` less is an error.
    Raises InvalidRequestError for an empty prompt, ContextLengthError for a request that cannot fit.
    """
    if n_prompt < 1:
        raise InvalidRequestError.of_field(param, "the prompt has no tokens")
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
        raise InvalidRequestError.of_field("max_tokens", text)
    wanted = max(wanted, 1)
    if wanted > room:
        raise ContextLengthError.of_request(ctx_tokens, n_prompt, wanted, param)
    return wanted
