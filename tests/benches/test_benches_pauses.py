"""The bench of losses: the definition of a pause, and its count of tokens read again."""

from __future__ import annotations

import pytest

from benches.pauses import loss_of, pause_s
from relayline.deploy.cli.load import Request

S = 1_000_000_000


def request_of(prompt_index: int, n_tokens: int, *token_s: float) -> Request:
    tokens_ns = [round(at * S) for at in token_s]
    return Request(prompt_index, n_tokens, 0, list(range(len(tokens_ns))), tokens_ns)


def test_a_pause_is_the_longest_gap_that_ends_after_the_kill() -> None:
    request = request_of(0, 5, 1, 9, 10, 14, 15)
    assert pause_s(request, 11 * S) == pytest.approx(4)
    assert pause_s(request, 14 * S) == pytest.approx(1)
    assert pause_s(request, 2 * S) == pytest.approx(8), "the gap in which the kill fell counts"
    assert pause_s(request, 15 * S) == 0


def test_a_loss_counts_unfinished_streams_and_their_tokens() -> None:
    prompts = [(1,) * 10, (2,) * 20, (3,) * 30]
    requests = [request_of(0, 2, 1, 2), request_of(1, 4, 1, 2, 8, 9), request_of(2, 3, 1, 2, 12)]
    loss = loss_of("auto", requests, prompts, 3 * S, 7 * S)
    assert (loss.n_streams, loss.n_paused, loss.n_read) == (3, 2, 20 + 2 + 30 + 2)
    assert loss.pauses_s == pytest.approx((6, 10))
    assert loss_of("auto", requests, prompts, 3 * S, 7 * S, n_rows=11 + 23 + 32 + 5).n_read == 5, "as a stage says"
    assert (loss.ready_s, loss.done_s) == pytest.approx((4, 9))
