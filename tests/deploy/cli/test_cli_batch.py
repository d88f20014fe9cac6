"""`relayline batch` as a process: what it prints, its exit codes, and that it goes on after a kill."""

from __future__ import annotations

import contextlib
import http.server
import json
import socketserver
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from relayline.coordinator.batches.asking import Progress
from relayline.deploy.cli.batch import batch_command, progress_line
from relayline.deploy.cli.batches import batches_line
from relayline.deploy.testing.processes import relayline
from relayline.wire.common.child_command import module_command
from relayline.wire.common.errors import StartError

WAIT_S = 60


class Server(http.server.ThreadingHTTPServer):
    """Answers completions; those whose prompt begins with "bad" get 400, and one of "hold" none until released."""

    daemon_threads = True

    def __init__(self, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.prompts, self.keys = list[str](), set[str]()
        self.held, self.released = threading.Event(), threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(http.server.BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self._send(200, {"lanes": 2} if self.path == "/v1/pipeline" else {})

    def do_POST(self) -> None:
        prompt = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["prompt"]
        self.server.prompts.append(prompt)
        self.server.keys.add(self.headers.get("Authorization", ""))
        if prompt == "hold":
            self.server.held.set()
            self.server.released.wait(WAIT_S)
        found = {"text": prompt, "usage": {"completion_tokens": 2}}
        is_bad = prompt.startswith("bad")
        with contextlib.suppress(OSError):  # the client was killed
            self._send(400 if is_bad else 200, {"error": {"message": "no"}} if is_bad else found)

    def _send(self, status: int, body: Any) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


@pytest.fixture
def server() -> Iterator[Server]:
    with serving() as made:
        yield made


@contextlib.contextmanager
def serving(port: int = 0) -> Iterator[Server]:
    with Server(port) as made:
        thread = threading.Thread(target=made.serve_forever)
        thread.start()
        yield made
        made.released.set()
        made.shutdown()
        thread.join()


def batch_file(tmp_path: Path, *prompts: str) -> Path:
    path = tmp_path / "in.jsonl"
    lines = [
        json.dumps({"custom_id": f"id-{at}", "method": "POST", "url": "/v1/completions", "body": {"prompt": prompt}})
        for at, prompt in enumerate(prompts)
    ]
    path.write_text("\n".join(lines) + "\n")
    return path


def ids(path: Path) -> list[str]:
    return sorted(json.loads(line)["custom_id"] for line in path.read_text().splitlines())


def test_all_are_answered(server: Server, tmp_path: Path) -> None:
    key, out = tmp_path / "key", tmp_path / "out.jsonl"
    key.write_text("secret\n")
    path = batch_file(tmp_path, "a", "b", "c")
    command = ("batch", str(path), "-o", str(out), "--url", server.url + "/v1", "--api-key-file", str(key))
    done = relayline(*command)
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert first == f"3 answered in {out}, 0 failed"
    assert second.startswith("this run: 3 requests and 6 tokens in ")
    assert done.stderr.splitlines() == [f"{server.url}: 3 of 3 requests, 3 at a time"]
    assert (ids(out), server.keys) == (["id-0", "id-1", "id-2"], {"Bearer secret"})
    again = relayline(*command)
    assert (again.returncode, again.stdout, again.stderr) == (0, f"{first}\n", "")
    assert len(server.prompts) == 3, "nothing is asked twice"


def test_failed_requests_are_exit_code_1_and_may_be_asked_again(server: Server, tmp_path: Path) -> None:
    out, errors = tmp_path / "out.jsonl", tmp_path / "errors.jsonl"
    command = ("batch", str(batch_file(tmp_path, "a", "bad b")), "-o", str(out), "--url", server.url)
    done = relayline(*command)
    assert (done.returncode, done.stdout.splitlines()[0]) == (1, f"1 answered in {out}, 1 failed")
    assert ids(out) == ["id-0", "id-1"]
    again = relayline(*command, "--retry-failed", "--errors", str(errors))
    assert again.returncode == 1
    assert again.stdout.splitlines()[0] == f"1 answered in {out}, 1 failed in {errors}"
    assert (ids(out), ids(errors), sorted(server.prompts)) == (["id-0"], ["id-1"], ["a", "bad b", "bad b"])


def test_it_goes_on_after_a_kill(server: Server, tmp_path: Path) -> None:
    path, out = batch_file(tmp_path, "a", "hold", "b"), tmp_path / "out.jsonl"
    arguments = ["batch", str(path), "-o", str(out), "--url", server.url, "--streams", "1"]
    process = subprocess.Popen(module_command("relayline.deploy.cli", *arguments), stderr=subprocess.DEVNULL)
    try:
        assert server.held.wait(WAIT_S)
    finally:
        process.kill()
        process.wait(WAIT_S)
    assert ids(out) == ["id-0"]
    out.write_bytes(out.read_bytes() + b'{"id": "batch_req_1", "custom')  # what a power cut leaves
    server.released.set()
    done = relayline(*arguments)
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines()[:2] == [
        f"{out}: its last line was half written; that request is asked again",
        f"{server.url}: 2 of 3 requests, 1 at a time",
    ]
    assert (ids(out), server.prompts) == (["id-0", "id-1", "id-2"], ["a", "hold", "hold", "b"])


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["-o", "{in}"], "--output and IN.jsonl are the same file"),
        (["-o", "{dir}/out", "--errors", "{in}"], "--errors and IN.jsonl are the same file"),
        (["-o", "{dir}/out", "--api-key-file", "{in}"], "must have one API key and nothing else"),
        (["-o", "{dir}/out", "--url", "nowhere"], "is not a URL"),
        ([], "name the file of the answers with -o OUT.jsonl"),
    ],
)
def test_mistakes_are_one_line(tmp_path: Path, more: list[str], says: str) -> None:
    path = batch_file(tmp_path, "a", "b")
    done = relayline("batch", str(path), *(each.format_map({"in": path, "dir": tmp_path}) for each in more))
    assert (done.returncode, done.stdout) == (2, "")
    assert says in done.stderr.splitlines()[-1]


def test_a_bad_input_is_refused_before_the_first_request(server: Server, tmp_path: Path) -> None:
    path, out = batch_file(tmp_path, "a", "b"), tmp_path / "out.jsonl"
    path.write_text(path.read_text() + "{\n" + '{"custom_id": "x"}\n')
    done = relayline("batch", str(path), "-o", str(out), "--url", server.url)
    assert (done.returncode, done.stdout, server.prompts, out.exists()) == (2, "", [], False)
    first, second = done.stderr.splitlines()
    assert first.startswith(f"relayline: error: {path}, line 3: it is no JSON")
    assert second == f'relayline: error: {path}, line 4: its method is missing; it must be "POST"'
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:2]))
    checked = relayline("batch", str(path), "--check")
    assert (checked.returncode, checked.stdout) == (0, f"{path} has 2 requests and no mistake\n")


def test_no_server_is_exit_code_1(tmp_path: Path) -> None:
    with Server() as closed:
        url = closed.url
    done = relayline("batch", str(batch_file(tmp_path, "a")), "-o", str(tmp_path / "out"), "--url", url, "--wait", "0")
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"relayline: error: {url} does not answer (Connection refused)")


@pytest.mark.parametrize("flags", [(), ("--streams", "2")])
def test_without_wait_a_server_that_never_answered_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...]
) -> None:
    with Server() as closed:
        url = closed.url
    monkeypatch.setattr("relayline.deploy.cli.batch.FIRST_ANSWER_S", 0.0)
    arguments = ["batch", str(batch_file(tmp_path, "a")), "-o", str(tmp_path / "out"), "--url", url, *flags]
    with pytest.raises(StartError, match=r"does not answer \(Connection refused\)"):
        batch_command.main(arguments[1:], standalone_mode=False)


def refusal_at(url: str, tmp_path: Path) -> str:
    """Return why a batch does not begin."""
    arguments = [str(batch_file(tmp_path, "a")), "-o", str(tmp_path / "out"), "--url", url]
    with pytest.raises(StartError) as caught:
        batch_command.main(arguments, standalone_mode=False)
    return caught.value.message


def test_a_port_without_tls_or_without_http_is_called_so(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("relayline.deploy.cli.batch.FIRST_ANSWER_S", 0.0)
    secure = server.url.replace("http:", "https:")
    assert refusal_at(secure, tmp_path) == f"{secure} does not answer: its port speaks no TLS; give {server.url}"

    class Other(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            self.request.recv(1 << 16)  # bytes that nobody reads would reset the connection
            self.wfile.write(b"SSH-2.0-other\r\n\r\n")

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Other) as other:
        threading.Thread(target=other.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{other.server_address[1]}"
        assert refusal_at(url, tmp_path).startswith(f"{url} does not answer (what listens there speaks no HTTP); ")
        other.shutdown()


def test_a_server_that_is_away_at_the_start_is_waited_for(tmp_path: Path) -> None:
    with Server() as closed:
        port = closed.server_port
    out = tmp_path / "out.jsonl"
    arguments = ["batch", str(batch_file(tmp_path, "a")), "-o", str(out), "--url", f"http://127.0.0.1:{port}"]
    command = module_command("relayline.deploy.cli", *arguments, "--wait", "3600")
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as run:
        assert run.stderr is not None
        assert run.stderr.readline() == (
            f"http://127.0.0.1:{port} does not answer (Connection refused); trying again for 1 h 0 min\n"
        )
        with serving(port):
            done, _ = run.communicate(timeout=WAIT_S)
    assert run.returncode == 0
    assert "1 answered" in done


def test_status_says_how_far_batches_are() -> None:
    counts = {"running": 1, "waiting": 2, "requests_waiting": 1_030, "requests_done": 12, "requests_failed": 3}
    assert batches_line(counts) == ("batches: 1 running, 2 waiting, 12 requests done, 3 of them failed, 1,030 to do")
    assert batches_line(dict.fromkeys(counts, 0)) == batches_line({}) == ""


def test_progress_says_what_is_left() -> None:
    progress = Progress(0.0, n_answered=900, n_failed=100, n_tokens=123_456, n_in_flight=8, trouble="")
    assert progress_line(progress, 3_000, 7_200.0) == (
        "1,000 of 3,000 done, 100 failed, 8 in flight, 17.1 tok/s, 4 h 0 min left"
    )
    progress.trouble = "the server answers 503: loading"
    assert progress_line(progress, 3_000, 1.0).endswith(", trying again: the server answers 503: loading")
    assert progress_line(Progress(0.0), 5, 1.0) == "0 of 5 done, 0 failed, 0 in flight"
