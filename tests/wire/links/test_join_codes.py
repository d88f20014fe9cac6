"""The short code of a join line: how it is written, and the exchange by which both ends prove that they know it."""

from __future__ import annotations

import base64

import pytest

from relayline.wire.common.errors import ProtocolError, UnauthenticatedError, UsageError
from relayline.wire.links.code_exchange import CoordinatorEnd, HostEnd, Invitation, decoded, encoded
from relayline.wire.links.join_code import SLOT_FIRST, SLOT_LAST, JoinCode, code_line, is_code_like, new_code, read_code

CODE = JoinCode(482, "177309")
LINE = Invitation("lan", "10.0.0.1:50049", "old.token", is_relayed=True)


def test_a_code_is_read_as_people_write_it() -> None:
    for text in ("482-177-309", "482177309", " 482 177 309 ", "482-177309"):
        assert is_code_like(text)
        assert read_code(text) == CODE
    assert str(CODE) == "482-177-309"
    assert "177309" not in repr(CODE), "a secret is not for logs"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("482-177-30", "'482-177-30' has 8 digits; a join code has nine"),
        ("4821-73-091", "nine digits in three groups"),
        ("4821-773-0912", "has 11 digits"),
        ("000-000-000", "'000-000-000' begins with 0; the first digit of a join code is 1 to 9"),
        ("082177309", "begins with 0"),
        ("482--177-309", "three groups"),
        ("482-177-309-", "three groups"),
    ],
)
def test_a_code_with_other_digits_is_refused_in_one_line(text: str, problem: str) -> None:
    assert is_code_like(text), "it can be nothing else"
    with pytest.raises(UsageError, match=f"{problem}.*, such as 482-177-309; copy it again") as caught:
        read_code(text)
    assert "\n" not in caught.value.message


@pytest.mark.parametrize("text", ["10.0.0.1", "10.0.0.1:50049", "desk", "[::1]", "old.AAAA", "", "4a8-177-309"])
def test_hosts_and_tokens_are_not_taken_for_codes(text: str) -> None:
    assert not is_code_like(text)


def test_new_codes_leave_taken_slots() -> None:
    taken = set(range(SLOT_FIRST, SLOT_LAST + 1)) - {700}
    assert {new_code(taken).slot for _ in range(5)} == {700}
    found = [new_code() for _ in range(50)]
    assert all(read_code(str(code)) == code for code in found)
    assert len({code.secret for code in found}) > 40


def test_a_code_is_shown_with_the_host_where_nothing_announces_it() -> None:
    assert code_line(CODE, "10.0.0.1:50049", is_announced=True) == "relayline join 482-177-309"
    assert code_line(CODE, "10.0.0.1:50049", is_announced=False) == "relayline join 10.0.0.1 482-177-309"
    assert code_line(CODE, "127.0.0.1:50049", is_announced=True) == "relayline join 127.0.0.1 482-177-309"
    assert code_line(CODE, "10.0.0.1:50149", is_announced=False) == "relayline join 10.0.0.1:50149 482-177-309"


# --- the exchange ---------------------------------------------------------------------------------------------------


def test_both_ends_with_the_code_pass_the_line() -> None:
    host = HostEnd(CODE)
    coordinator = CoordinatorEnd(CODE, host.message)
    assert coordinator.is_right(host.proof(coordinator.message))
    sealed = coordinator.seal(LINE)
    assert host.open(sealed) == LINE
    assert b"old.token" not in decoded(sealed)


def test_a_host_that_guesses_is_found_out_before_it_gets_anything() -> None:
    host = HostEnd(JoinCode(482, "177308"))
    coordinator = CoordinatorEnd(CODE, host.message)
    assert not coordinator.is_right(host.proof(coordinator.message))
    with pytest.raises(UnauthenticatedError):
        host.open(coordinator.seal(LINE))


def test_a_man_in_the_middle_who_passes_everything_on_reads_nothing() -> None:
    """He has every message of an exchange that succeeds, and the code's slot; he guesses the code afterwards."""
    host = HostEnd(CODE)
    coordinator = CoordinatorEnd(CODE, host.message)
    assert coordinator.is_right(host.proof(coordinator.message))
    sealed = coordinator.seal(LINE)
    for guess in (CODE, JoinCode(482, "000000")):  # even the right code does not help without the ends' own numbers
        spy = HostEnd(guess)
        spy.proof(coordinator.message)
        with pytest.raises(UnauthenticatedError):
            spy.open(sealed)


def test_a_man_in_the_middle_who_takes_both_parts_has_one_guess_at_each_end() -> None:
    guess = JoinCode(482, "000000")
    host = HostEnd(CODE)
    as_coordinator = CoordinatorEnd(guess, host.message)
    proof = host.proof(as_coordinator.message)
    assert not as_coordinator.is_right(proof), "so he learns that this one guess was wrong"
    as_host = HostEnd(guess)
    coordinator = CoordinatorEnd(CODE, as_host.message)
    assert not coordinator.is_right(as_host.proof(coordinator.message))
    assert not coordinator.is_right(proof), "nor can he use the host's own proof"
    with pytest.raises(UnauthenticatedError, match="does not know the code"):
        host.open(as_coordinator.seal(LINE))


def test_an_altered_answer_is_not_taken() -> None:
    host = HostEnd(CODE)
    coordinator = CoordinatorEnd(CODE, host.message)
    host.proof(coordinator.message)
    raw = bytearray(decoded(coordinator.seal(LINE)))
    raw[-1] ^= 1
    with pytest.raises(UnauthenticatedError):
        host.open(encoded(bytes(raw)))
    with pytest.raises(UnauthenticatedError):
        host.open("")


@pytest.mark.parametrize(
    "message",
    ["", "AAAA", "not base64", encoded(b"A" * 33), encoded(b"A" + bytes(32)), encoded(b"A" + b"\xff" * 32),
     encoded(b"A\x01" + bytes(31)), encoded(b"B" + bytes(32)), encoded(b"A" * 1000), "\u20ac"],
)  # fmt: skip
def test_what_is_no_message_is_refused(message: str) -> None:
    with pytest.raises(ProtocolError) as caught:
        CoordinatorEnd(CODE, message)
    assert "\n" not in caught.value.message


def test_a_message_sent_back_is_refused() -> None:
    host = HostEnd(CODE)
    own = b"B" + base64.b64decode(host.message)[1:]
    with pytest.raises(ProtocolError):
        host.proof(encoded(own))
    with pytest.raises(ProtocolError):
        HostEnd(CODE).proof(host.message)
