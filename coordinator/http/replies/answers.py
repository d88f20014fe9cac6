"""The choices of one job as they grow, however they are sent. Everything here is called for every token."""

from __future__ import annotations

import time
from collections.abc import Sequence

from relayline.coordinator.http.replies.choice import ChoiceState, Growth, Prompt, Scored
from relayline.coordinator.http.replies.dialect import SoFar
from relayline.coordinator.http.replies.job import Job
from relayline.coordinator.http.replies.merge import Arrival, Merge
from relayline.coordinator.http.replies.shapes import CompletionTokensDetails, PromptTokensDetails, Timings, Usage
from relayline.coordinator.observe.usage import Spent
from relayline.wire.common.errors import InternalError


class Answers:
    """All choices of one job, fed by one `Merge`."""

    def __init__(self, job: Job, states: Sequence[ChoiceState], merge: Merge, begun_ns: int) -> None:
        """`begun_ns`: when the job was admitted; of the monotonic clock."""
        self.job, self.states = job, states
        self._merge, self._begun_ns = merge, begun_ns
        self._n_open = len(states)

    @property
    def is_open(self) -> bool:
        """Whether any choice is unfinished."""
        return self._n_open > 0

    def advance(self, arrival: Arrival) -> Growth | None:
        """Give an arrival to its choice; None if that had finished. Raises the error that ended a stream too soon."""
        index, event = arrival.stream, arrival.event
        state = self.states[index]
        if state.finish_reason is not None or arrival.progress is not None:
            return None  # tokens computed after a stop string, or the end of a stream that said why before
        if event is None:
            raise arrival.error or InternalError("generation ended without a reason; this is a bug of the server")
        growth = state.on_event(event, self._elapsed_ns(state))
        self.job.note(index, state)
        if state.is_finished():
            self._n_open -= 1
            if event.finish_reason is None:
                self._merge.drop(index)  # a stop string: the pipeline does not know that this choice is done
        return growth

    def _elapsed_ns(self, state: ChoiceState) -> int:
        """Return how long ago a choice's first token came; 0 where nobody asks."""
        plan = self.job.plan
        if not plan.shows_timings and not plan.line_end.within_ms:
            return 0
        now_ns = time.monotonic_ns()
        state.first_ns = state.first_ns or now_ns
        return now_ns - state.first_ns

    def usage(self) -> Usage:
        """Return the token counts up to now."""
        job, states = self.job, self.states
        n_completion = sum(state.n_tokens for state in states)
        n_cached = sum(state.n_cached for state in states[:: job.plan.n])  # of each prompt's first choice
        details = CompletionTokensDetails(
            reasoning_tokens=sum(state.n_thought for state in states),
            accepted_prediction_tokens=sum(state.n_predicted for state in states),
            # Several choices may be predicted right more often than the prediction is long.
            rejected_prediction_tokens=sum(
                max(0, len(request.prediction) - state.n_predicted)
                for request, state in zip(job.requests, states, strict=True)
            ),
        )
        n_all = job.n_prompt_tokens + n_completion
        return Usage(job.n_prompt_tokens, n_completion, n_all, PromptTokensDetails(n_cached), details)

    def spent(self) -> Spent:
        """Return the tokens up to now, for the counts of its API key."""
        usage = self.usage()
        n_prompt = usage.prompt_tokens if usage.completion_tokens else 0
        return Spent(n_prompt, usage.prompt_tokens_details.cached_tokens, usage.completion_tokens)

    def so_far(self) -> SoFar:
        """Return an event's figures of the answers up to now."""
        usage = self.usage()
        if not self.job.plan.shows_timings:
            return SoFar(usage)
        now_ns = time.monotonic_ns()
        first_ns = min((state.first_ns for state in self.states if state.first_ns), default=now_ns)
        n_cached = usage.prompt_tokens_details.cached_tokens
        n_read, n_generated = usage.prompt_tokens - n_cached, usage.completion_tokens
        # The first token of a choice comes from its prompt's last step, before the time that is measured here.
        n_steps = n_generated - sum(state.n_tokens > 0 for state in self.states)
        read_ms, generated_ms = (first_ns - self._begun_ns) / 1e6, (now_ns - first_ns) / 1e6
        timings = Timings(
            cache_n=n_cached,
            prompt_n=n_read,
            prompt_ms=read_ms,
            prompt_per_token_ms=read_ms / max(1, n_read),
            prompt_per_second=n_read * 1e3 / read_ms if read_ms else 0.0,
            predicted_n=n_generated,
            predicted_ms=generated_ms,
            predicted_per_token_ms=generated_ms / n_steps if n_steps else 0.0,
            predicted_per_second=n_steps * 1e3 / generated_ms if generated_ms else 0.0,
        )
        return SoFar(usage if self.job.plan.continuous_usage else None, timings)


def sum_of(parts: Sequence[Growth], prompt: Prompt | None = None) -> Growth:
    """Return a whole choice from what its events added."""
    text = "".join([part.text for part in parts])
    tokens = tuple(token for part in parts for token in part.tokens)
    scored: tuple[Scored, ...] = tuple(one for part in parts for one in part.scored)
    reasoning = "".join([part.reasoning for part in parts])
    calls = tuple(call for part in parts for call in part.calls)
    scores = next((part.prompt_scores for part in parts if part.prompt_scores), ())
    return Growth(text, tokens, scored, reasoning, calls, parts[-1].stop if parts else "", prompt, scores)
