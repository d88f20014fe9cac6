"""`relayline join` before it connects: which membership is meant, and mistakes in the arguments."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from relayline.deploy.cli.join import chosen, join_command
from relayline.stage.joining.enrol import JOINED_FILE, JoinedFile, PendingFile
from relayline.wire.common.errors import StartError, UsageError
from relayline.wire.links.enrolment import new_token


def remember(root: Path, name: str, enrol: str, digest: str = "digest", joined_s: int = 0) -> None:
    directory = root / f"{name}-{enrol.replace(':', '-')}-{digest}"
    directory.mkdir(parents=True)
    file = JoinedFile(name, enrol, enrol.replace("50049", "50050"), digest)
    (directory / JOINED_FILE).write_bytes(msgspec.json.encode(file))
    os.utime(directory / JOINED_FILE, (joined_s, joined_s))


def refusal(*arguments: str | Path) -> str:
    with pytest.raises(UsageError) as caught:
        CliRunner().invoke(join_command, [*map(str, arguments)], catch_exceptions=False)
    assert "\n" not in caught.value.message
    return caught.value.message


def test_a_token_is_for_the_stage_that_it_names(tmp_path: Path) -> None:
    token = new_token("old", b"a CA")
    message = refusal("127.0.0.1:1", str(token), "--name", "server", "--state", tmp_path)
    assert message == "the token is for old, not for server; leave out --name"
    assert "not one of a join line" in refusal("127.0.0.1:1", "nonsense", "--state", tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_place_that_holds_no_credentials_names_the_variable_that_moves_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file" / "x"))
    arguments = ["127.0.0.1:1", str(new_token("old", b"a CA"))]
    with pytest.raises(StartError, match="credentials cannot be kept here: Not a directory; XDG_STATE_HOME=DIRECTORY"):
        CliRunner().invoke(join_command, arguments, catch_exceptions=False)


def test_without_a_token_one_membership_has_to_be_meant(tmp_path: Path) -> None:
    assert "has not joined a pipeline yet" in refusal("--state", tmp_path)
    remember(tmp_path, "old", "10.0.0.1:50049")
    assert chosen(tmp_path).file.name == "old"
    remember(tmp_path, "older", "10.0.0.9:50049")
    assert "joined as old at 10.0.0.1:50049, older at 10.0.0.9:50049; name one of them" in refusal("--state", tmp_path)
    assert chosen(tmp_path, "older").file.enrol == "10.0.0.9:50049"
    assert chosen(tmp_path, address="10.0.0.1:50049").file.name == "old"
    assert chosen(tmp_path, address="10.0.0.1:50050").file.name == "old", (
        "the same join address means the same coordinator"
    )
    assert "has not joined that pipeline" in refusal("10.0.0.7:50049", "--state", tmp_path)


def test_of_two_pipelines_at_one_address_the_latest_is_meant(tmp_path: Path) -> None:
    for digest, joined_s in (("a", 1), ("b", 3), ("c", 2)):
        remember(tmp_path, "laptop", "10.0.0.1:50049", digest, joined_s)
    assert chosen(tmp_path).file.token == "b"
    remember(tmp_path, "server", "10.0.0.1:50049", joined_s=4)
    expected = (
        "joined as laptop at 10.0.0.1:50049, server at 10.0.0.1:50049; name one of them: relayline join HOST:PORT"
    )
    assert expected in refusal("--state", tmp_path)
    assert chosen(tmp_path, "laptop", "10.0.0.1:50049").file.token == "b"


def test_a_membership_that_cannot_be_read_hides_no_other(tmp_path: Path) -> None:
    remember(tmp_path, "old", "10.0.0.1:50049")
    remember(tmp_path, "torn", "10.0.0.2:50049")
    next(tmp_path.glob("torn-*/*.json")).write_text("{")
    assert chosen(tmp_path).file.name == "old"


def test_a_membership_of_the_past_is_forgotten(tmp_path: Path) -> None:
    def forget(*arguments: str) -> str:
        given = [*arguments, "--state", str(tmp_path)]
        return CliRunner().invoke(join_command, given, catch_exceptions=False).output

    for digest in ("a", "b"):
        remember(tmp_path, "stage-1", "10.0.0.1:50049", digest)
    remember(tmp_path, "stage-1", "10.0.0.2:50049")
    remember(tmp_path, "stage-2", "10.0.0.1:50049")
    assert refusal("10.0.0.1", "--state", tmp_path).endswith("relayline join --forget NAME")
    once = "forgot stage-1 at 10.0.0.1:50049; joining as it again needs a new code\n"
    assert forget("10.0.0.1", "--forget", "stage-1") == once * 2
    assert chosen(tmp_path, address="10.0.0.1:50049").file.name == "stage-2"
    assert chosen(tmp_path, "stage-1").file.enrol == "10.0.0.2:50049", "another pipeline's is kept"
    message = refusal("10.0.0.1", "--forget", "stage-1", "--state", tmp_path)
    assert message == "this host has not joined as stage-1 at 10.0.0.1:50049; nothing is forgotten"
    assert "joins none" in refusal("482-177-309", "--forget", "stage-1", "--state", tmp_path)


def test_a_line_that_was_only_begun_is_forgotten(tmp_path: Path) -> None:
    token = new_token("stage-1", b"a CA")
    directory = tmp_path / f"stage-1-{token.fingerprint.hex()[:8]}"
    directory.mkdir()
    line = PendingFile("stage-1", "10.0.0.1:50049", str(token))
    (directory / "pending-0.json").write_bytes(msgspec.json.encode(line))
    CliRunner().invoke(join_command, ["--forget", "stage-1", "--state", str(tmp_path)], catch_exceptions=False)
    assert not list(tmp_path.iterdir())
