"""The coordinator's own request metrics for Prometheus, under the name stems that vLLM's dashboards use.

Label children are looked up once. Tokens are counted in plain numbers, see `TokenGaps`. Figures of stages are in
`coordinator.observe.metrics` and at the stages' own /metrics.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.utils import floatToGoString

from relayline.coordinator.observe.media_metrics import MediaMetrics
from relayline.coordinator.sessions.request_log import SessionRecord, StreamRecord
from relayline.wire.telemetry import names

S = 1e-9  # seconds in a nanosecond
# The bounds of vLLM's histograms, so that its dashboards port by a change of prefix.
TTFT_BUCKETS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
    160.0, 640.0, 2560.0,
)  # fmt: skip
GAP_BUCKETS = (
    0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
LATENCY_BUCKETS = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
    1920.0, 7680.0,
)  # fmt: skip
TOKEN_BUCKETS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000, 200_000)
FINISHED = ("stop", "length", "abort", "error")


class TokenGaps:
    """Counts tokens and the times between them. Event loop only.

    A custom collector: Prometheus' counter and histogram lock, and check bound after bound, which took half of
    telemetry's cost per token.
    """

    def __init__(self, model_name: str, bounds_s: Sequence[float]) -> None:
        self._model_name = model_name
        self._names = [*map(floatToGoString, bounds_s), "+Inf"]
        self._bounds_ns = [round(bound_s / S) for bound_s in bounds_s]
        self._counts = [0] * len(self._names)
        self._sum_ns = self._n_tokens = 0

    def token(self, gap_ns: int | None) -> None:
        """Count one token, and the time since the last one; None for the first token."""
        self._n_tokens += 1
        if gap_ns is not None:
            self._counts[bisect.bisect_left(self._bounds_ns, gap_ns)] += 1
            self._sum_ns += gap_ns

    def collect(self) -> Iterator[CounterMetricFamily | HistogramMetricFamily]:
        """Return both as Prometheus has them."""
        labels = [names.LABEL_MODEL]
        tokens = CounterMetricFamily(names.METRIC_GENERATION_TOKENS, "Tokens generated", labels=labels)
        tokens.add_metric([self._model_name], self._n_tokens)
        yield tokens
        gaps = HistogramMetricFamily(names.METRIC_ITL, "Time between two tokens of a session", labels=labels)
        counts = zip(self._names, itertools.accumulate(self._counts), strict=True)
        gaps.add_metric([self._model_name], [*counts], self._sum_ns * S)
        yield gaps


class RequestMetrics:
    """Counters and histograms of one served model."""

    def __init__(self, model_name: str = "") -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)  # processor time, memory, open files: as every stage reports them
        self._model_name = model_name
        self._ttft = self._histogram(
            names.METRIC_TTFT, "Time to first token, with that for images and audio", TTFT_BUCKETS
        )
        self._tokens = TokenGaps(model_name, GAP_BUCKETS)
        self.registry.register(self._tokens)
        self.token = self._tokens.token  # for every token
        self._e2e = self._histogram(
            names.METRIC_E2E,
            "From admission, or the first work on images and audio, to the last token",
            LATENCY_BUCKETS,
        )
        self._queue = self._histogram(names.METRIC_QUEUE, "Time in the queue for a lane", LATENCY_BUCKETS)
        self._prefill = self._histogram(names.METRIC_PREFILL, "From the lane to the first token", LATENCY_BUCKETS)
        self._decode = self._histogram(names.METRIC_DECODE, "From the first token to the last", LATENCY_BUCKETS)
        self._prompt = self._histogram(names.METRIC_REQUEST_PROMPT, "Tokens of a prompt", TOKEN_BUCKETS)
        self._generation = self._histogram(names.METRIC_REQUEST_GENERATION, "Tokens of an answer", TOKEN_BUCKETS)
        self._prompt_tokens = self._counter(names.METRIC_PROMPT_TOKENS, "Prompt tokens of ended sessions")
        self._asked = self._counter(names.METRIC_PREFIX_QUERIES, "Prompt tokens looked up in the prefix cache")
        self._copied = self._counter(names.METRIC_PREFIX_HITS, "Prompt tokens taken from the prefix cache")
        self.media = MediaMetrics(self.registry, model_name)
        self._drafts = self._counter(names.METRIC_DRAFTS, "Frames with draft tokens")
        self._draft_tokens = self._counter(names.METRIC_DRAFT_TOKENS, "Draft tokens sent to be verified")
        self.accepted = self._counter(names.METRIC_ACCEPTED_TOKENS, "Draft tokens that were accepted")
        self.replays = self._counter(names.METRIC_REPLAYS, "Sessions replayed after a fault of their own")
        self.recoveries = self._counter(names.METRIC_RECOVERIES, "Times that the stages were connected again")
        finished = Counter(
            names.METRIC_SUCCESS,
            "Ended answers by reason; abort: the client went, or cancelled it",
            [names.LABEL_MODEL, names.LABEL_FINISHED],
            registry=self.registry,
        )
        self._finished = {reason: finished.labels(model_name, reason) for reason in FINISHED}

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        family = Histogram(name, text, [names.LABEL_MODEL], registry=self.registry, buckets=buckets)
        return family.labels(self._model_name)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(name, text, [names.LABEL_MODEL], registry=self.registry).labels(self._model_name)

    def drafted(self, n_tokens: int) -> None:
        """Count the guesses of one frame."""
        self._drafts.inc()
        self._draft_tokens.inc(n_tokens)

    def read(self, n_prompt: int, n_copied: int) -> None:
        """Count a prompt's tokens that were looked up in the prefix cache, and those that were copied from it."""
        self._asked.inc(n_prompt)
        self._copied.inc(n_copied)

    def stream_ended(self, stream: StreamRecord) -> None:
        """Observe a choice that has ended, for any reason."""
        reason, _ = stream.outcome()
        reason = "stop" if reason == "tool_calls" else reason  # vLLM's dashboards know no other
        self._finished[reason if reason in self._finished else "error"].inc()
        session = stream.session
        if stream.ttft_ns is not None and not session.is_embedding:
            self._ttft.observe(stream.ttft_ns * S)
        if reason in ("stop", "length"):
            self._e2e.observe((stream.ended_ns - stream.asked_ns) * S)
            self._prompt.observe(session.n_prompt)
            if not session.is_embedding:
                self._generation.observe(stream.n_tokens)

    def session_ended(self, session: SessionRecord) -> None:
        """Observe the phases of a session that ended, as far as it got."""
        self._queue.observe(((session.started_ns or session.ended_ns) - session.admitted_ns) * S)
        if session.first_token_ns:
            self._prompt_tokens.inc(session.n_prompt)
            self._prefill.observe((session.first_token_ns - session.started_ns) * S)
            self._decode.observe((session.last_token_ns - session.first_token_ns) * S)

    def render(self) -> bytes:
        """Return the exposition text."""
        text: bytes = generate_latest(self.registry)
        return text
