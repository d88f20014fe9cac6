"""Prompts with image rows: chunks that end at image borders, frames that carry the rows, envelopes of one kind."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from relayline.coordinator.engine.descriptions import check_stages, merge
from relayline.coordinator.engine.epoch_facts import EpochFacts
from relayline.coordinator.engine.token_sender import within_bounds, write_tokens
from relayline.coordinator.media.encoded import row_numbers
from relayline.coordinator.schedule.prompt_line import PromptLine
from relayline.coordinator.sessions.abilities import image_refusal
from relayline.coordinator.sessions.drafts import Acceptance
from relayline.coordinator.sessions.generation import GenerationRequest, ImageRows, SamplingParams
from relayline.coordinator.sessions.readers import sharing_key
from relayline.coordinator.sessions.request_log import UNKNOWN
from relayline.coordinator.sessions.session import Session
from relayline.wire.common.errors import HandshakeError
from relayline.wire.envelopes.buffers import BufferPool
from relayline.wire.envelopes.dtypes import DTYPE_F32, DTYPE_TOKENS
from relayline.wire.envelopes.envelope import parse
from relayline.wire.envelopes.frames import Flag, grid_of
from relayline.wire.pb.relayline.v1 import relayline_pb2 as pb
from tests.support.fakes import WIDTH, new_facts, pipeline_file
from tests.support.sessions import chunks_of

ROWS = np.arange(5 * WIDTH, dtype=np.float32).reshape(5, WIDTH)
NUMBERS = row_numbers(b"image", 5)


def request(sampling: SamplingParams | None = None) -> GenerationRequest:
    """Two tokens, five rows in two images that touch, one token."""
    images = (ImageRows(2, ROWS[:3]), ImageRows(5, ROWS[3:]))
    return GenerationRequest("r", (1, 2, *NUMBERS, 3), 8, sampling or SamplingParams(), images=images)


def mutual() -> GenerationRequest:
    """The same, with rows that attend to those of their image."""
    return dataclasses.replace(
        request(), images=tuple(dataclasses.replace(each, are_mutual=True) for each in request().images)
    )


def in_grids() -> GenerationRequest:
    """The same, with rows that have places on several axes."""
    grids = ((3, 1), (1, 2))
    images = (dataclasses.replace(each, grid=grid) for each, grid in zip(request().images, grids, strict=True))
    return dataclasses.replace(request(), images=tuple(images))


def session(number: int = 1, sampling: SamplingParams | None = None) -> Session:
    return Session(number, request(sampling), lambda _: False)


@pytest.mark.parametrize(("rows_max", "sizes"), [(64, [2, 3, 2, 1]), (2, [2, 2, 1, 2, 1])])
def test_chunks_end_at_the_borders_of_images_again_after_a_loss(rows_max: int, sizes: list[int]) -> None:
    one = session()
    for _ in range(2):  # the second time as a replay
        one.start()
        frames = [chunk.leave() for chunk in chunks_of(one, rows_max)]
        assert [len(frame.tokens) for frame in frames] == sizes
        given = [frame.rows for frame in frames if frame.rows is not None]
        assert np.array_equal(np.concatenate(given), ROWS)
        assert all((frame.rows is None) == (frame.tokens[0] < 100) for frame in frames)


@pytest.mark.parametrize("rows_max", [1, 2, 64])
def test_rows_that_see_each_other_leave_together_again_after_a_loss(rows_max: int) -> None:
    one = Session(1, mutual(), lambda _: False)
    for _ in range(2):
        one.start()
        one.stops = [1, 4, 5]  # where checkpoints are asked for: none is inside an image
        frames = [chunk.leave() for chunk in chunks_of(one, rows_max)]
        seen = [(frame.position, len(frame.tokens)) for frame in frames if frame.flags & Flag.MUTUAL]
        assert seen == [(2, 3), (5, 2)]
        assert sum(len(frame.tokens) for frame in frames) == 8
        assert [frame.position + len(frame.tokens) for frame in frames if frame.flags & Flag.CHECKPOINT] == [1, 5]


def test_rows_in_a_grid_say_their_places_again_after_a_loss() -> None:
    one = Session(1, in_grids(), lambda _: False)
    for n_kept, begin in ((0, 0), (4, 2)):  # stages come back to no row inside an image
        one.start(n_kept)
        one.stops = [3, 5, 6]  # nor do they keep a checkpoint there
        frames = [chunk.leave() for chunk in chunks_of(one, 2)]
        assert frames[0].position == begin
        places = [(frame.position, *grid_of(frame.argument)) for frame in frames if frame.flags & Flag.GRID]
        assert places == [(2, 0, 3, 1), (4, 2, 3, 1), (5, 0, 1, 2)]
        assert [frame.position + len(frame.tokens) for frame in frames if frame.flags & Flag.CHECKPOINT] == [5]
    assert image_refusal(in_grids(), 0, takes_grids=True) is None
    refused = image_refusal(in_grids(), 64, takes_grids=False)
    assert refused is not None
    assert "older relayline" in str(refused)


def test_a_prefix_ends_before_an_image_that_is_in_a_grid() -> None:
    assert [in_grids().whole_until(n) for n in range(9)] == [0, 1, 2, 2, 2, 5, 5, 7, 8]
    assert [request().whole_until(n) for n in range(9)] == [*range(9)]


def test_the_rest_of_them_leaves_alone_behind_a_copy() -> None:
    one, other = (Session(number, mutual(), lambda _: False) for number in (1, 2))
    other.start()
    other.continue_from(one, 3)
    chunk = other.next_chunk(1)
    assert chunk is not None
    assert (chunk.position, len(chunk.tokens), chunk.flags) == (3, 2, Flag.PREFILL | Flag.MUTUAL)


def test_a_flight_ends_behind_them() -> None:
    line = PromptLine()
    for number in (1, 2):
        one = Session(number, mutual(), lambda _: False)
        one.start()
        one.next_chunk(2)
        line.add(one, 0)
    sizes = [[len(chunk.tokens) for chunk in line.next_chunks(2)] for _ in range(4)]
    assert all(len(each) == 1 for each in sizes[:2])
    assert sizes[0] == [3]


def test_stages_that_cannot_read_them_in_one_step_are_named() -> None:
    assert image_refusal(mutual(), 3, takes_grids=False) is None
    assert image_refusal(request(), 0, takes_grids=False) is None
    small, old = (image_refusal(mutual(), rows, takes_grids=True) for rows in (2, 0))
    assert small is not None
    assert old is not None
    assert "3 rows of an image are one native step, and a stage takes 2; start the stages with --max-rows 3" in str(
        small
    )
    assert "older relayline" in str(old)


def test_every_stage_has_to_know_them() -> None:
    facts = [pb.DescribeResponse(max_rows=rows, takes_mutual_rows=True) for rows in (64, 48)]
    assert facts_of_all(facts).mutual_rows_max == 48
    facts.append(pb.DescribeResponse(max_rows=64))
    assert facts_of_all(facts).mutual_rows_max == 0
    assert not facts_of_all(facts).takes_grids
    assert facts_of_all([pb.DescribeResponse(takes_grids=True)]).takes_grids
    stage = new_facts(0, 1)
    assert stage.describe().takes_mutual_rows
    assert not dataclasses.replace(stage, takes_mutual_rows=False).describe().takes_mutual_rows


def facts_of_all(facts: list[pb.DescribeResponse]) -> EpochFacts:
    return merge(facts, {}, [], pb.DTYPE_F16)


def test_one_that_goes_on_inside_an_image_sends_the_rest_of_it() -> None:
    one, other = session(1), session(2)
    other.start()
    other.continue_from(one, 4)
    first = other.next_chunk(64)
    assert first is not None
    rows = first.leave().rows
    assert rows is not None
    assert np.array_equal(rows, ROWS[2:3])


def test_an_envelope_holds_tokens_or_rows() -> None:
    sessions = [session(number) for number in (1, 2)]
    frames = [frame.leave() for each in sessions for frame in each.start()]
    chunks = [chunks_of(each, 64) for each in sessions]
    for pair in zip(*chunks, strict=True):
        frames += [chunk.leave() for chunk in pair]
    envelopes = within_bounds(frames)
    kinds = [[frame.rows is not None for frame in envelope] for envelope in envelopes]
    assert kinds == [[False] * 4, [True] * 4, [False] * 2]
    pools = [BufferPool(DTYPE_TOKENS, 1), BufferPool(DTYPE_F32, WIDTH)]
    for sequence, envelope in enumerate(envelopes, 1):
        n_rows = sum(len(frame.tokens) for frame in envelope)
        buffer = pools[envelope[0].rows is not None].lease(len(envelope), n_rows)
        view = parse(write_tokens(buffer, envelope, 1, sequence, bytes(25), lambda _: UNKNOWN, 0))
        if envelope[0].rows is None:
            assert view.payload[:, 0].tolist() == [token for frame in envelope for token in frame.tokens]
        else:
            assert np.array_equal(view.payload, np.concatenate([ROWS[:3], ROWS[:3], ROWS[3:], ROWS[3:]]))


def test_no_row_is_penalised_or_guessed() -> None:
    one = session(sampling=SamplingParams(numbers=(("repetition_penalty", 1.5),)))
    assert one.opening().read == (1, 2, 3)
    one.acceptance = Acceptance()
    one.start()
    chunks_of(one, 64)
    one.sampled(8, 1)
    one.sampled(9, 2)  # like the beginning, which the image follows
    assert one.chances(4) == []


def test_equal_images_make_equal_requests_and_rows_are_not_compared() -> None:
    assert sharing_key(request()) == sharing_key(request())
    assert hash(sharing_key(request())) == hash(sharing_key(request()))


def test_a_stage_that_takes_no_rows_is_refused_where_some_will_come() -> None:
    facts = [pb.DescribeResponse(pipeline_id="fake", stage_index=0, n_embd=WIDTH)]
    check_stages(["a:1"], facts, pipeline_file(1))
    with pytest.raises(HandshakeError, match=r"^a:1 cannot take image rows.*--mmproj"):
        check_stages(["a:1"], facts, pipeline_file(1), wants_rows=True)
    facts[0].takes_rows = True
    check_stages(["a:1"], facts, pipeline_file(1), wants_rows=True)
