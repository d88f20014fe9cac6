"""The proof of tracing: the batch of every token at every stage, rebuilt from stored spans alone and checked.

Eight streams over three stage processes. Spans go over OTLP to a receiver in this process (gRPC and HTTP) and to
MLflow, an independent store (marked; it installs itself). The spans are compared with two witnesses that do not come
from spans: the ring that each stage keeps (Batches), and its counters (Status), which are older than tracing.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import functools
from pathlib import Path
from typing import Any

import pytest

from relayline.deploy.testing.otlp_receiver import CONSUMER, StoredSpan, receiving
from relayline.deploy.testing.trace_rebuild import ROUTE, Batch, Rebuilt, Session, is_complete, rebuild
from relayline.deploy.testing.traced_pipeline import PROMPTS, ask_all, ring_of, settled, traced_pipeline
from relayline.wire.pb.relayline.v1 import relayline_pb2 as pb
from relayline.wire.telemetry import names
from tests.support.mlflow_store import mlflow_store

pytestmark = pytest.mark.slow  # real processes, started many times

N_STAGES = 3
N_TOKENS = 48  # over three stages more batches than the 128 links that the SDK keeps by default


@dataclasses.dataclass(frozen=True, slots=True)
class Proof:
    """One run: the clients' answers, the spans, the stages' own records."""

    store: str
    answers: list[dict[str, Any]]
    spans: list[StoredSpan]
    rebuilt: Rebuilt
    rings: list[pb.BatchesResponse]
    statuses: list[pb.StatusResponse]


async def run(directory: Path, environment: dict[str, str], store: str, level: str, wait_for: Any) -> Proof:
    with traced_pipeline(directory, environment, n_stages=N_STAGES, level=level) as traced:
        answers = await ask_all(traced, PROMPTS, N_TOKENS)
        statuses = await settled(traced.stages)
        rings = [await ring_of(address) for address in traced.stages]
        spans = wait_for(statuses)
    return Proof(store, answers, spans, rebuild(spans), rings, statuses)


@pytest.fixture(
    scope="module",
    params=[
        ("grpc", "batches"),
        ("http", "frames"),
        pytest.param(("mlflow", "batches"), marks=[pytest.mark.slow, pytest.mark.mlflow, pytest.mark.timeout(1200)]),
    ],
    ids="-".join,
)
def proof(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Proof:
    """One run of the pipeline for each store."""
    store, level = request.param
    directory = tmp_path_factory.mktemp("split")
    if store == "mlflow":
        with mlflow_store(tmp_path_factory.mktemp("mlflow")) as mlflow:

            def stored_by_mlflow(statuses: list[pb.StatusResponse]) -> list[StoredSpan]:
                n_steps = sum(status.n_steps for status in statuses)
                is_enough = functools.partial(is_complete, n_steps=n_steps, n_requests=len(PROMPTS))
                return mlflow.wait_for(is_enough, n_traces=len(PROMPTS) + 1)

            return asyncio.run(run(directory, mlflow.environment, store, level, stored_by_mlflow))
    with receiving() as receiver:
        endpoint = receiver.grpc_endpoint if store == "grpc" else receiver.http_endpoint
        protocol = "grpc" if store == "grpc" else "http/protobuf"
        environment = {"OTEL_EXPORTER_OTLP_ENDPOINT": endpoint, "OTEL_EXPORTER_OTLP_PROTOCOL": protocol}

        def stored_here(statuses: list[pb.StatusResponse]) -> list[StoredSpan]:
            n_steps = sum(status.n_steps for status in statuses)
            return receiver.wait_for(functools.partial(is_complete, n_steps=n_steps, n_requests=len(PROMPTS)))

        return asyncio.run(run(directory, environment, store, level, stored_here))


@pytest.mark.sampled(1)
def test_every_request_is_one_trace_with_the_clients_ids_and_counts(proof: Proof) -> None:
    by_id = {session.request_id: session for session in proof.rebuilt.sessions}
    assert set(by_id) == {answer["id"] for answer in proof.answers}
    assert len({session.trace_id for session in by_id.values()}) == len(PROMPTS)
    for answer in proof.answers:
        session = by_id[answer["id"]]
        assert session.n_generated == len(answer["tokens"]) == N_TOKENS
        assert session.n_prompt == answer["usage"]["prompt_tokens"]
        servers = [span for span in proof.spans if span.trace_id == session.trace_id and span.name == ROUTE]
        assert [span.attributes[names.GEN_AI_RESPONSE_ID] for span in servers] == [answer["id"]]
        assert servers[0].parent_id == ""


def test_every_token_is_found_in_one_batch_at_every_stage(proof: Proof) -> None:
    """And each stage's batch names the one of the stage before as where its rows came from."""
    n_found = 0
    for session in proof.rebuilt.sessions:
        for position in session.sampled_rows:
            before: Batch | None = None
            for stage in range(N_STAGES):
                batch = proof.rebuilt.batches_of(session.session, position, stage)[-1]  # before it may be wrong guesses
                (member,) = (member for member in batch.members if member.holds(session.session, position))
                assert batch.requests[batch.members.index(member)][0] == session.trace_id
                if before is not None:
                    assert before.span.context in batch.upstream
                    assert before.step  # a batch of the stage above, found by its context
                    assert proof.rebuilt.batch_by_context[before.span.context].stage == stage - 1
                before = batch
                n_found += 1
    assert n_found == len(PROMPTS) * N_TOKENS * N_STAGES


def test_prompt_rows_are_found_too(proof: Proof) -> None:
    for session in proof.rebuilt.sessions:
        for position in range(session.n_prompt - 1):
            for stage in range(N_STAGES):
                assert len(proof.rebuilt.batches_of(session.session, position, stage)) == 1


def test_members_rows_and_waits_equal_the_stages_records(proof: Proof) -> None:
    for stage, ring in enumerate(proof.rings):
        assert ring.n_forgotten == 0
        assert len(ring.batches) == proof.statuses[stage].n_steps
        for record in ring.batches:
            batch = proof.rebuilt.batches[stage, record.step]
            traced = [(m.session, m.position, m.n_rows, m.wait_ns) for m in batch.members]
            remembered = [(f"{m.session_id:016x}", m.position, m.n_rows, m.wait_ns) for m in record.members]
            assert traced == remembered
            assert batch.n_rows == record.n_rows
            assert bytes.fromhex("".join(batch.span.context)) == record.context
            attributes = batch.span.attributes
            assert attributes[names.ATTR_BATCH_PADDED_ROWS] == record.padded_rows
            assert attributes[names.ATTR_BATCH_CLOSE_REASON] == record.close_reason
            assert attributes[names.ATTR_BATCH_DECODE_NS] == record.decode_ns
            assert attributes[names.ATTR_BATCH_ENCODE_NS] == record.encode_ns
            assert attributes.get(names.ATTR_BATCH_PREDICTED_NS, 0) == record.predicted_ns
            assert attributes[names.ATTR_BATCH_QUEUED_ROWS_BEFORE] == record.queued_rows_before
            assert attributes[names.ATTR_BATCH_QUEUED_ROWS_AFTER] == record.queued_rows_after
            assert attributes[names.ATTR_BATCH_BYTES_OUT] == record.bytes_out


def test_the_sum_of_all_spans_equals_the_stages_counts(proof: Proof) -> None:
    """Steps, rows, frames, waits, time, padding, close reasons: counters that tracing has no hand in."""
    for stage, status in enumerate(proof.statuses):
        batches = proof.rebuilt.of_stage(stage)
        assert len(batches) == status.n_steps
        assert collections.Counter(batch.n_rows for batch in batches) == dict(status.steps_by_rows)
        assert sum(len(batch.members) for batch in batches) == status.n_frames
        assert sorted(m.wait_ns for batch in batches for m in batch.members) == sorted(status.recent_wait_ns)
        attributes = [batch.span.attributes for batch in batches]
        assert sum(found[names.ATTR_BATCH_DECODE_NS] for found in attributes) == status.busy_ns
        assert sum(found[names.ATTR_BATCH_PADDED_ROWS] for found in attributes) == status.n_padded_rows
        reasons = collections.Counter(found[names.ATTR_BATCH_CLOSE_REASON] for found in attributes)
        assert reasons == dict(status.close_reasons)


def test_batches_really_held_several_requests(proof: Proof) -> None:
    for stage in range(N_STAGES):
        assert any(len({m.session for m in batch.members}) > 1 for batch in proof.rebuilt.of_stage(stage))


def test_requests_lead_to_their_batches_and_back(proof: Proof) -> None:
    """Jaeger shows a link only on the span that holds it, so both sides hold one: one per second of passes."""
    for session in proof.rebuilt.sessions:
        mine = [
            batch
            for batch in proof.rebuilt.batches.values()
            if any(member.session == session.session for member in batch.members)
        ]
        of_request = [span for span in proof.spans if span.trace_id == session.trace_id]
        passes = [
            link.trace_id
            for span in of_request
            for link in span.links
            if span.name in (names.SPAN_PREFILL, names.SPAN_DECODE)
            and link.attributes[names.ATTR_LINK] == names.LINK_PASSES
        ]
        assert set(passes) == {batch.span.trace_id for batch in mine}
        for stage in range(N_STAGES):
            here = [span for span in of_request if span.name == names.SPAN_BATCHES and _stage(span) == stage]
            batch_ids = [event.attributes[names.ATTR_BATCH_ID] for span in here for event in span.events]
            assert sorted(batch_ids) == sorted(f"{stage}:{batch.step}" for batch in mine if batch.stage == stage)
            for span in here:
                contexts = [(link.trace_id, link.span_id) for link in span.links]
                assert len({trace_id for trace_id, _ in contexts}) == len(contexts)
                assert all(proof.rebuilt.batch_by_context[context].stage == stage for context in contexts)


def _stage(span: StoredSpan) -> int:
    return int(span.attributes[names.ATTR_STAGE_INDEX])


def test_sums_on_a_request_are_those_of_its_batches(proof: Proof) -> None:
    for session in proof.rebuilt.sessions:
        waits = session.decode_span.attributes[names.ATTR_STAGE_WAIT_SUM]
        longest = session.decode_span.attributes[names.ATTR_STAGE_WAIT_MAX]
        for stage in range(N_STAGES):
            mine = [
                member.wait_ns
                for batch in proof.rebuilt.of_stage(stage)
                for member in batch.members
                if member.session == session.session
            ]
            assert (waits[stage], longest[stage]) == (sum(mine) / 1e9, max(mine) / 1e9)


def test_the_parts_of_a_decode_phase_are_its_time(proof: Proof) -> None:
    times = (names.ATTR_TIME_COMPUTE, names.ATTR_TIME_QUEUE, names.ATTR_TIME_HANDLE, names.ATTR_TIME_HOPS,
             names.ATTR_TIME_BACK, names.ATTR_TIME_COORDINATOR)  # fmt: skip
    for session in proof.rebuilt.sessions:
        span = session.decode_span
        parts = [span.attributes[name] for name in times]
        took_s = (span.end_ns - span.start_ns) / 1e9
        assert sum(parts) == pytest.approx(took_s, abs=0.05 * took_s), "the span ends with the session's end"
        # Passes at once each count their own part: a request with drafts may be in several, and then waits in all.
        n_at_once = _n_decode_passes(proof, session) if names.ATTR_DRAFTED in span.attributes else 1
        assert all(0 <= part <= n_at_once * took_s for part in parts[:-1]), parts
        hops = span.attributes[names.ATTR_STAGE_HOP]
        assert sum(hops) == pytest.approx(span.attributes[names.ATTR_TIME_HOPS])
        assert all(hop > 0 for hop in hops), hops


def _n_decode_passes(proof: Proof, session: Session) -> int:
    """Return in how many passes the request was after its prompt: no more of them can have been at once."""
    members = [member for batch in proof.rebuilt.of_stage(0) for member in batch.members]
    return sum(member.session == session.session and member.position >= session.n_prompt for member in members)


def test_spans_name_their_process(proof: Proof) -> None:
    if proof.store == "mlflow":
        pytest.skip("MLflow keeps one resource for each trace, whose spans come from several services, and no kinds")
    for batch in proof.rebuilt.batches.values():
        assert batch.span.service == f"relayline-stage-{batch.stage}"
        assert batch.span.kind == CONSUMER
    instances = {stage: {b.span.instance for b in proof.rebuilt.of_stage(stage)} for stage in range(N_STAGES)}
    assert all(len(found) == 1 for found in instances.values())
    assert len(set.union(*instances.values())) == N_STAGES
    assert {s.decode_span.service for s in proof.rebuilt.sessions} == {"relayline-coordinator"}


def test_no_span_says_anything_of_prompts_or_answers(proof: Proof) -> None:
    secrets = [prompt.strip() for prompt in PROMPTS if len(prompt) > 8]
    for span in proof.spans:
        exported = repr((span.name, span.attributes, [link.attributes for link in span.links], span.resource))
        assert not [secret for secret in secrets if secret in exported or repr(secret)[1:-1] in exported]
        assert names.GEN_AI_INPUT_MESSAGES not in span.attributes
        assert names.GEN_AI_OUTPUT_MESSAGES not in span.attributes
