"""What a pipeline tells the local network: never on loopback, never long; and whatever comes from others is tamed."""

from __future__ import annotations

import pytest

from relayline.wire.common import bounds
from relayline.wire.links.announcement import SERVICE_TYPE, Announcement, announced_addresses, read_announcement

HERE = Announcement("llama70b", "llama-70b-q4_k_m", "0.1.0", 4, 2, 50_049, ("10.0.0.1",))


@pytest.mark.parametrize(
    ("listens", "host", "machine", "found"),
    [
        ("127.0.0.1", ["10.0.0.1"], ["10.0.0.1"], ()),
        ("localhost", ["10.0.0.1"], ["10.0.0.1"], ()),
        ("::1", ["10.0.0.1"], ["10.0.0.1"], ()),
        ("0.0.0.0", ["10.0.0.1"], ["10.0.0.1", "172.17.0.1"], ("10.0.0.1",)),
        ("0.0.0.0", ["127.0.1.1"], ["127.0.0.1", "10.0.0.1", "192.168.1.5"], ("10.0.0.1", "192.168.1.5")),
        ("0.0.0.0", [], ["127.0.0.1"], ()),
        ("::", ["10.0.0.1", "fe80::1"], [], ("10.0.0.1",)),
        ("10.0.0.7", [], ["10.0.0.1"], ("10.0.0.7",)),
        ("desk.test", [], ["10.0.0.1"], ()),
    ],
)
def test_only_addresses_that_other_hosts_reach_are_announced(
    listens: str, host: list[str], machine: list[str], found: tuple[str, ...]
) -> None:
    assert announced_addresses(listens, host, machine) == found


def as_bytes(properties: dict[str, str]) -> dict[bytes, bytes | None]:
    return {key.encode(): value.encode() for key, value in properties.items()}


def test_what_was_announced_is_what_is_read() -> None:
    assert read_announcement(as_bytes(HERE.properties), HERE.port, HERE.addresses) == HERE
    assert HERE.state == "waits for 2 of 4 stages"
    assert HERE.instance("4f2a09c1") == f"llama70b-4f2a09c1.{SERVICE_TYPE}"
    long = Announcement("p" * 300, "ä" * 300, "1", 1, 0, 1, ("10.0.0.1",))
    assert all(len(value.encode()) <= bounds.NEARBY_TEXT_BYTES_MAX for value in long.properties.values())
    assert len(long.instance("4f2a09c1").split(".", maxsplit=1)[0]) == 63
    assert Announcement("a.b c", "", "", 1, 0, 1, ()).instance("4f2a") == f"a-b-c-4f2a.{SERVICE_TYPE}", (
        "a dot ends a label"
    )
    assert long.state == "all stages are there"


def test_what_others_announce_is_tamed() -> None:
    evil = {b"pipeline": b"\x1b[31mred\n\xff", b"model": None, b"stages": b"-1", b"awaited": "²".encode()}
    found = read_announcement(evil, 50_049, ["10.0.0.1"])
    assert found is not None
    assert "\x1b" not in found.pipeline
    assert "\n" not in found.pipeline
    assert (found.model, found.n_stages, found.n_awaited) == ("", 0, 0)
    many = read_announcement({b"pipeline": b"x" * 255, b"stages": b"9" * 200}, 1, ["10.0.0.1"])
    assert many is not None
    assert len(many.pipeline) <= bounds.NEARBY_TEXT_BYTES_MAX
    assert many.n_stages == 9_999
    everywhere = [f"10.0.0.{number}" for number in range(200)]
    found = read_announcement({b"pipeline": b"x"}, 1, everywhere)
    assert found is not None
    assert found.addresses == announced_addresses("0.0.0.0", [], everywhere) == (*everywhere[:4],)
    assert read_announcement({}, 50_049, ["10.0.0.1"]) is None
    assert read_announcement({b"pipeline": b"x"}, 0, ["10.0.0.1"]) is None
    assert read_announcement({b"pipeline": b"x"}, 1, []) is None
