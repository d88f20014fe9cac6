"""Join lines over HTTP: who gets one, for which stage and host, and what it opens."""

from __future__ import annotations

import datetime
import errno
import json
import os
from pathlib import Path

import aiohttp
import pytest

from relayline.coordinator.http.app import make_app
from relayline.coordinator.http.edge.server import start_http
from relayline.coordinator.http.replies.service import ServedModel
from relayline.coordinator.joining.inviting import Inviter
from relayline.coordinator.text.chat import ChatTemplate
from relayline.coordinator.text.tokenizer import Tokenizer
from relayline.deploy.launch import invitations
from relayline.deploy.launch.certificates import init_authority
from relayline.deploy.launch.invitations import SigningAuthority, invited_host
from relayline.deploy.testing.vocabulary_files import CHATML, write_tokenizer
from relayline.wire.common.errors import InvalidRequestError, NotReadyError
from relayline.wire.links.enrolment import digest_of, read_token
from tests.support.http_support import CREATED, MODEL, FakeGenerator


class Places:
    """Some names; what is added is one of them from then on."""

    def __init__(self, *names: str) -> None:
        self.known, self.spares = list(names), set[str]()

    def names(self) -> list[str]:
        return self.known

    def add(self, name: str, *, is_spare: bool) -> None:
        self.known.append(name)
        if is_spare:
            self.spares.add(name)


@pytest.fixture
def ca(tmp_path: Path) -> Path:
    init_authority(tmp_path / "ca", "small", datetime.datetime.now(datetime.UTC))
    return tmp_path / "ca"


def _inviter(ca: Path, places: Places, *fixed: str) -> Inviter:
    inviter = Inviter(SigningAuthority(ca), places.names, places.add, fixed)
    inviter.address = "10.0.0.1:50049"
    return inviter


async def test_a_new_stage_gets_a_line_that_its_invitation_knows(ca: Path) -> None:
    places = Places("desk")
    inviter = _inviter(ca, places)
    made = await inviter.invite("laptop", "10.0.0.7", is_spare=False)
    command, address, text = made.line.rsplit(" ", 2)
    token = read_token(text)
    assert (command, address, token.name) == ("relayline join", "10.0.0.1:50049", "laptop")
    invitation = SigningAuthority(ca).invitation("laptop")
    assert invitation is not None
    assert (invitation.stage.host, invitation.digest) == ("10.0.0.7", digest_of(token.secret))
    assert made.expires_unix_s == int(invitation.expires.timestamp())
    assert text not in repr(made), "a secret is not for logs"
    coded = SigningAuthority(ca).coded(int(made.code[:3]))
    assert coded is not None
    assert (str(coded.code), coded.token, made.short) == (made.code, text, f"relayline join 10.0.0.1 {made.code}")
    assert made.code_expires_unix_s == int(coded.expires.timestamp()) < made.expires_unix_s
    assert made.code not in repr(made)
    assert (places.known, places.spares) == (["desk", "laptop"], set())
    again = await inviter.invite("laptop", "", is_spare=False)
    assert again.host == "10.0.0.7", "a stage keeps its host"
    assert again.line != made.line
    assert places.known == ["desk", "laptop"]


@pytest.mark.parametrize(
    ("name", "host", "words"),
    [
        ("desk", "", "not on another host"),
        ("Laptop", "10.0.0.7", "lower-case letters"),
        ("../x", "10.0.0.7", "lower-case letters"),
        ("new", "", "address of the machine"),
        ("new", "a b", "address of the machine"),
        ("new", "h" * 300, "address of the machine"),
        ("new", "ho/st", "address of the machine"),
        ("new", "höst", "address of the machine"),
        ("new", "*", "address of the machine"),
        ("new", "*.example", "address of the machine"),
        ("coordinator", "10.0.0.9", "no stage can be named coordinator"),
        ("monitor", "10.0.0.9", "no stage can be named monitor"),
        ("laptop", "10.0.0.8", "belongs on 10.0.0.7"),
        ("new", "10.0.0.9", "the manifest fixes those of desk; it can join as a spare"),
    ],
)
async def test_other_lines_are_refused_and_nothing_changes(ca: Path, name: str, host: str, words: str) -> None:
    places = Places("desk")
    await _inviter(ca, places).invite("laptop", "10.0.0.7", is_spare=True)
    with pytest.raises(InvalidRequestError, match=words) as refused:
        await _inviter(ca, places, "desk").invite(name, host, is_spare=False)
    assert ("spare" in words) == (refused.value.param == "spare")
    assert places.known == ["desk", "laptop"]
    assert not invited_host(ca, "new")
    assert set(json.loads((ca / "invitations.json").read_text())) == {"laptop"}


class _Full(Places):
    def add(self, name: str, *, is_spare: bool) -> None:
        raise InvalidRequestError("there is no room")


async def test_where_there_is_no_room_nothing_is_written_down(ca: Path) -> None:
    with pytest.raises(InvalidRequestError, match="no room"):
        await _inviter(ca, _Full("desk")).invite("new", "10.0.0.7", is_spare=False)
    assert not (ca / "invitations.json").exists()


async def test_a_full_disk_is_one_line(ca: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    places = Places("desk")
    inviter = _inviter(ca, places)
    with monkeypatch.context() as full:
        full.setattr(invitations, "write_file", fails)
        with pytest.raises(NotReadyError, match=r"^the invitation of new cannot be written: No space left on device$"):
            await inviter.invite("new", "10.0.0.7", is_spare=False)
    assert (await inviter.invite("new", "10.0.0.7", is_spare=False)).host == "10.0.0.7"


async def test_a_line_that_could_not_be_written_is_made_later(ca: Path) -> None:
    places = Places("desk")
    inviter = _inviter(ca, places)
    (ca / "ca.pem").rename(ca / "away.pem")
    with pytest.raises(InvalidRequestError):
        await inviter.invite("new", "10.0.0.7", is_spare=False)
    (ca / "away.pem").rename(ca / "ca.pem")
    assert (await inviter.invite("new", "10.0.0.7", is_spare=False)).host == "10.0.0.7"
    assert places.known == ["desk", "new"]


class _Layers:
    """What the routes need of one that moves layers."""

    def describe(self) -> dict[str, object]:
        return {}


@pytest.mark.parametrize("is_allowed", [True, False])
async def test_the_route_gives_a_line_where_that_is_allowed(ca: Path, tmp_path: Path, is_allowed: bool) -> None:
    tokenizer = Tokenizer.load(write_tokenizer(tmp_path / "tokenizer.gguf"))
    model = ServedModel(MODEL, CREATED, tokenizer, ChatTemplate(CHATML, bos_text="", eos_text=""), None)
    inviter = _inviter(ca, Places("desk")) if is_allowed else None
    app = make_app(FakeGenerator(), model, layers=_Layers(), inviter=inviter)  # type: ignore[arg-type]
    runner, port = await start_http(app, "127.0.0.1", 0)
    try:
        async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as session:
            body = {"name": "laptop", "host": "10.0.0.7", "spare": True}
            async with session.post("/v1/pipeline/invitations", json=body) as reply:
                found = await reply.json()
                if not is_allowed:
                    assert (reply.status, "--allow-invites" in found["error"]["message"]) == (400, True)
                    return
                assert (reply.status, reply.headers["Cache-Control"]) == (201, "no-store")
            assert found["line"].startswith("relayline join 10.0.0.1:50049 laptop.")
            async with session.post("/v1/pipeline/invitations", data=json.dumps({"nmae": "x"})) as reply:
                assert reply.status == 400
    finally:
        await runner.cleanup()
