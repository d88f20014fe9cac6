"""Token ids in place of the texts of a plan: biases, banned words, breakers of DRY, the predicted output."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from relayline.coordinator.answers.syntax import Thinking
from relayline.coordinator.http.requests.plan import Plan
from relayline.coordinator.http.requests.prompts import check_tokens
from relayline.coordinator.text.dry import breakers_of
from relayline.coordinator.text.tokenizer import Tokenizer
from relayline.wire.common.bounds import CTX_TOKENS_MAX, LOGIT_BIAS_MAX, SAMPLER_TOKENS_MAX
from relayline.wire.common.errors import InvalidRequestError
from relayline.wire.common.thoughts import ThoughtMarks

_LINE_ENDS = ("\n", "\n\n", "\r\n", "\r\n\r\n")  # behind a mark of thoughts


class PlanTokens:
    """Finds the tokens of plans with one model's tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ends: tuple[int, ...] | None = None  # tokens that end an answer; None until they are needed

    def of_texts(self, plan: Plan) -> Plan:
        """Return the plan with the tokens of its texts, and of its end if that is held back.

        Raises InvalidRequestError, also for token ids outside the vocabulary.
        """
        n_vocab = self._tokenizer.n_vocab
        check_tokens([token for token, _ in plan.sampling.logit_bias], n_vocab, "logit_bias")
        check_tokens(plan.sampling.allowed_tokens, n_vocab, "allowed_token_ids")
        check_tokens(plan.stop_tokens, n_vocab, "stop_token_ids")
        if plan.dry_texts and self._tokenizer.has_text:
            found = breakers_of(self._tokenizer, plan.dry_texts)
            sampling = dataclasses.replace(plan.sampling, dry_breakers=found.whole, dry_sequences=found.sequences)
            plan = dataclasses.replace(plan, sampling=sampling, dry_texts=())
        if not (plan.min_tokens or plan.bad_words or plan.bias_texts):
            return plan
        sampling = plan.sampling
        if plan.min_tokens and self._ends is None:
            self._ends = tuple(token for token in range(n_vocab) if self._tokenizer.is_end(token))
        held_back = tuple(sorted({*(self._ends or ()), *plan.stop_tokens})) if plan.min_tokens else ()
        if len(held_back) > SAMPLER_TOKENS_MAX:
            text = f"with min_tokens, and the model's own end tokens, at most {SAMPLER_TOKENS_MAX}"
            raise InvalidRequestError.of_field("stop_token_ids", text)
        biases = dict(sampling.logit_bias)
        for text, bias in plan.bias_texts:
            biases |= dict.fromkeys(self._plain(text, "logit_bias"), bias)
        if len(biases) > LOGIT_BIAS_MAX:
            raise InvalidRequestError.of_field("logit_bias", f"at most {LOGIT_BIAS_MAX} tokens, got {len(biases)}")
        words = dict.fromkeys(
            tuple(self._plain(before + word.lstrip(), "bad_words")) for word in plan.bad_words for before in ("", " ")
        )
        n_tokens = sum(map(len, words))
        if n_tokens > SAMPLER_TOKENS_MAX:
            text = f"their tokens are {n_tokens}, at most {SAMPLER_TOKENS_MAX}"
            raise InvalidRequestError.of_field("bad_words", text)
        sampling = dataclasses.replace(
            sampling,
            logit_bias=tuple(sorted(biases.items())),
            held_back_tokens=held_back,
            bad_words=tuple(word for word in words if word),
        )
        return dataclasses.replace(plan, sampling=sampling, bad_words=(), bias_texts=())

    def with_thoughts(self, plan: Plan, thinking: Thinking | None, ctx_tokens: int, *, is_thinking: bool) -> Plan:
        """Return the plan with the bound of its thoughts, unless the answer ends before. `is_thinking`: the prompt has
        begun them.
        """
        n_most = min(filter(None, (plan.max_tokens, ctx_tokens)), default=CTX_TOKENS_MAX)
        if plan.thought_tokens_max is None or thinking is None or plan.thought_tokens_max >= n_most:
            return plan
        begin, end = (self._tokenizer.encode(mark, add_special=False) for mark in (thinking.open, thinking.close))
        words = self._plain(plan.last_words, "reasoning_budget_message") if plan.last_words else ()
        numbers = {**dict(plan.sampling.numbers), "thought_tokens_max": float(plan.thought_tokens_max)}
        if is_thinking:
            numbers["thoughts_begun_at"] = 0.0  # the place follows from each prompt, see `Plan.sampling_of`
        lasts = self._lasts_of(thinking.open, begin), self._lasts_of(thinking.close, end)
        marks = ThoughtMarks(tuple(begin), tuple(end), tuple(words), *lasts)
        sampling = dataclasses.replace(plan.sampling, numbers=tuple(sorted(numbers.items())), thought_marks=marks)
        return dataclasses.replace(plan, sampling=sampling, thought_tokens_max=None, last_words="")

    def _lasts_of(self, mark: str, tokens: Sequence[int]) -> tuple[int, ...]:
        """Return the tokens in place of the last one of a mark, where the vocabulary joins it with line ends."""
        joined = [self._tokenizer.encode(mark + blanks, add_special=False) for blanks in _LINE_ENDS]
        lasts = {each[-1]: None for each in joined if len(each) == len(tokens) and each[:-1] == [*tokens[:-1]]}
        return tuple(last for last in lasts if last != tokens[-1])

    def _plain(self, text: str, param: str) -> list[int]:
        return self._tokenizer.encode(
            text, add_special=False, parse_special=False, ctx_tokens=SAMPLER_TOKENS_MAX, param=param
        )

    def of_prediction(self, plan: Plan, ctx_tokens: int) -> Sequence[int]:
        """Return the token ids of the client's predicted output, as many as a stream may hold.

        Special tokens that it spells out are text, as in an answer. Raises InvalidRequestError for text when the model
        has no tokenizer, and for token ids outside its vocabulary.
        """
        text, tokenizer = plan.prediction, self._tokenizer
        if not text:
            return ()
        if isinstance(text, tuple):
            check_tokens(text, tokenizer.n_vocab, "prediction")
            return text[:ctx_tokens]
        if not tokenizer.has_text:
            raise InvalidRequestError.of_field("prediction", "this model has no tokenizer")
        # Of a longer one only the beginning could be generated.
        text = text[: ctx_tokens * tokenizer.longest_piece_bytes] if len(text) > ctx_tokens else text
        n_max = max(ctx_tokens, len(text.encode(errors="replace")))
        ids = tokenizer.encode(text, add_special=False, parse_special=False, ctx_tokens=n_max, param="prediction")
        return ids[:ctx_tokens]
