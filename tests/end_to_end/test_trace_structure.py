"""The rules that make a trace readable in a viewer that shows service, name, times and parents, but follows no link.

Method: three stage processes, one of them with a clock that is 5 s off, eight streams, and a receiver in this process.
Every received span is checked against the rules.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import functools
import re

import aiohttp
import pytest

from relayline.coordinator.observe.passes import WINDOW_NS, WINDOW_SPANS_MAX
from relayline.deploy.testing.otlp_receiver import StoredSpan, receiving
from relayline.deploy.testing.trace_rebuild import is_batch, is_complete
from relayline.deploy.testing.traced_pipeline import PROMPTS, ask_all, settled, traced_pipeline
from relayline.wire.telemetry import names

pytestmark = pytest.mark.slow  # real processes, started many times

N_STAGES = 3
N_TOKENS = 60
SKEW_S = 5.0
GRANTS = ("--grant-steps", "8")
SKEWED = 1  # the stage whose clock is ahead
WORDS = re.compile(
    r"positions? \d+(-\d+)?: (\d+ batches, )?waited \d+\.\d\d ms( \(at most \d+\.\d\d ms\))?, decoded \d+\.\d\d ms, "
    r"[\d.]+ streams? in [\d.]+ rows?( on average)?"
)


@dataclasses.dataclass(frozen=True)
class Run:
    """The exported spans of one run."""

    spans: list[StoredSpan]
    level: str
    has_grants: bool

    @functools.cached_property
    def by_context(self) -> dict[tuple[str, str], StoredSpan]:
        return {span.context: span for span in self.spans}

    def parent(self, span: StoredSpan) -> StoredSpan | None:
        return self.by_context.get((span.trace_id, span.parent_id))

    def traces(self) -> dict[str, list[StoredSpan]]:
        found: dict[str, list[StoredSpan]] = collections.defaultdict(list)
        for span in self.spans:
            found[span.trace_id].append(span)
        return found

    def roots_of_passes(self) -> list[StoredSpan]:
        return [span for span in self.spans if span.name in names.PASSES_NAMES]

    def frames(self) -> list[StoredSpan]:
        return [span for span in self.spans if span.name in names.BATCH_NAMES and not is_batch(span)]


@pytest.fixture(scope="module", params=[("batches", ()), ("frames", ()), ("frames", GRANTS)], ids="{0[0]}{0[1]}".format)
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    level, more = request.param
    with receiving() as receiver:
        environment = {"OTEL_EXPORTER_OTLP_ENDPOINT": receiver.grpc_endpoint}
        directory = tmp_path_factory.mktemp("split")
        with traced_pipeline(
            directory, environment, n_stages=N_STAGES, level=level, skews_s={SKEWED: SKEW_S}, more=more
        ) as traced:
            asyncio.run(ask_all(traced, PROMPTS, N_TOKENS))
            asyncio.run(refused(traced.url, traced.model))
            n_steps = sum(status.n_steps for status in asyncio.run(settled(traced.stages)))
            whole = functools.partial(is_complete, n_steps=n_steps, n_requests=len(PROMPTS))
            receiver.wait_for(lambda spans: whole([span for span in spans if not is_refusal(span)]))
        return Run(receiver.spans, level, bool(more))  # whole: processes hand over their last spans when they stop


async def refused(url: str, model: str) -> None:
    async with aiohttp.ClientSession() as session:
        body = {"model": model, "prompt": "x", "max_tokens": -2}
        async with session.post(f"{url}/v1/completions", json=body, headers={"x-request-id": "bad"}) as reply:
            assert reply.status == 400


def assert_came_back(run: Run, n_tokens: int) -> None:
    """All tokens, and with grants also those that were computed in vain."""
    n_wanted = len(PROMPTS) * N_TOKENS
    assert n_wanted <= n_tokens <= (2 * n_wanted if run.has_grants else n_wanted)


def is_refusal(span: StoredSpan) -> bool:
    return span.attributes.get("http.response.status_code") == 400


def test_every_stage_is_a_separate_service(run: Run) -> None:
    services = {span.service for span in run.spans}
    assert services == {"relayline-coordinator", *(f"relayline-stage-{index}" for index in range(N_STAGES))}
    for index in range(N_STAGES):
        resources = [span.resource for span in run.spans if span.service == f"relayline-stage-{index}"]
        assert {resource["service.namespace"] for resource in resources} == {"relayline-demo"}
        assert {resource[names.RESOURCE_STAGE_LAYERS] for resource in resources} == {["0-2", "3-5", "6-7"][index]}
        assert all(re.fullmatch(r".+:\d+", resource["service.instance.id"]) for resource in resources)


def test_names_are_few_and_tell_the_size_of_a_batch(run: Run) -> None:
    for span in run.spans:
        if is_batch(span):
            phase, streams = span.attributes[names.ATTR_BATCH_PHASE], span.attributes[names.ATTR_BATCH_SESSIONS]
            assert span.name == f"{phase} ×{streams}"  # at most eight streams here
    assert len({span.name for span in run.spans if span.service != "relayline-coordinator"}) <= 50


def test_batches_of_a_pass_are_below_each_other_and_begin_when_their_rows_arrived(run: Run) -> None:
    for span in filter(is_batch, run.spans):
        stage, parent = span.attributes[names.ATTR_STAGE_INDEX], run.parent(span)
        assert parent is not None
        if stage == 0:
            assert parent.name in names.PASSES_NAMES
            assert parent.parent_id == ""
        else:
            assert is_batch(parent)
            assert parent.attributes[names.ATTR_STAGE_INDEX] == stage - 1
            assert set(span.attributes[names.ATTR_MEMBER_SESSIONS]) & set(parent.attributes[names.ATTR_MEMBER_SESSIONS])
        closed, decoded = span.events
        assert (closed.name, decoded.name) == (names.EVENT_CLOSED, names.EVENT_DECODED)
        assert span.start_ns <= closed.at_ns <= decoded.at_ns <= span.end_ns
        assert closed.at_ns - span.start_ns == pytest.approx(span.attributes[names.ATTR_BATCH_WAIT_MAX_NS], abs=1_000)
        assert closed.attributes[names.EVENT_ATTR_REASON] == span.attributes[names.ATTR_BATCH_CLOSE_REASON]
        assert decoded.attributes[names.EVENT_ATTR_MEASURED] == span.attributes[names.ATTR_BATCH_DECODE_NS] / 1e9


def test_the_coordinators_part_of_a_pass_is_there(run: Run) -> None:
    sent = [span for span in run.spans if span.name == names.SPAN_SEND]
    back = [span for span in run.spans if span.name == names.SPAN_RETURN]
    assert sent
    for span in sent:
        parent = run.parent(span)
        assert parent is not None
        assert parent.name in names.PASSES_NAMES
    assert_came_back(run, sum(span.attributes[names.ATTR_PASS_TOKENS] for span in back))
    for span in back:
        parent = run.parent(span)
        assert parent is not None
        assert parent.attributes[names.ATTR_STAGE_INDEX] == N_STAGES - 1


def test_a_second_of_passes_is_summed_up_at_its_root(run: Run) -> None:
    roots = run.roots_of_passes()
    assert_came_back(run, sum(root.attributes[names.ATTR_PASSES_TOKENS] for root in roots))
    for root in roots:
        inside = run.traces()[root.trace_id]
        sent = [span for span in inside if span.name == names.SPAN_SEND]
        n_rows = sum(span.attributes[names.ATTR_PASS_ROWS] for span in sent)
        most = max((span.attributes[names.ATTR_PASS_STREAMS] for span in sent), default=0)
        assert sent or run.has_grants, "only a second that extends grants may have sent no rows"
        assert all(span.attributes[names.ATTR_PASS_ROWS] > 0 for span in sent)
        if run.has_grants:  # passes that the stages make by themselves count, and nothing was sent for them
            assert root.attributes[names.ATTR_PASSES] >= len(sent)
            assert root.attributes[names.ATTR_PASSES_ROWS] >= n_rows
        else:
            assert root.attributes[names.ATTR_PASSES] == len(sent)
            assert root.attributes[names.ATTR_PASSES_ROWS] == n_rows
            assert root.name == names.sized(names.SPAN_PASSES, most)
        assert all(span.start_ns - root.start_ns <= WINDOW_NS for span in sent)
        assert len(inside) <= WINDOW_SPANS_MAX + 1 + 8 * (N_STAGES + 2), "and spans under way when it closed"
    told = [root.attributes for root in roots if names.ATTR_PASSES_BUSY in root.attributes]
    assert told, "a stage of a busy host may answer too late, but not each time"
    for attributes in told:
        assert len(attributes[names.ATTR_PASSES_BUSY]) == N_STAGES
        assert all(0 < share <= 1 for share in attributes[names.ATTR_PASSES_BUSY])
        assert 0 <= attributes[names.ATTR_PASSES_OVERLAP] <= 1


def test_no_trace_of_one_span_is_left_but_of_a_refusal(run: Run) -> None:
    alone = [spans[0] for spans in run.traces().values() if len(spans) == 1]
    assert [is_refusal(span) for span in alone] == [True]
    (refusal,) = alone
    assert not refusal.is_error, "the caller's mistake is not the server's error"
    assert [event.name for event in refusal.events] == ["refused"]
    assert "max_tokens" in refusal.events[0].attributes[names.EVENT_ATTR_CAUSE]
    assert refusal.attributes[names.HTTP_REQUEST_ID] == "bad"


def test_no_span_hangs_in_the_air(run: Run) -> None:
    assert [span.name for span in run.spans if span.parent_id and run.parent(span) is None] == []


def test_a_requests_trace_shows_its_stages(run: Run) -> None:
    for decode in [span for span in run.spans if span.name == names.SPAN_DECODE]:
        below = [s for s in run.spans if s.trace_id == decode.trace_id and s.parent_id == decode.span_id]
        rhythm = [span for span in below if span.name == names.SPAN_BATCHES]
        assert sorted(span.attributes[names.ATTR_STAGE_INDEX] for span in rhythm) == list(range(N_STAGES))
        for span in rhythm:
            assert span.service == f"relayline-stage-{span.attributes[names.ATTR_STAGE_INDEX]}"
            assert 0 < len(span.events) <= 128
            assert len(span.events) == span.attributes[names.ATTR_BATCHES]
            assert all(WORDS.fullmatch(event.name) for event in span.events), [event.name for event in span.events]
            assert all(span.start_ns <= event.at_ns <= span.end_ns for event in span.events)
            assert span.attributes[names.ATTR_WAIT] >= span.attributes[names.ATTR_WAIT_MAX] > 0
            assert len({link.trace_id for link in span.links}) == len(span.links), "one link per second of passes"
            assert {link.trace_id for link in span.links} <= {root.trace_id for root in run.roots_of_passes()}
        seconds = {root.context for root in run.roots_of_passes()}
        linked = [(link.trace_id, link.span_id) for link in decode.links]
        assert len(set(linked)) == len(linked)
        assert set(linked) <= seconds


def test_frames_are_below_their_stage_and_say_when_they_stopped_waiting(run: Run) -> None:
    if run.level == "batches":
        assert run.frames() == []
        return
    assert run.frames()
    batches = {span.attributes[names.ATTR_BATCH_ID]: span for span in filter(is_batch, run.spans)}
    for frame in run.frames():
        parent = run.parent(frame)
        assert parent is not None
        assert (parent.name, parent.service) == (names.SPAN_BATCHES, frame.service)
        assert frame.name == batches[frame.attributes[names.ATTR_BATCH_ID]].name
        (waited,) = frame.events
        wait_ns = frame.attributes[names.ATTR_FRAME_WAIT_NS]
        assert waited.at_ns - frame.start_ns == pytest.approx(wait_ns, abs=1_000)
        words = re.fullmatch(r"waited (\d+\.\d\d) ms", waited.name)
        assert words is not None, waited.name
        assert float(words[1]) == pytest.approx(wait_ns / 1e6, abs=0.0051)  # a half may be rounded either way


def test_gen_ai_stands_on_the_root_of_a_request_alone(run: Run) -> None:
    holders = {span.name for span in run.spans if any(key.startswith("gen_ai.") for key in span.attributes)}
    assert holders == {"POST /v1/completions"}


def test_a_clock_that_is_off_does_not_bend_the_diagonal(run: Run) -> None:
    """A stage's row arrives after its batch was ready, within the uncertainty of the clocks."""
    sure_ns = 0
    for index in range(N_STAGES):
        resources = [s.resource for s in run.spans if s.service == f"relayline-stage-{index}"]
        assert {resource[names.RESOURCE_CLOCK] for resource in resources} == {names.CLOCK_COORDINATOR}
        uncertain_s = max(resource[names.RESOURCE_CLOCK_UNCERTAINTY] for resource in resources)
        assert 0 < uncertain_s < 1.0
        sure_ns = max(sure_ns, round(uncertain_s * 1e9))
        for resource in resources:
            expected = -SKEW_S if index == SKEWED else 0.0
            assert resource[names.RESOURCE_CLOCK_OFFSET] == pytest.approx(expected, abs=2 * uncertain_s + 0.01)
    for span in filter(is_batch, run.spans):
        parent = run.parent(span)
        assert parent is not None
        if is_batch(parent):
            assert span.start_ns >= parent.end_ns - 3 * sure_ns
            assert span.start_ns - parent.end_ns < SKEW_S * 1e9 / 2
