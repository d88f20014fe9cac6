"""`relayline chat`: one question, or a talk, with a server that answers in events."""

from __future__ import annotations

import contextlib
import http.server
import io
import json
import os
import pty
import subprocess
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from relayline.deploy.cli import chat as chats
from relayline.deploy.cli.chat import Answer, Chat, shown
from relayline.deploy.testing.processes import relayline
from relayline.wire.common.child_command import module_command
from relayline.wire.common.errors import UsageError


def event(text: str = "", finish: str | None = None, **more: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": finish}]} | more


USAGE = {"choices": [], "usage": {"completion_tokens": 5}}
FULL = 1  # a reply: the request is longer than the context
ANSWER = [event("Hel"), event("lo\n\x1b[2Jyou"), event(finish="stop"), USAGE]


class Server(http.server.ThreadingHTTPServer):
    """Answers each request with the next of its replies, events or an error, and keeps the bodies."""

    def __init__(self, replies: list[list[dict[str, Any]] | int]) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.replies, self.bodies = replies, list[Any]()
        self.models: object = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(http.server.BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps({"data": self.server.models}).encode())

    def do_POST(self) -> None:
        self.server.bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        reply = self.server.replies.pop(0)
        if isinstance(reply, int):
            self.send_response(400)
            self.end_headers()
            code = {"code": "context_length_exceeded"} if reply == FULL else {}
            self.wfile.write(json.dumps({"error": {"message": "too long"} | code}).encode())
            return
        self.send_response(200)
        self.end_headers()
        for each in reply:
            self.wfile.write(f"data: {json.dumps(each)}\n\n".encode())
        self.wfile.write(b"data: [DONE]\n\n")

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


@contextlib.contextmanager
def serving(*replies: list[dict[str, Any]] | int) -> Iterator[Server]:
    with Server(list(replies)) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def test_one_question_prints_the_answer_alone() -> None:
    with serving(ANSWER) as server:
        done = relayline("chat", "Who?", "--url", server.url, "--system", "Be kind.", "--max-tokens", "9")
    assert (done.returncode, done.stdout, done.stderr) == (0, "Hello\n\\x1b[2Jyou\n", "")
    (body,) = server.bodies
    assert body["messages"] == [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Who?"}]
    assert (body["max_tokens"], body["temperature"], "model" in body) == (9, 0.7, False)


@pytest.mark.parametrize(
    ("models", "more", "expected"),
    [
        ([{"id": "a", "default_parameters": {"temperature": 0.6}}], (), None),
        ([{"id": "a", "default_parameters": {"temperature": 0.6}}], ("--temperature", "0"), 0),
        ([{"id": "a", "default_parameters": {"top_k": 20}}], (), 0.7),
        ([{"id": "a"}, {"id": "b", "default_parameters": {"temperature": 0.6}}], ("--model", "b"), None),
        ([{"id": "a", "default_parameters": {"temperature": 0.6}}], ("--model", "b"), 0.7),
        ([{"id": "a", "default_parameters": None}], (), 0.7),
        ([None], (), 0.7),
        ("none", (), 0.7),
    ],
)
def test_a_temperature_is_sent_where_the_model_recommends_none(
    models: object, more: tuple[str, ...], expected: float | None
) -> None:
    with serving(ANSWER) as server:
        server.models = models
        done = relayline("chat", "Who?", "--url", server.url, *more)
    assert (done.returncode, done.stderr) == (0, "")
    assert server.bodies[0].get("temperature") == expected


@pytest.mark.parametrize(
    ("replies", "says"),
    [
        ([400], "too long"),
        ([[{"error": {"message": "a stage was lost"}}]], "a stage was lost"),
        ([[]], "does not answer with events in JSON"),
    ],
)
def test_an_error_is_one_line(replies: list[Any], says: str) -> None:
    with serving(*replies) as server:
        done = relayline("chat", "Who?", "--url", server.url)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("relayline: error: ")
    assert says in line


def talk(monkeypatch: pytest.MonkeyPatch, server: Server, *typed: str | type[BaseException]) -> None:
    lines = iter([*typed, EOFError])

    def read(_: str) -> str:
        line = next(lines)
        if isinstance(line, str):
            return line
        raise line

    monkeypatch.setattr("builtins.input", read)
    chats._talk(Chat({}), (server.url, ""))


def test_a_talk_remembers_what_was_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with serving(ANSWER, [event("b")], [event("c")]) as server:
        talk(monkeypatch, server, "one \\", "two", KeyboardInterrupt, "", "again", "/new", "afresh")
    first, second, third = (body["messages"] for body in server.bodies)
    assert first == [{"role": "user", "content": "one \ntwo"}]
    answer = {"role": "assistant", "content": "Hello\n\x1b[2Jyou"}
    assert second == [*first, answer, {"role": "user", "content": "again"}]
    assert third == [{"role": "user", "content": "afresh"}]
    printed = capsys.readouterr().out
    assert "(5 tokens, " in printed
    assert "\x1b[2J" not in printed


def test_a_question_that_fails_is_forgotten(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving([event("a")], 400, [event("c")]) as server:
        talk(monkeypatch, server, "one", "far too long", "two", "/exit", "never")
    assert [message["content"] for message in server.bodies[-1]["messages"]] == ["one", "a", "two"]
    seen = capsys.readouterr()
    assert seen.err == "relayline: error: too long\n"
    assert seen.out.count("/new begins another chat") == 2, "at the start, and after the failure"


def test_a_chat_that_outgrows_the_context_forgets_its_oldest_turns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving([event("1")], [event("2")], [event("3")], FULL, [event("4")], FULL, FULL, FULL) as server:
        talk(monkeypatch, server, "a", "b", "c", "d", "e")
    asked = [[message["content"] for message in body["messages"]] for body in server.bodies]
    assert asked[3:5] == [["a", "1", "b", "2", "c", "3", "d"], ["c", "3", "d"]]
    assert asked[5:] == [["c", "3", "d", "4", "e"], ["d", "4", "e"], ["e"]]
    seen = capsys.readouterr()
    assert seen.out.count("its oldest turns are forgotten") == 3
    assert seen.err == "relayline: error: too long\n", "a question that is too long by itself"


@pytest.mark.parametrize(("name", "is_dim"), [("dumb", False), ("xterm", True)])
def test_a_dumb_terminal_gets_no_escape_sequences(name: str, is_dim: bool) -> None:
    ours, theirs = pty.openpty()
    command = module_command("relayline.deploy.cli", "chat", "--url", "http://127.0.0.1:1")
    with subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, env=os.environ | {"TERM": name}
    ) as process:
        os.close(theirs)
        seen = b""
        while b"> " not in seen:
            seen += os.read(ours, 65_536)
        os.write(ours, b"\x04")  # Ctrl-D
        assert process.wait(60) == 0
    os.close(ours)
    assert (b"\x1b[2m" in seen) is is_dim
    assert is_dim or b"\x1b" not in seen


def test_figures_of_an_answer() -> None:
    answer = Answer(began_s=10.0)
    assert answer.figures() == "no answer"
    assert answer.take({"choices": [{"delta": {"reasoning_content": "hm"}}]}, 10.5) == ("hm", "")
    assert answer.take(event("a"), 11.0) == ("", "a")
    assert answer.figures() == "stopped"
    answer.take(event("b", "length"), 12.5)
    answer.take(USAGE, 12.6)
    assert answer.figures() == "5 tokens, 2.0 tok/s, the first after 500 ms, cut off: the limit of tokens is reached"
    assert (answer.text, answer.thoughts) == ("ab", "hm")


def test_text_of_a_model_cannot_steer_a_terminal() -> None:
    assert shown("a\tb\n\u2600\ufe0f") == "a\tb\n\u2600\ufe0f"
    assert shown("\x1b]0;x\x07\u202e\r") == "\\x1b]0;x\\x07\\u202e\\r"


@pytest.mark.parametrize(
    ("piped", "says"),
    [
        ("caf\udce9", "the question is not UTF-8; convert it, such as with iconv"),
        ("a" * (chats.QUESTION_CHARS_MAX + 1), "the question is longer than 1,048,576 characters; send less"),
    ],
)
def test_a_question_that_no_server_could_take_is_refused_here(
    piped: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(piped))
    with pytest.raises(UsageError) as refused:
        chats.chat_command.main(["--url", "http://127.0.0.1:1"], standalone_mode=False)
    assert refused.value.message == says
    with pytest.raises(UsageError, match="the system message is not UTF-8"):
        Chat({}, "\udcff").body("hello")
