"""Pipelines on the local network: found while they serve, with what holds; no fault of the network stops anything."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import logging
import os
import socket
import struct
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from relayline.coordinator.engine.membership import Membership
from relayline.coordinator.engine.roster import JoinedRoster
from relayline.coordinator.joining import announcing
from relayline.coordinator.joining.announcing import Announcer, announced
from relayline.coordinator.joining.config import EnrolConfig
from relayline.deploy.cli import join, nearby
from relayline.stage.joining import nearby as looking
from relayline.stage.joining.nearby import pipelines_nearby
from relayline.wire.common.errors import StartError, UsageError
from relayline.wire.links.announcement import Announcement
from relayline.wire.links.roles import Identity, Role
from relayline.wire.links.security import LinkSecurity
from tests.support.polling import pause

LOOPBACK = ("127.0.0.1",)
MINE = f"lan-{os.getpid()}"  # other runs of these tests share loopback
LAN = Announcement(MINE, "llama-70b", "0.1.0", 4, 2, 50_049, LOOPBACK)


@functools.cache
def no_multicast() -> str:
    """Why loopback carries no multicast here; empty if it does."""
    group, port = "224.0.0.251", 0
    with (
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as heard,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as said,
    ):
        try:
            heard.bind(("", port))
            membership = struct.pack("4s4s", socket.inet_aton(group), socket.inet_aton("127.0.0.1"))
            heard.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, membership)
            said.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, socket.inet_aton("127.0.0.1"))
            said.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_LOOP, 1)
            heard.settimeout(2)
            said.sendto(b"x", (group, heard.getsockname()[1]))
            heard.recv(8)
        except OSError as error:
            return f"loopback carries no multicast here ({error})"
    return ""


needs_multicast = pytest.mark.skipif(bool(no_multicast()), reason=no_multicast() or "it does")


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await pause()


async def hears(*expected: tuple[str, int]) -> None:
    """Listen until this is announced: addresses, and how many stages are awaited. A busy machine answers late."""
    async with asyncio.timeout(90):
        while True:
            found = await asyncio.to_thread(pipelines_nearby, 2.0, LOOPBACK)
            mine = [each for each in found if each.pipeline == MINE]
            if sorted((" ".join(each.addresses), each.n_awaited) for each in mine) == [*expected]:
                return


@needs_multicast
async def test_pipelines_are_heard_of_while_they_last() -> None:
    now = [LAN, dataclasses.replace(LAN, addresses=("127.0.0.2",))]  # of one name: both are found, each where it is
    announcers = [Announcer(lambda: now[0], LOOPBACK), Announcer(lambda: now[1], LOOPBACK)]
    try:
        for announcer in announcers:
            announcer.begin()
        await hears(("127.0.0.1", 2), ("127.0.0.2", 2))
        now[0] = dataclasses.replace(LAN, n_awaited=0)
        announcers[0].changed()
        await hears(("127.0.0.1", 0), ("127.0.0.2", 2))
        await announcers[0].close()
        await hears(("127.0.0.2", 2))
    finally:
        for announcer in announcers:
            await announcer.close()
    await hears()


def test_two_that_begin_at_once_share_no_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither has heard of the other. Addresses belong to the server's name."""
    import zeroconf

    class Network:
        def __init__(self, **options: object) -> None: ...

        def register_service(self, service: zeroconf.ServiceInfo, **options: object) -> None: ...

    monkeypatch.setattr(zeroconf, "Zeroconf", Network)
    services = [announcing._begin(LAN, LOOPBACK)[1] for _ in range(2)]
    assert len({service.name for service in services}) == 2
    assert len({service.server for service in services}) == 2
    assert all(service.name.startswith(f"{MINE}-") for service in services)


def test_names_that_say_no_more_are_waited_for_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    import zeroconf

    all_asked = threading.Barrier(3, timeout=60)

    class Network:
        def __init__(self, **options: object) -> None: ...

        def get_service_info(self, *which: object) -> None:
            all_asked.wait()

        def close(self) -> None: ...

    def browse(network: Network, kind: str, listener: looking._Listener) -> None:
        for name in ("a", "b", "c"):
            listener.add_service(network, kind, name)  # type: ignore[arg-type]

    monkeypatch.setattr(zeroconf, "Zeroconf", Network)
    monkeypatch.setattr(zeroconf, "ServiceBrowser", browse)
    assert pipelines_nearby(0.0) == []
    assert not all_asked.broken


async def test_a_network_that_refuses_is_one_line_in_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*arguments: object) -> None:
        raise OSError(19, "No such device")

    monkeypatch.setattr(announcing, "_begin", refuse)
    announcer = Announcer(lambda: LAN)
    announcer.begin()
    await until(lambda: bool(caplog.records))
    await announcer.close()
    [record] = caplog.records
    assert (record.levelno, record.exc_info) == (logging.WARNING, None)
    assert "not announced on the local network: [Errno 19] No such device; hosts join with" in record.getMessage()


async def test_without_the_package_a_pipeline_serves_as_before(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "zeroconf", None)
    announcer = Announcer(lambda: LAN)
    announcer.begin()
    await until(lambda: bool(caplog.records))
    await announcer.close()
    assert "zeroconf" in caplog.text
    with pytest.raises(StartError, match="takes the package zeroconf"):
        pipelines_nearby(0.1)


@dataclasses.dataclass(frozen=True)
class Links(LinkSecurity):
    """Of a coordinator on that host."""

    named: str = "10.0.0.1"

    @property
    def identity(self) -> Identity | None:
        return Identity(Role.COORDINATOR, self.named)


@pytest.mark.parametrize(
    ("host", "listens", "is_on", "is_said"),
    [
        ("10.0.0.1", "0.0.0.0:50049", True, True),
        ("10.0.0.1", "0.0.0.0:50049", False, False),
        ("10.0.0.1", "127.0.0.1:50049", True, False),
        ("localhost", "0.0.0.0:50049", True, False),
    ],
)
async def test_what_nobody_else_reaches_is_not_announced(
    monkeypatch: pytest.MonkeyPatch, host: str, listens: str, is_on: bool, is_said: bool
) -> None:
    said: list[Announcement] = []

    def begin(self: Announcer) -> None:
        said.append(self._current())

    monkeypatch.setattr(Announcer, "begin", begin)
    roster = JoinedRoster(Membership(["a", "b"], "1", 0))
    config = EnrolConfig(None, "0.0.0.0", 0, pipeline="lan", model="m", announce=is_on)  # type: ignore[arg-type]
    before = roster.on_change
    async with announced(config, Links(named=host), roster, listens):
        assert (roster.on_change is before) is not is_said
    assert roster.on_change is before
    assert [(each.pipeline, each.n_stages, each.n_awaited, each.addresses) for each in said] == (
        [("lan", 2, 2, ("10.0.0.1",))] if is_said else []
    )


# --- the commands ---------------------------------------------------------------------------------------------------


def found_by(monkeypatch: pytest.MonkeyPatch, *found: Announcement) -> None:
    monkeypatch.setattr(looking, "pipelines_nearby", lambda *arguments: list(found))


def test_nearby_shows_a_table_and_says_why_nothing_may_be_there(monkeypatch: pytest.MonkeyPatch) -> None:
    big = dataclasses.replace(LAN, pipeline="llama70b")
    found_by(monkeypatch, big, dataclasses.replace(LAN, pipeline="q", model="", n_awaited=0, addresses=("10.0.0.2",)))
    result = CliRunner().invoke(nearby.nearby_command, [])
    assert result.output == (
        "pipeline  model      address          state\n"
        "llama70b  llama-70b  127.0.0.1:50049  waits for 2 of 4 stages\n"
        "q         -          10.0.0.2:50049   all stages are there\n"
    )
    found_by(monkeypatch)
    result = CliRunner().invoke(nearby.nearby_command, [])
    assert result.exit_code == 1
    for reason in ("another subnet", "multicast (UDP 5353) may be blocked", "loopback alone", "`coordinator.announce`"):
        assert reason in result.output
    result = CliRunner().invoke(nearby.nearby_command, ["--json"])
    assert (result.exit_code, result.output) == (1, "[]\n")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["482-177"], "'482-177' has 6 digits; a join code has nine"),
        (["482-177-309", "10.0.0.1"], "give the host before the code"),
        (["10.0.0.1", "482-177"], "'482-177' has 6 digits; a join code has nine"),
    ],
)
def test_a_code_in_a_wrong_place_is_said_in_one_line(arguments: list[str], words: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        CliRunner().invoke(join.join_command, [*arguments, "--state", str(tmp_path)], catch_exceptions=False)
    assert words in caught.value.message
    assert "\n" not in caught.value.message


def test_a_code_without_a_pipeline_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found_by(monkeypatch)
    with pytest.raises(
        StartError, match=r"no pipeline announces itself .*; give its address: relayline join HOST CODE"
    ):
        CliRunner().invoke(join.join_command, ["482-177-309", "--state", str(tmp_path)], catch_exceptions=False)


def test_the_line_of_a_relayed_stage_is_relayed_by_its_code_too(monkeypatch: pytest.MonkeyPatch) -> None:
    from relayline.stage.joining import by_code
    from relayline.wire.links.code_exchange import Invitation
    from relayline.wire.links.enrolment import new_token
    from relayline.wire.links.join_code import JoinCode

    token = str(new_token("old", b"a CA"))
    asked = []

    def invited(code: JoinCode, at: by_code.Coordinator) -> Invitation:
        asked.append(at.address)
        return Invitation("lan", "10.0.0.1:50049", token, is_relayed=True)

    monkeypatch.setattr(by_code, "invited", invited)
    given = {"address": ("10.0.0.9", 7), "token": "482-177-309", "is_relayed": None, "listen": None, "advertise": ""}
    code = join._code(given)
    assert code is not None
    join._put_line(given, code)
    assert asked == ["10.0.0.9:7"]
    assert (given["address"], given["token"], given["is_relayed"]) == (("10.0.0.9", 7), token, True), "as a user said"
    monkeypatch.setattr(by_code, "holder_of", lambda code, found: by_code.Coordinator("10.0.0.5", 50_049))
    found_by(monkeypatch, LAN)
    given |= {"address": code, "token": None, "is_relayed": False}
    join._put_line(given, code)
    assert (given["address"], given["is_relayed"]) == (("10.0.0.1", 50_049), False), "as the pipeline says itself"


def test_commands_that_need_neither_library_load_neither() -> None:
    import subprocess

    script = (
        "import sys, relayline.deploy.cli.join, relayline.deploy.cli.nearby, relayline.deploy.cli.invite\n"
        "import relayline.coordinator.joining.port, relayline.coordinator.joining.announcing\n"
        "print([name for name in ('zeroconf', 'spake2', 'ifaddr') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
