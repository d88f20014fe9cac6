"""A Hugging Face hub on a loopback port: the part of its protocol that loading a file needs."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import http.server
import json
import threading
from collections.abc import Iterator
from urllib.parse import unquote, urlsplit

COMMIT = hashlib.sha1(b"the only commit").hexdigest()


@dataclasses.dataclass
class Hub:
    """The hub's files, and the requests that it got. `files` are by ORG/REPO/FILE."""

    files: dict[str, bytes]
    token: str = ""  # required from every caller
    gated: bool = False
    knows_ranges: bool = True
    n_cuts: int = 0  # answers with a part of a file whose connection breaks before their end
    url: str = ""
    asked: list[tuple[str, str]] = dataclasses.field(default_factory=list)  # (method, path)
    ranges: list[str] = dataclasses.field(default_factory=list)  # of partially requested files


class _Handler(http.server.BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def _answer(self, *, with_body: bool) -> None:
        path = unquote(urlsplit(self.path).path).lstrip("/")
        self.hub.asked.append((self.command, path))
        if self.hub.token and self.headers.get("Authorization") != f"Bearer {self.hub.token}":
            return self._refuse(401, "GatedRepo" if self.hub.gated else "RepoNotFound")
        if path.startswith("api/models/"):
            return self._list(path.removeprefix("api/models/").partition("/tree/")[0])
        repo, _, rest = path.partition("/resolve/")
        revision, _, file = rest.partition("/")
        if not any(name.startswith(f"{repo}/") for name in self.hub.files):
            return self._refuse(404, "RepoNotFound")
        if revision not in ("main", "v1", COMMIT):
            return self._refuse(404, "RevisionNotFound")
        body = self.hub.files.get(f"{repo}/{file}")
        if body is None:
            return self._refuse(404, "EntryNotFound")
        etag, asked = hashlib.sha256(body).hexdigest(), self.headers.get("Range", "")
        if with_body and asked and self.hub.knows_ranges:
            self.hub.ranges.append(asked)
            first, _, last = asked.removeprefix("bytes=").partition("-")
            start, n_bytes = int(first), len(body)
            body = body[start : int(last) + 1 if last else n_bytes]
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {start}-{start + len(body) - 1}/{n_bytes}")
        else:
            self.send_response(200)
        self.send_header("ETag", f'"{etag}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if with_body and asked and self.hub.n_cuts:
            self.hub.n_cuts -= 1
            self.close_connection = True
            body = body[: len(body) // 2]
        if with_body:
            self.wfile.write(body)
        return None

    def _list(self, repo: str) -> None:
        names = [name.removeprefix(f"{repo}/") for name in self.hub.files if name.startswith(f"{repo}/")]
        if not names:
            return self._refuse(404, "RepoNotFound")
        entries = [{"type": "file", "path": name, "size": 1, "oid": COMMIT} for name in names]
        body = json.dumps(entries).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
        return None

    def _refuse(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextlib.contextmanager
def serving(hub: Hub) -> Iterator[Hub]:
    """Serve a hub for the length of a with block."""
    handler = type("Handler", (_Handler,), {"hub": hub})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), name="hub", daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
