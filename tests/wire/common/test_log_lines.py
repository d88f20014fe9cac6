"""Log lines: a printed line is not logged to a terminal again, and stays in files and in JSON."""

from __future__ import annotations

import datetime
import json
import logging
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from aiohttp.http_exceptions import BadHttpMessage, InvalidURLError, LineTooLong

from relayline.deploy.launch.run import log_file
from relayline.wire.common import bounds, logs
from relayline.wire.common.texts import printable


@pytest.fixture(autouse=True)
def _root() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.mark.parametrize("as_json", [False, True])
def test_a_printed_line_is_for_files(tmp_path: Path, capsys: pytest.CaptureFixture[str], *, as_json: bool) -> None:
    logs.setup("up", as_json=as_json)
    with log_file(tmp_path / "up.log"):
        logging.getLogger("relayline.up").info("ready: %s", "http://x", extra=logs.PRINTED)
        logging.getLogger("relayline.up").info("another line")
    printed, kept = capsys.readouterr().err, (tmp_path / "up.log").read_text()
    assert ("ready: http://x" in printed) is as_json
    assert "ready: http://x" in kept
    assert "another line" in printed
    assert "another line" in kept


def test_json_has_one_object_a_line_with_the_same_keys_always(capsys: pytest.CaptureFixture[str]) -> None:
    logs.setup("stage", as_json=True)
    log = logging.getLogger("relayline.stage")
    log.info("stage %s", "joined", extra={"fields": {"stage": "a\nb", "layers": 4, "path": Path("x")}})
    try:
        raise ValueError("one\x1b[2Jtwo")
    except ValueError:
        log.exception("it failed")
    first, second = map(json.loads, capsys.readouterr().err.splitlines())
    assert datetime.datetime.fromisoformat(first.pop("time")).utcoffset() == datetime.timedelta(0)
    assert first == {
        "level": "info", "role": "stage", "message": "stage joined", "stage": "a\\nb", "layers": 4, "path": "x",
    }  # fmt: skip
    assert (second["level"], second["role"], second["message"]) == ("error", "stage", "it failed")
    assert second["exception"].splitlines()[-1] == "ValueError: one\\x1b[2Jtwo"


def test_human_lines_have_the_fields_behind_the_text(capsys: pytest.CaptureFixture[str]) -> None:
    logs.setup("stage", as_json=False)
    logging.getLogger("relayline.stage").warning("stage left", extra={"fields": {"stage": "a", "reason": "gone\nx"}})
    line = capsys.readouterr().err
    assert line[8:] == " warning stage left stage=a reason=gone\\nx\n"
    assert logs.recent_lines(1)[0].text == "stage left stage=a reason=gone\\nx"


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("0-3,4-7", "0-3,4-7"),
        (r"C:\x", r"C:\x"),
        (12, "12"),
        ("", '""'),
        ("no answer", '"no answer"'),
        ("a=b", '"a=b"'),
        ('say "x"', r'"say \"x\""'),
        ("one\ntwo \\", r'"one\\ntwo \\"'),
        ('x stage=b reason="', r'"x stage=b reason=\""'),
    ],
)
def test_a_line_can_be_taken_apart_whatever_its_values_are(
    value: object, shown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    logs.setup("stage", as_json=False)
    log = logging.getLogger("relayline.stage")
    log.info("left", extra={"fields": {"reason": value, "n": 1}})
    assert capsys.readouterr().err.endswith(f" left reason={shown} n=1\n")
    assert logs.recent_lines(1)[0].text == f"left reason={shown} n=1"
    if '"' in shown:
        assert shlex.split(shown) == [printable(str(value))], "a shell's words, too"


def test_a_record_that_cannot_be_written_raises_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    logs.setup("up", as_json=False)
    logging.getLogger("relayline.up").info("one %d", "two", "three")
    logging.getLogger("relayline.up").info("the next")
    assert logs.recent_lines(1)[0].text == "the next"
    assert "one %d" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        (LineTooLong(b"Bearer 'sk-secret\"...", 8_190), "Got more than 8190 bytes when reading: ...."),
        (InvalidURLError("/v1/models?key=sk-secret"), "InvalidURLError"),
        (BadHttpMessage("Invalid header token:\n\n  b'Authorization : sk-secret'\n    ^"), "Invalid header token: ..."),
    ],
)
def test_what_a_client_sent_is_in_no_line(fault: BadHttpMessage, says: str) -> None:
    logs.setup("coordinator", as_json=False)
    logging.getLogger("aiohttp.server").error("Error handling request from %s", "10.0.0.7", exc_info=fault)
    assert logs.recent_lines(1)[0].text == f"10.0.0.7's request cannot be read: {says}"


def test_a_client_that_is_never_understood_leaves_the_other_lines() -> None:
    logs.setup("coordinator", as_json=False)
    logging.getLogger("relayline.http").warning("the disk is full")
    server = logging.getLogger("aiohttp.server")
    for address in ("10.0.0.7", "10.0.0.8"):
        for _ in range(bounds.LOG_LINES_KEPT):
            server.error("Error handling request from %s", address, exc_info=BadHttpMessage("Pause on PRI/Upgrade"))
    for _ in range(bounds.LOG_LINES_KEPT):
        logging.getLogger("relayline.http").warning("100% bad", extra=logs.AT_WILL)
    said = "'s request cannot be read: Pause on PRI/Upgrade"
    lines = [line.text for line in logs.recent_lines(4)]
    assert lines == ["the disk is full", f"10.0.0.7{said}", f"10.0.0.8{said}", "100% bad"]
    for _ in range(3):
        logs.setup("coordinator", as_json=False)
    assert len(server.filters) == 1
