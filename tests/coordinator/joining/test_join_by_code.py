"""Joining by a code over TLS, both ends: a host gets the long line, and nobody else does."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import errno
import logging
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer
from click.testing import CliRunner

from relayline.coordinator.http.edge.server import start_http
from relayline.coordinator.joining.code_calls import CodeCalls
from relayline.coordinator.joining.codes import CodedInvitation
from relayline.coordinator.joining.config import EnrolConfig
from relayline.coordinator.joining.enrol import Enrolment, serve_enrolment
from relayline.deploy.cli.join import join_command
from relayline.deploy.launch import invitations
from relayline.deploy.launch.certificates import init_authority, issue
from relayline.deploy.launch.invitations import CODES_FILE, SigningAuthority, invite, open_invitation
from relayline.stage.joining import by_code
from relayline.stage.joining import enrol as client
from relayline.stage.joining.by_code import Coordinator, holder_of, invited
from relayline.stage.joining.enrol import decoded, enrol
from relayline.wire.common import bounds, logs
from relayline.wire.common.errors import (
    NotReadyError,
    ProtocolError,
    RelaylineError,
    StageLostError,
    UnauthenticatedError,
    UsageError,
    VersionError,
)
from relayline.wire.links import code_exchange, enrolment, join_code
from relayline.wire.links.code_exchange import CoordinatorEnd, HostEnd, Invitation
from relayline.wire.links.enrolment import digest_of, new_token, read_token
from relayline.wire.links.join_code import JoinCode
from relayline.wire.links.roles import Role
from relayline.wire.links.security import load_security
from relayline.wire.links.tls_server import server_context
from tests.support.polling import pause

NOW = datetime.datetime.now(datetime.UTC)


@pytest.fixture
def ca(tmp_path: Path) -> Path:
    init_authority(tmp_path / "ca", "small", NOW)
    issue(tmp_path / "ca", "127.0.0.1", (), 30, tmp_path / "ca" / "coordinator", NOW, role=Role.COORDINATOR)
    return tmp_path / "ca"


@pytest.fixture
async def at(ca: Path) -> AsyncIterator[Coordinator]:
    security = load_security(ca / "coordinator", environment={}, role=Role.COORDINATOR)
    config = EnrolConfig(SigningAuthority(ca), "127.0.0.1", 0, pipeline="lan")
    async with serve_enrolment(config, security, "0.0.0.0:7000") as address:
        yield Coordinator("127.0.0.1", int(address.rpartition(":")[2]))


def a_code(ca: Path, name: str = "old", now: datetime.datetime | None = None) -> JoinCode:
    return invite(ca, name, f"{name}.test", now).code


def other_than(code: JoinCode) -> JoinCode:
    return JoinCode(code.slot, f"{(int(code.secret) + 1) % 1_000_000:06}")


async def refusal(code: JoinCode, at: Coordinator) -> RelaylineError:
    with pytest.raises(RelaylineError) as caught:
        await asyncio.to_thread(invited, code, at)
    assert "\n" not in caught.value.message
    return caught.value


async def test_a_host_gets_the_long_line_and_joins_by_it(ca: Path, at: Coordinator, tmp_path: Path) -> None:
    line = invite(ca, "old", "old.test", is_relayed=True)
    code = line.code
    found = await asyncio.to_thread(invited, code, at)
    assert found == Invitation("lan", at.address, line.token, is_relayed=True)
    again = await asyncio.to_thread(invited, code, at)
    assert again == found, "an answer can get lost"
    joined = await asyncio.to_thread(enrol, at.host, at.port, read_token(found.token), tmp_path / "disk")
    assert joined.file.name == "old"
    assert "was used: stage old has joined" in (await refusal(code, at)).message
    assert (ca / CODES_FILE).stat().st_mode & 0o777 == 0o600


def enrolled(*arguments: str) -> str:
    """Run `relayline join` for the certificate alone; returns what it prints."""
    return CliRunner().invoke(join_command, [*arguments, "--enrol-only"], catch_exceptions=False).output


async def test_a_host_that_was_interrupted_goes_on_without_the_code(
    ca: Path, at: Coordinator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ended after the coordinator had bound the invitation, and before the certificate was kept."""
    line, state = invite(ca, "old", "old.test", is_relayed=True), ("--state", str(tmp_path / "disk"))
    short = (at.address, str(line.code), *state)

    def end(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(logs, "setup", lambda *arguments, **options: None)
    with monkeypatch.context() as host:
        host.setattr(client, "_store", end)
        with pytest.raises(KeyboardInterrupt):
            await asyncio.to_thread(_interrupted, at, line.token, tmp_path / "disk")
    with pytest.raises(
        UnauthenticatedError, match=f"joined at {at.address}; on its host `relayline join --name old` goes on"
    ):
        await asyncio.to_thread(enrolled, *short)
    [begun] = (tmp_path / "disk").rglob("pending-*.json")
    assert begun.stat().st_mode & 0o777 == 0o600
    with pytest.raises(UsageError, match="has not joined a pipeline yet"):
        await asyncio.to_thread(enrolled, "10.0.0.9", *state)
    assert await asyncio.to_thread(enrolled, *state) == f"this host can now join as old: relayline join {at.address}\n"
    [joined] = client.memberships(tmp_path / "disk")
    assert joined.file.is_relayed
    assert not list(joined.directory.glob("pending-*"))


def _interrupted(at: Coordinator, token: str, disk: Path) -> None:
    enrol(at.host, at.port, read_token(token), disk, is_relayed=True)


@contextlib.contextmanager
def ended_at(name: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A host that ends where it would call this function of `stage.joining.enrol`."""

    def end(*arguments: object, **options: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as host:
        host.setattr(client, name, end)
        with pytest.raises(KeyboardInterrupt):
            yield


@pytest.mark.parametrize("is_again", [False, True])
async def test_what_was_interrupted_goes_on_before_what_was_joined(
    ca: Path, at: Coordinator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_again: bool
) -> None:
    """A stage that is invited again, in the directory of its dead certificate; or a host of another pipeline."""
    disk = tmp_path / "disk"
    monkeypatch.setattr(logs, "setup", lambda *arguments, **options: None)
    first = read_token(invite(ca, "old" if is_again else "other", "old.test").token)
    before = await asyncio.to_thread(enrol, at.host, at.port, first, disk)
    for _ in range(2):  # of two lines for a stage, the first one is dead
        token = read_token(invite(ca, "old", "old.test").token)
        with ended_at("_store", monkeypatch):
            await asyncio.to_thread(enrol, at.host, at.port, token, disk)
    said = await asyncio.to_thread(enrolled, "--state", str(disk))
    assert said == f"this host can now join as old: relayline join {at.address}\n"
    now = {one.directory: one.file.token for one in client.memberships(disk)}
    assert digest_of(token.secret) in now.values()
    assert len(now) == (1 if is_again else 2)
    assert before.directory in now
    assert not client.unfinished(disk)


async def test_a_line_that_stands_before_no_membership_is_not_kept(
    ca: Path, at: Coordinator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kept is only a line that may have been used, and that the coordinator has not refused."""
    disk = tmp_path / "disk"
    token = read_token(invite(ca, "old", "old.test").token)
    with ended_at("_Client", monkeypatch):
        await asyncio.to_thread(enrol, at.host, at.port, token, disk)
    assert not client.unfinished(disk), "nobody has heard of it"
    invite(ca, "old", "old.test")
    with pytest.raises(UnauthenticatedError):
        await asyncio.to_thread(enrol, at.host, at.port, token, disk)
    assert not client.unfinished(disk), "it was replaced"


def test_a_certificate_that_has_come_is_not_asked_for_again(tmp_path: Path) -> None:
    """Here the host ended before it had cleared away the line."""
    token, directory = new_token("old", b"a CA"), tmp_path / "old-1"
    directory.mkdir()
    line = client.PendingFile("old", "10.0.0.1:50049", str(token))
    (directory / "pending-1.json").write_bytes(msgspec.json.encode(line))
    (directory / "pending-2.json").write_bytes(msgspec.json.encode(client.PendingFile("old", "10.0.0.1:50049", "x")))
    assert client.unfinished(tmp_path) == [line], "one that cannot be read is left out"
    for digest, lines in ((digest_of(token.secret), []), ("of an earlier line", [line])):
        file = client.JoinedFile("old", "10.0.0.1:50049", "10.0.0.1:50050", digest)
        (directory / client.JOINED_FILE).write_bytes(msgspec.json.encode(file))
        assert client.unfinished(tmp_path) == lines


async def test_wrong_tries_are_counted_over_restarts_and_make_the_code_void(ca: Path, at: Coordinator) -> None:
    code = a_code(ca)
    wrong = other_than(code)
    for left in range(bounds.JOIN_CODE_WRONG_MAX - 1, 0, -1):
        assert f"{left} more tr" in (await refusal(wrong, at)).message
    assert SigningAuthority(ca).coded(code.slot).n_wrong == bounds.JOIN_CODE_WRONG_MAX - 1  # type: ignore[union-attr]
    assert "void now" in (await refusal(wrong, at)).message
    assert "is void after 5 wrong tries; `relayline invite old`" in (await refusal(code, at)).message
    assert await asyncio.to_thread(invited, a_code(ca), at), "a new one is good"


async def test_guesses_that_come_at_once_are_no_more_than_those_allowed(ca: Path) -> None:
    code, n_guesses = a_code(ca), bounds.JOIN_CODE_WRONG_MAX + 3
    app = Enrolment(SigningAuthority(ca), "127.0.0.1", 7000).app()
    async with TestClient(TestServer(app)) as client:

        async def call(path: str, message: msgspec.Struct) -> bytes:
            async with client.post(path, data=msgspec.json.encode(message)) as answer:
                return await answer.read()

        proofs = []
        for _ in range(n_guesses):
            host = HostEnd(other_than(code))
            answer = await call(code_exchange.PATH, code_exchange.Begin(code.slot, host.message))
            begun = msgspec.json.decode(answer, type=code_exchange.Begun)
            proofs.append(code_exchange.Proof(begun.exchange, host.proof(begun.message)))
        said = await asyncio.gather(*(call(code_exchange.PROOF_PATH, proof) for proof in proofs))
        assert sum(b"the code is wrong" in each for each in said) == bounds.JOIN_CODE_WRONG_MAX
        assert sum(b"is void after 5" in each for each in said) == 3
        assert b"took too long" in await call(code_exchange.PROOF_PATH, proofs[0]), "each proof is heard once"


async def a_guess(codes: CodeCalls, code: JoinCode) -> Said:
    """Begin an exchange with a wrong code; returns the proof that is wrong."""
    host = HostEnd(other_than(code))
    begun = await codes._begin(Said(code_exchange.Begin(code.slot, host.message)))  # type: ignore[arg-type]
    assert isinstance(begun, code_exchange.Begun)
    return Said(code_exchange.Proof(begun.exchange, host.proof(begun.message)))


class Said:
    """A request with this body."""

    remote = "10.0.0.66"

    def __init__(self, message: msgspec.Struct) -> None:
        self._body = msgspec.json.encode(message)

    async def read(self) -> bytes:
        return self._body


async def test_who_hangs_up_after_a_wrong_try_is_counted(
    ca: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The only thread for files is busy with something else, so that nothing is written when the guesser goes."""
    code, look, busy, go_on = a_code(ca), SigningAuthority.coded, threading.Event(), threading.Event()
    codes = CodeCalls(SigningAuthority(ca), "lan")
    guess = await a_guess(codes, code)
    with ThreadPoolExecutor(1) as files:
        asyncio.get_running_loop().set_default_executor(files)

        def block() -> None:
            busy.set()
            go_on.wait(60)

        def coded(self: SigningAuthority, slot: int) -> CodedInvitation | None:
            files.submit(block)
            return look(self, slot)

        monkeypatch.setattr(SigningAuthority, "coded", coded)
        asked = asyncio.create_task(codes._prove(guess))  # type: ignore[arg-type]
        while not busy.is_set():
            await pause()
        await pause()
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        go_on.set()
        await asyncio.to_thread(str)  # all that was to be written before is written
        monkeypatch.undo()
        found = SigningAuthority(ca).coded(code.slot)
        assert found is not None
        assert found.n_wrong == 1
        await asyncio.gather(*codes._deciding, return_exceptions=True)
    (refusal,) = [record.fields for record in caplog.records if record.message == "code refused"]  # type: ignore[attr-defined]
    assert refusal["from"] == Said.remote
    assert "the code is wrong" in refusal["reason"]


async def test_a_wrong_try_that_cannot_be_written_down_makes_the_code_void(
    ca: Path, at: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = a_code(ca)

    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as disk:
        disk.setattr(invitations, "write_file", full)
        said = (await refusal(other_than(code), at)).message
        assert "the code is wrong, and void now: it could not be written down" in said
        assert "(No space left on device); `relayline invite old`" in said
    assert "is void: a wrong try could not be written down" in (await refusal(code, at)).message
    assert await asyncio.to_thread(invited, a_code(ca), at), "a new one is good"


async def test_wrong_tries_count_though_the_file_has_older_ones(ca: Path, at: Coordinator) -> None:
    """A restored copy of the file gives no new tries."""
    code = a_code(ca)
    before = (ca / CODES_FILE).read_bytes()
    for left in range(bounds.JOIN_CODE_WRONG_MAX - 1, 0, -1):
        assert f"{left} more tr" in (await refusal(other_than(code), at)).message
        (ca / CODES_FILE).write_bytes(before)
    assert "void now" in (await refusal(other_than(code), at)).message


@pytest.mark.parametrize("path", [code_exchange.PATH, code_exchange.PROOF_PATH, enrolment.PATH])
async def test_a_body_that_is_nested_too_deep_is_refused_in_one_line(at: Coordinator, path: str) -> None:
    body = b'{"slot": 482, "message": "x", "exchange": "x", "proof": "x", "name": "x", "csr": "", "a": ' + b"[" * 15_000
    status, content = await asyncio.to_thread(_call_raw, at, path, body)
    assert (status, b"run the same relayline version on both ends" in content) == (502, True)


async def test_a_slot_of_thousands_of_digits_is_not_repeated(at: Coordinator) -> None:
    body = b'{"message": "x", "slot": ' + b"9" * 4_000 + b"}"
    _, content = await asyncio.to_thread(_call_raw, at, code_exchange.PATH, body)
    assert b"run the same relayline version on both ends" in content
    assert b"999" not in content


def test_an_answer_that_is_nested_too_deep_is_refused_in_one_line() -> None:
    with pytest.raises(ProtocolError, match="hosts cannot get certificates at x:1"):
        decoded((200, b'{"pipeline": "x", "a": ' + b"[" * 15_000), code_exchange.Slot, "x:1")


async def test_a_file_that_cannot_be_read_is_one_line(
    ca: Path, at: Coordinator, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    line = invite(ca, "old", "old.test")

    def fails(*arguments: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(SigningAuthority, "coded", fails)
    found = await refusal(line.code, at)
    assert isinstance(found, NotReadyError)
    assert found.message == "codes cannot be read on the coordinator's machine: Input/output error"
    monkeypatch.setattr(SigningAuthority, "bind", fails)
    with pytest.raises(NotReadyError, match="certificates cannot be made on the coordinator's machine: Input/output"):
        await asyncio.to_thread(enrol, at.host, at.port, read_token(line.token), tmp_path / "disk")


def kept_in(ca: Path) -> str:
    return (ca / CODES_FILE).read_text()


async def test_tokens_are_kept_in_clear_only_while_their_code_is_open(
    ca: Path, at: Coordinator, tmp_path: Path
) -> None:
    used = invite(ca, "used", "used.test")
    assert used.token in kept_in(ca)
    await asyncio.to_thread(enrol, at.host, at.port, read_token(used.token), tmp_path / "disk")
    assert used.token not in kept_in(ca)
    assert "was used: stage used has joined" in (await refusal(used.code, at)).message, "which is still told"
    void = invite(ca, "void", "void.test")
    for _ in range(bounds.JOIN_CODE_WRONG_MAX):
        await refusal(other_than(void.code), at)
    assert void.token not in kept_in(ca)
    late = invite(ca, "late", "late.test", NOW - datetime.timedelta(seconds=bounds.JOIN_CODE_S + 60))
    assert "expired at" in (await refusal(late.code, at)).message
    assert late.token not in kept_in(ca)
    ended_s = bounds.INVITATION_S + bounds.JOIN_CODE_S + 60
    tomorrow = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=ended_s)
    invite(ca, "other", "other.test", tomorrow)
    assert msgspec.json.decode(kept_in(ca)).keys() == {"other"}


def test_slots_of_codes_that_have_ended_are_used_again(ca: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(invitations, "SLOT_LAST", 101)
    monkeypatch.setattr(join_code, "SLOT_LAST", 101)
    first, second = invite(ca, "a", "a.test"), invite(ca, "b", "b.test")
    with pytest.raises(UsageError, match="2 join codes are open, which is as many as there can be"):
        invite(ca, "c", "c.test")
    assert SigningAuthority(ca).invitation("c") is None, "nothing was written"
    SigningAuthority(ca).bind("a", "key", "10.0.0.3")
    third = invite(ca, "c", "c.test")
    assert third.code.slot == first.code.slot
    assert SigningAuthority(ca).coded(second.code.slot) == second


def test_invitations_at_once_leave_the_newest_token_with_its_code(ca: Path) -> None:
    with ThreadPoolExecutor(8) as callers:
        list(callers.map(lambda _: invite(ca, "old", "old.test"), range(24)))
    [row] = msgspec.json.decode(kept_in(ca)).values()
    invitation = SigningAuthority(ca).invitation("old")
    assert invitation is not None
    assert digest_of(read_token(row["token"]).secret) == invitation.digest


@pytest.mark.parametrize("n_written", range(3))
def test_a_full_disk_leaves_no_code_of_a_dead_token(ca: Path, monkeypatch: pytest.MonkeyPatch, n_written: int) -> None:
    old, write, written = invite(ca, "old", "old.test"), invitations._write, []

    def full(path: Path, rows: Mapping[str, msgspec.Struct]) -> None:
        if len(written) == n_written:
            raise OSError(errno.ENOSPC, "No space left on device")
        written.append(path)
        write(path, rows)

    with monkeypatch.context() as disk:
        disk.setattr(invitations, "_write", full)
        with pytest.raises(OSError, match="No space left"):
            invite(ca, "old", "old.test")
    found, invitation = open_invitation(ca, "old", NOW), SigningAuthority(ca).invitation("old")
    assert invitation is not None
    assert found == (old if n_written == 0 else None)
    assert found is None or digest_of(read_token(found.token).secret) == invitation.digest
    again = invite(ca, "old", "old.test")
    assert open_invitation(ca, "old", NOW) == again


async def test_codes_expire_and_are_replaced(ca: Path, at: Coordinator) -> None:
    late = a_code(ca, now=NOW - datetime.timedelta(seconds=bounds.JOIN_CODE_S + 60))
    assert "expired at" in (await refusal(late, at)).message
    assert open_invitation(ca, "old", NOW) is None
    first = a_code(ca)
    second = a_code(ca)
    assert open_invitation(ca, "old", NOW).code == second  # type: ignore[union-attr]
    if first.slot != second.slot:
        assert f"no code here begins with {first.slot}" in (await refusal(first, at)).message
    third = a_code(ca)
    if third.slot != second.slot:
        assert f"no code here begins with {second.slot}" in (await refusal(second, at)).message, "its token is void"


async def test_codes_of_several_stages_have_slots_of_their_own(ca: Path, at: Coordinator) -> None:
    codes = {name: a_code(ca, name) for name in ("a", "b", "c")}
    assert len({code.slot for code in codes.values()}) == 3
    for name, code in codes.items():
        assert read_token((await asyncio.to_thread(invited, code, at)).token).name == name


async def test_a_code_that_was_replaced_in_the_middle_opens_nothing(
    ca: Path, at: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = a_code(ca)

    def other_code(taken: object = ()) -> JoinCode:
        return other_than(code)

    monkeypatch.setattr(invitations, "new_code", other_code)
    begun = CoordinatorEnd.__init__

    def replaced(self: CoordinatorEnd, *arguments: object) -> None:
        begun(self, *arguments)  # type: ignore[arg-type]
        a_code(ca)

    monkeypatch.setattr(CoordinatorEnd, "__init__", replaced)
    assert "replaced by a newer one" in (await refusal(code, at)).message


# --- others at the port ---------------------------------------------------------------------------------------------


class Impostor:
    """A port like a coordinator's, of somebody who does not know the code."""

    def __init__(self, ca: Path, app: web.Application) -> None:
        self._ca, self._app = ca, app

    async def __aenter__(self) -> Coordinator:
        context = server_context(self._ca / "coordinator" / "cert.pem", self._ca / "coordinator" / "key.pem")
        self._runner, port = await start_http(self._app, "127.0.0.1", 0, context=context)
        return Coordinator("127.0.0.1", port)

    async def __aexit__(self, *error: object) -> None:
        await self._runner.cleanup()


def answering(answer: Callable[[web.Request], object]) -> Callable[[web.Request], object]:
    async def handler(request: web.Request) -> web.Response:
        found = answer(request)
        if asyncio.iscoroutine(found):
            found = await found
        return web.Response(body=msgspec.json.encode(found), content_type="application/json")

    return handler


async def test_an_impostor_has_one_guess_and_gets_no_stage(ca: Path) -> None:
    code, proofs = a_code(ca), []

    async def begin(request: web.Request) -> code_exchange.Begun:
        asked = msgspec.json.decode(await request.read(), type=code_exchange.Begin)
        self_end = CoordinatorEnd(other_than(code), asked.message)
        ends.append(self_end)
        return code_exchange.Begun("x", self_end.message)

    async def prove(request: web.Request) -> code_exchange.Sealed:
        asked = msgspec.json.decode(await request.read(), type=code_exchange.Proof)
        proofs.append(ends[-1].is_right(asked.proof))
        return code_exchange.Sealed(ends[-1].seal(Invitation("evil", "10.6.6.6:1", "old.x")))

    ends: list[CoordinatorEnd] = []
    app = web.Application()
    app.router.add_post(code_exchange.PATH, answering(begin))  # type: ignore[arg-type]
    app.router.add_post(code_exchange.PROOF_PATH, answering(prove))  # type: ignore[arg-type]
    async with Impostor(ca, app) as at:
        found = await refusal(code, at)
    assert isinstance(found, UnauthenticatedError)
    assert "does not know the code; somebody may be intercepting" in found.message
    assert proofs == [False]
    assert len(ends) == 1, "a host does not try again by itself"


async def test_a_man_in_the_middle_who_relays_changes_nothing(ca: Path, at: Coordinator) -> None:
    """He ends the TLS of both sides, so that he sees all messages; the host still gets the line of the right CA."""
    line, seen = invite(ca, "old", "old.test"), []
    code, token = line.code, line.token

    async def passed_on(request: web.Request) -> web.Response:
        body = await request.read()
        status, content = await asyncio.to_thread(_call_raw, at, request.path, body)
        seen.append(body + content)
        return web.Response(body=content, status=status, content_type="application/json")

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", passed_on)
    async with Impostor(ca, app) as middle:
        found = await asyncio.to_thread(invited, code, middle)
    assert (found.token, found.address) == (token, at.address)
    assert len(seen) == 2
    everything = b"".join(seen)
    assert token.encode() not in everything
    assert code.secret.encode() not in everything


def _call_raw(at: Coordinator, path: str, body: bytes) -> tuple[int, bytes]:
    import http.client

    from relayline.wire.links.tls_probe import unverified_context

    link = http.client.HTTPSConnection(at.host, at.port, context=unverified_context(), timeout=10)
    try:
        link.request("POST", path, body)
        answer = link.getresponse()
        return answer.status, answer.read()
    finally:
        link.close()


async def test_a_coordinator_of_before_codes_is_named_as_such(ca: Path) -> None:
    """Its port has the two calls of enrolment alone."""
    app = web.Application()
    app.router.add_get(enrolment.PATH, Enrolment(SigningAuthority(ca), "127.0.0.1", 7000).welcome)
    async with Impostor(ca, app) as at:
        found = await refusal(JoinCode(482, "177309"), at)
    assert isinstance(found, VersionError)
    assert "is of an older version without codes; copy the long line" in found.message
    async with Impostor(ca, web.Application()) as at:
        assert isinstance(await refusal(JoinCode(482, "177309"), at), ProtocolError), "of some other service"


async def test_a_port_where_nobody_listens_is_said_in_one_line(at: Coordinator) -> None:
    found = await refusal(JoinCode(482, "177309"), Coordinator("127.0.0.1", 1))
    assert isinstance(found, StageLostError)
    assert "127.0.0.1:1 cannot be reached" in found.message


# --- several pipelines nearby ---------------------------------------------------------------------------------------


async def test_only_the_pipeline_that_has_the_code_is_tried(
    ca: Path, at: Coordinator, caplog: pytest.LogCaptureFixture
) -> None:
    code, tried = a_code(ca), []

    def note(request: web.Request) -> enrolment.Refusal:
        tried.append(request.path)
        raise web.HTTPNotFound

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answering(note))  # type: ignore[arg-type]
    async with Impostor(ca, app) as other:
        dead = Coordinator("127.0.0.1", 1)
        nearby = [("another", [other]), ("lan", [dead, at]), ("gone", [dead])]
        assert await asyncio.to_thread(holder_of, code, nearby) == at
        assert await asyncio.to_thread(holder_of, code, [("lan", [other, at])]) == at, "the next address is asked, too"
        del tried[2:]
        assert tried == [f"{code_exchange.PATH}/{code.slot}", enrolment.PATH], "it heard the public digits, no more"
        with pytest.raises(UsageError, match=r"pipelines nearby \(another, gone\) has a code that begins with"):
            await asyncio.to_thread(holder_of, code, [nearby[0], nearby[2]])
    twin = Coordinator("localhost", at.port)
    with pytest.raises(UsageError, match=rf"2 pipelines nearby have a code .*: lan at {at.address}, twin at .*; name"):
        await asyncio.to_thread(holder_of, code, [("lan", [at]), ("twin", [twin])])
    with pytest.raises(UnauthenticatedError, match="no code here begins with"):
        await asyncio.to_thread(holder_of, JoinCode(code.slot ^ 1, "000000"), [("lan", [at])])
    assert not [record for record in caplog.records if record.levelno > logging.INFO], "being asked is no event"


async def test_an_announcement_that_is_repeated_is_no_second_holder(
    ca: Path, at: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, asked, call = a_code(ca), [], by_code._call

    def noted(at: Coordinator, *arguments: object) -> object:
        asked.append(at)
        return call(at, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(by_code, "_call", noted)
    dead = Coordinator("127.0.0.1", 1)
    nearby = [("copy", [dead, at]), ("lan", [at, dead]), ("lan", [at])]
    assert await asyncio.to_thread(holder_of, code, nearby) == at
    assert sorted(each.port for each in asked) == [1, at.port], "each is asked once"
    with pytest.raises(StageLostError, match=r"127\.0\.0\.1:1 cannot be reached"):
        await asyncio.to_thread(holder_of, code, [("copy", [dead]), ("lan", [dead])])


def test_a_port_that_is_not_for_joining_is_told(ca: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        at = Coordinator("127.0.0.1", other.getsockname()[1])

        def hang_up() -> None:
            link, _ = other.accept()
            link.recv(1)
            link.close()

        ending = threading.Thread(target=hang_up)
        ending.start()
        with pytest.raises(RelaylineError, match=r"hosts join at the port that `relayline up` printed, 50049 unless"):
            by_code.invited(a_code(ca), at)
        ending.join()


def test_the_addresses_of_a_pipeline_share_the_time_of_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """A coordinator on a busy host may take some seconds: where it has one address, nothing else waits for that."""
    waits: dict[int, float] = {}

    def noted(to: Coordinator, path: str, body: bytes | None, kind: type[msgspec.Struct], timeout_s: float) -> None:
        waits[to.port] = timeout_s
        if to.port < 5:
            raise StageLostError("it has not answered")

    monkeypatch.setattr(by_code, "_call", noted)
    several = [Coordinator("127.0.0.1", port) for port in (1, 2, 3, 4)]
    alone = Coordinator("127.0.0.1", 5)
    assert holder_of(JoinCode(7, "123456"), [("lan", several), ("other", [alone])]) == alone
    whole_s = pytest.approx(bounds.NEARBY_SEARCH_S, rel=0.5)
    assert [waits[port] * (5 - port) for port in (1, 2, 3, 4)] == [whole_s] * 4
    assert waits[5] == whole_s


@pytest.mark.sampled(2)
@pytest.mark.parametrize("is_silent", [False, True])
@pytest.mark.parametrize("begin", [b"", b"HTTP/1.1 200 OK\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 16000\r\n\r\n"])
async def test_who_answers_byte_by_byte_holds_up_no_one(
    ca: Path, at: Coordinator, monkeypatch: pytest.MonkeyPatch, begin: bytes, is_silent: bool
) -> None:
    context = server_context(ca / "coordinator" / "cert.pem", ca / "coordinator" / "key.pem")
    has_ended, dripping = asyncio.Event(), set[asyncio.Task[None] | None]()

    async def drip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        dripping.add(asyncio.current_task())
        with contextlib.suppress(OSError):
            writer.write(begin)
            while not has_ended.is_set() and not writer.is_closing():
                writer.write(b"H")
                await writer.drain()
                await pause()
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()

    code, call = a_code(ca), by_code._call
    tls = None if is_silent else context
    servers = [await asyncio.start_server(drip, "127.0.0.1", 0, ssl=tls) for _ in range(bounds.NEARBY_ADDRESSES_MAX)]
    rogues = [Coordinator("127.0.0.1", server.sockets[0].getsockname()[1]) for server in servers]

    def hurried(to: Coordinator, path: str, body: bytes | None, kind: type[msgspec.Struct], timeout_s: float) -> object:
        return call(to, path, body, kind, 0.5 if to in rogues else timeout_s)  # the honest one has all its time

    monkeypatch.setattr(by_code, "_call", hurried)
    try:
        assert await asyncio.to_thread(holder_of, code, [("evil", rogues), ("lan", [at])]) == at
        found = await refusal(code, rogues[0])
    finally:
        has_ended.set()
        for server in servers:
            server.close()
        await asyncio.gather(*(task for task in dripping if task is not None))
    assert is_silent or f"{rogues[0].address} has not answered in time" in found.message


async def test_exchanges_have_a_rate(ca: Path, at: Coordinator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounds, "JOIN_CODE_BEGUN_MAX", 1)
    code = a_code(ca)
    assert await asyncio.to_thread(invited, code, at)
    assert "too many hosts try codes here" in (await refusal(code, at)).message
