"""Goal: text from another process reaches a person bounded and printable, wherever it is shown.

Method: hostile text goes through the functions, through a log formatter of each kind, and through a membership.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import socket
import ssl
import sys
from pathlib import Path
from types import SimpleNamespace

import aiohttp
import hypothesis.strategies as st
import pytest
from hypothesis import given

from relayline.wire.common import bounds, logs
from relayline.wire.common.texts import (
    KEYS_MAX,
    counted,
    duration_text,
    file_error_text,
    layer_range,
    layer_ranges,
    named_layers,
    named_stage,
    not_text,
    printable,
    printable_values,
    system_reason,
    tidy,
    whole_number,
)
from relayline.wire.pb.relayline.v1 import join_pb2
from relayline.wire.pb.relayline.v1 import relayline_pb2 as pb

HOSTILE = (
    "\x1b[31mred\x1b[0m",
    "two\nlines\r\x00",
    "\x9b2J clears by C1",
    "\x7f\x08\x08",
    "left\u202eright",
    "in\u200bvisible\u2028line",
    "half \ud800 pair",
)


@pytest.mark.parametrize("text", HOSTILE)
def test_control_characters_are_shown_and_not_obeyed(text: str) -> None:
    shown = printable(text)
    assert shown.isprintable()
    assert shown != text
    assert shown.encode("ascii").decode("unicode_escape").encode("utf-16", "surrogatepass") == text.encode(
        "utf-16", "surrogatepass"
    ), "nothing is lost"


@pytest.mark.parametrize("text", ["", "stage 1 of 3", "größer, 模型, δ"])
def test_ordinary_text_stays_as_it_is(text: str) -> None:
    assert printable(text) is text


@given(st.text(), st.integers(0, 20))
def test_any_text_is_printable_and_bounded(text: str, chars_max: int) -> None:
    shown = printable(text, chars_max)
    assert shown.isprintable()
    assert len(shown) <= 10 * chars_max + 40


def test_shortened_text_says_how_much_was_cut() -> None:
    assert printable("a" * 5_000, 10) == "aaaaaaaaaa... (4990 more characters)"


def test_values_of_an_answer() -> None:
    found = printable_values({"\x1b": ["\n", 1, None, {"x": "\x07"}], "n": 1.5})
    assert found == {"\\x1b": ["\\n", 1, None, {"x": "\\x07"}], "n": 1.5}


@pytest.mark.parametrize("as_json", [False, True])
@pytest.mark.parametrize("text", [*HOSTILE, "x" * (16 << 20)])
def test_one_record_is_one_bounded_line(text: str, as_json: bool) -> None:
    formatter = logs._JsonFormatter("stage") if as_json else logs._HumanFormatter()
    record = logging.LogRecord("x", logging.WARNING, "", 0, "stage %s left", (text,), None)
    record.fields = {"name": text, "n": 5}
    line = formatter.format(record)
    assert line.isprintable()
    assert len(line) < 8 * bounds.LOG_VALUE_CHARS_MAX
    assert not as_json or json.loads(line)["n"] == 5


@pytest.mark.parametrize("as_json", [False, True])
def test_a_traceback_has_its_lines_and_no_other(as_json: bool) -> None:
    formatter = logs._JsonFormatter("stage") if as_json else logs._HumanFormatter()
    try:
        raise ValueError("\x1b[2J" + "x" * 100_000)
    except ValueError:
        record = logging.LogRecord("x", logging.ERROR, "", 0, "failed", (), sys.exc_info())
    text = formatter.format(record)
    shown = json.loads(text)["exception"] if as_json else text
    assert all(line.isprintable() for line in shown.split("\n"))
    assert "\\x1b[2Jxxx" in shown
    assert len(text) < 4 * bounds.LOG_VALUE_CHARS_MAX


def test_texts_of_messages_are_tidied_however_deep() -> None:
    report = join_pb2.JoinRequest(hello={"name": "\x1b" * 500, "process_id": "p", "host": {"hostname": "a\nb"}})
    tidy(report)
    assert report.hello.name.isprintable()
    assert len(report.hello.name) < 5 * bounds.PEER_NAME_CHARS_MAX
    assert (report.hello.process_id, report.hello.host.hostname) == ("p", "a\\nb")
    status = pb.StatusResponse(faults_by_label={"\n": 3, "native": 4}, steps_by_rows={1: 2})
    tidy(status)
    assert dict(status.faults_by_label) == {"\\n": 3, "native": 4}
    status = pb.StatusResponse(close_reasons={str(number): number for number in range(500)})
    tidy(status)
    assert len(status.close_reasons) == KEYS_MAX


def test_a_refused_connection_is_in_the_words_of_the_system() -> None:
    refused = OSError(errno.ECONNREFUSED, "Connect call failed ('10.0.0.9', 8080)")
    wrapped = aiohttp.ClientConnectorError(SimpleNamespace(ssl=True, host="10.0.0.9", port=8080), refused)  # type: ignore[arg-type]
    assert system_reason(refused) == system_reason(wrapped) == "Connection refused"
    assert system_reason(socket.gaierror(socket.EAI_NONAME, "Name or service not known")) == "Name or service not known"
    assert system_reason(ssl.SSLCertVerificationError(1, "self-signed certificate")) == "", "1 is no errno there"
    assert system_reason(TimeoutError()) == system_reason(ValueError("x")) == ""


def test_a_layer_alone_is_no_range() -> None:
    assert [layer_range(0, 1), layer_range(7, 8), layer_range(3, 6)] == ["0", "7", "3-5"]
    assert [named_layers(7, 8), named_layers(3, 5)] == ["layer 7", "layers 3-4"]
    assert layer_ranges([(0, 4), (4, 5)]) == "0-3, 4"


def test_one_thing_has_no_plural() -> None:
    assert [counted(n, "stage") for n in (0, 1, 2, 1024)] == ["0 stages", "1 stage", "2 stages", "1,024 stages"]
    assert [counted(n, "batch waits", "batches wait") for n in (1, 2)] == ["1 batch waits", "2 batches wait"]


def test_a_whole_number_is_digits_alone() -> None:
    assert [whole_number(text, 3) for text in ("0", "007", "999")] == [0, 7, 999]
    others = ("", " 1", "1\n", "+1", "-1", "1_0", "1.0", "\u0663", "1000", "9" * 5_000)
    assert {whole_number(text, 3) for text in others} == {None}


def test_a_time_has_two_units() -> None:
    found = [duration_text(seconds) for seconds in (0.4, 45, 59.6, 200, 7_500, 97_200)]
    assert found == ["0 s", "45 s", "1 min 0 s", "3 min 20 s", "2 h 5 min", "1 d 3 h"]


def test_a_stage_is_named_with_one_noun() -> None:
    said = [named_stage(name) for name in ("laptop", "stage-1", "stage", "a-stage")]
    assert said == ["stage laptop", "stage-1", "stage stage", "stage a-stage"]


def test_a_path_that_is_no_text_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [not_text(Path(name)) for name in ("m.gguf", "m\xe9 \u6a21.gguf")] == ["", ""]
    assert not_text(Path("m\udcff.gguf")) == "the name is not UTF-8; rename it"
    monkeypatch.setattr(sys, "getfilesystemencoding", lambda: "ascii")
    says = "the name is not ascii, which this locale asks for; set LC_ALL=C.UTF-8"
    assert not_text(Path("m\udcc3\udca9.gguf")) == says


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (
            OSError(errno.EMFILE, os.strerror(errno.EMFILE), "a"),
            "a: this process may open no more files; raise `ulimit -n`",
        ),
        (NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), "a"), "a: it is a file; name a directory"),
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "a"), "a: No space left on device"),
        (OSError("no number"), "no number"),
    ],
    ids=["files", "a file in the way", "a full disk", "Python's own"],
)
def test_what_the_system_refused_is_said_with_the_file_and_a_remedy(error: OSError, text: str) -> None:
    assert file_error_text(error) == text
