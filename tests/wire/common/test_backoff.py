"""Delays between attempts: they double up to their bound, and begin anew after one that got somewhere."""

from relayline.wire.common.backoff import Backoff


def test_delays_double_up_to_the_bound():
    backoff = Backoff(0.2, 1.0)
    assert [backoff.next_s() for _ in range(5)] == [0.2, 0.4, 0.8, 1.0, 1.0]
    backoff.reset()
    assert backoff.next_s() == 0.2


def test_delays_of_many_lie_apart_and_double_all_the_same():
    backoff = Backoff(0.2, 1.0)
    for full_s in (0.2, 0.4, 0.8, 1.0, 1.0):
        assert full_s / 2 <= backoff.apart_s() <= full_s
