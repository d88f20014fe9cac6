"""Short codes: which are open, what wrong tries do, and how many exchanges may begin. Time is an argument."""

from __future__ import annotations

import dataclasses
import datetime

import pytest

from relayline.coordinator.joining.codes import CodedInvitation, Exchanges, WrongTries, checked, wrong
from relayline.wire.common import bounds
from relayline.wire.common.errors import OverloadedError, UnauthenticatedError
from relayline.wire.links.join_code import JoinCode

NOW = datetime.datetime(2026, 11, 28, 19, 0, tzinfo=datetime.UTC)
OPEN = CodedInvitation(JoinCode(482, "177309"), "old", "old.token", NOW + datetime.timedelta(minutes=30))
S = 1_000_000_000


def refusal(found: CodedInvitation | None, now: datetime.datetime = NOW) -> str:
    with pytest.raises(UnauthenticatedError) as caught:
        checked(found, 482, now)
    assert "\n" not in caught.value.message
    assert "177" not in caught.value.message, "the secret digits are nobody's business"
    return caught.value.message


def test_a_code_is_open_until_it_expires_is_used_or_was_tried_too_often() -> None:
    assert checked(OPEN, 482, NOW) is OPEN
    assert checked(OPEN, 482, OPEN.expires) is OPEN
    assert "expired at 19:30 UTC; `relayline invite old`" in refusal(OPEN, OPEN.expires + datetime.timedelta(seconds=1))
    used = dataclasses.replace(OPEN, is_used=True)
    assert "was used: stage old has joined;" in refusal(used)
    assert "was used: stage old has joined at box:50049;" in used.problem(NOW, "box:50049")
    assert "is void after 5 wrong tries" in refusal(dataclasses.replace(OPEN, n_wrong=bounds.JOIN_CODE_WRONG_MAX))
    assert "no code here begins with 482" in refusal(None)


def test_each_wrong_try_says_how_many_are_left() -> None:
    said = [wrong(dataclasses.replace(OPEN, n_wrong=tries)).message for tries in (1, 4, 5)]
    assert "4 more tries are allowed" in said[0]
    assert "1 more try is allowed" in said[1]
    assert "void now" in said[2]
    assert all("`relayline invite old`" in text for text in said)


def test_wrong_tries_count_before_they_are_written_down() -> None:
    tries = WrongTries()
    assert tries.known(OPEN) is OPEN
    assert [tries.count(tries.known(OPEN)).n_wrong for _ in range(3)] == [1, 2, 3]
    assert tries.known(OPEN).n_wrong == 3, "the file has none of them yet"
    assert tries.known(dataclasses.replace(OPEN, n_wrong=4)).n_wrong == 4, "a restart may have known more"
    newer = dataclasses.replace(OPEN, code=JoinCode(482, "000111"))
    assert tries.known(newer) is newer, "another code that begins alike has tries of its own"
    assert tries.known(dataclasses.replace(OPEN, code=JoinCode(483, "177309"))).n_wrong == 0


def test_a_try_that_cannot_be_written_down_makes_the_code_void() -> None:
    tries = WrongTries()
    tries.make_void(tries.count(OPEN))
    assert "is void: a wrong try could not be written down" in refusal(tries.known(OPEN))
    assert tries.known(OPEN).n_wrong == 1


def test_an_exchange_is_good_for_one_proof_and_some_seconds() -> None:
    exchanges: Exchanges[str] = Exchanges()
    for began_ns in (0, 3600 * S):
        exchanges.begin("a", "first", began_ns)
        assert exchanges.end("a", began_ns + 30 * S) == "first"
        with pytest.raises(UnauthenticatedError, match="took too long"):
            exchanges.end("a", began_ns + 30 * S)
        exchanges.begin("b", "late", began_ns)
        with pytest.raises(UnauthenticatedError, match="took too long"):
            exchanges.end("b", began_ns + 31 * S)


def test_exchanges_are_bounded() -> None:
    exchanges: Exchanges[int] = Exchanges()
    for number in range(bounds.JOIN_CODE_EXCHANGES_MAX + 3):
        exchanges.begin(str(number), number, 0)
    with pytest.raises(UnauthenticatedError):
        exchanges.end("2", 0)
    assert exchanges.end("3", 0) == 3
    up_ns = 86_400 * S  # the machine has been up for a day
    for _ in range(bounds.JOIN_CODE_BEGUN_MAX):
        exchanges.check_rate(up_ns)
    for waited_s, wait_s in ((10, 50), (60, 1)):
        with pytest.raises(OverloadedError, match=f"wait {wait_s} s") as caught:
            exchanges.check_rate(up_ns + waited_s * S)
        assert caught.value.retry_after_s == wait_s
    exchanges.check_rate(up_ns + 61 * S)
