"""From bodies to prompts that are read and not continued: those of embeddings and of rerankers."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import msgspec

from relayline.coordinator.http.embeddings import asking
from relayline.coordinator.http.requests.plan import NO_PLAN
from relayline.coordinator.http.requests.prompts import PROMPT_TOKENS_MAX, check_fit, check_tokens
from relayline.coordinator.http.requests.validation import check_model
from relayline.coordinator.http.rerank import asking as rerank_asking
from relayline.coordinator.http.workers.prepared import Prepared, Route, Setting, Work, packed
from relayline.coordinator.text.tokenizer import Tokenizer

Read = Callable[[Setting, Tokenizer, Work], Prepared]


def _embedded(setting: Setting, tokenizer: Tokenizer, work: Work) -> Prepared:
    body = asking.read(work.raw)
    model = check_model(body.model, setting.model_id, setting.limits)
    work.enter("tokens")
    start_ns = time.monotonic_ns()
    prompts = asking.inputs_of(body, tokenizer, work.ctx_tokens)
    check_fit(list(map(len, prompts)), work.ctx_tokens)
    for prompt in prompts:
        check_tokens(prompt, tokenizer.n_vocab, "input")
    return _prepared(model, prompts, start_ns, msgspec.msgpack.encode(asking.answer_options(body)))


def _reranked(setting: Setting, tokenizer: Tokenizer, work: Work) -> Prepared:
    body = rerank_asking.read_rerank(work.raw)
    model = check_model(body.model, setting.model_id, setting.limits)
    work.enter("tokens")
    start_ns = time.monotonic_ns()
    pairs = rerank_asking.pairs_of(body, tokenizer)
    prompts = rerank_asking.prompts_of(pairs, tokenizer, work.ctx_tokens, PROMPT_TOKENS_MAX)
    return _prepared(model, prompts, start_ns, msgspec.msgpack.encode(rerank_asking.answer_options(body)))


def _scored(setting: Setting, tokenizer: Tokenizer, work: Work) -> Prepared:
    body = rerank_asking.read_score(work.raw)
    model = check_model(body.model, setting.model_id, setting.limits)
    pairs = rerank_asking.scored_pairs(body)
    work.enter("tokens")
    start_ns = time.monotonic_ns()
    prompts = rerank_asking.prompts_of(pairs, tokenizer, work.ctx_tokens, PROMPT_TOKENS_MAX)
    return _prepared(model, prompts, start_ns)


def _prepared(model: str, prompts: Sequence[list[int]], start_ns: int, answer_options: bytes = b"") -> Prepared:
    """Return prompts that are not continued; `start_ns`: when they began to be tokens."""
    return Prepared(
        model=model,
        plan=NO_PLAN,
        prompts=list(map(packed, prompts)),
        echoes=[],
        prediction=b"",
        is_thinking=False,
        grammar_task=b"",
        input_json="",
        start_ns=start_ns,
        end_ns=time.monotonic_ns(),
        answer_options=answer_options,
    )


READ_ALONE: dict[Route, Read] = {"embeddings": _embedded, "rerank": _reranked, "score": _scored}
