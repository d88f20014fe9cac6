"""A Hugging Face hub on a loopback port: the part of its protocol that loading a file needs.

As the real one it holds no files itself. `resolve` answers with the file's facts, and with a signed address at a store
under another host name, which knows neither the facts nor the token. A request there that carries a token is refused.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import http.server
import json
import os
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlsplit

PART_BYTES = 1 << 16  # written in one go: more may not be sent where a caller leaves
COMMIT = hashlib.sha1(b"the only commit").hexdigest()


@dataclasses.dataclass
class Hub:
    """The hub's files, and the requests that it got. `files` are by ORG/REPO/FILE."""

    files: dict[str, bytes]
    token: str = ""  # required from every caller
    gated: bool = False
    knows_ranges: bool = True
    sends_other_parts: bool = False  # answers to a request for a part begin a byte later than was asked
    address_uses: int = 0  # requests that an address of the store is good for; 0: any number
    n_expired: int = 0  # requests for a part of a file that are refused, as at an address that has expired
    n_busy: int = 0  # and as by a hub that has too much to do
    n_busy_fronts: int = 0  # requests to the hub itself for a file that are refused so
    busy: tuple[int, dict[str, str]] = (503, {})  # the status and the headers of such a refusal
    is_down: bool = False  # every request gets 503
    on_part: Callable[[str, str], None] = lambda name, asked: None  # called with a file and the part that is asked for
    n_short: int = 0  # answers with a part of a file that say themselves that they hold half of it
    n_pages: int = 0  # requests for a part of a file that get a page of a proxy, as of one that wants a login
    n_cuts: int = 0  # answers with a part of a file whose connection breaks before their end
    moved: dict[str, str] = dataclasses.field(default_factory=dict)  # repositories that have another name now
    commit: str = COMMIT
    url: str = ""
    store_url: str = ""
    asked: list[tuple[str, str]] = dataclasses.field(default_factory=list)  # (method, path), of the store's files, too
    ranges: list[str] = dataclasses.field(default_factory=list)  # of partially requested files
    sent_bytes: int = 0  # of files
    n_tokens_leaked: int = 0  # requests to the store that carried a token
    uses: dict[str, int] = dataclasses.field(default_factory=dict)  # of each address that was given out
    etags: dict[int, tuple[bytes, str]] = dataclasses.field(default_factory=dict)  # by the identity of a file's bytes

    def etag_of(self, body: bytes) -> str:
        """Return a file's sha256, computed once."""
        known = self.etags.get(id(body))
        if known is None:
            known = self.etags[id(body)] = body, hashlib.sha256(body).hexdigest()
        return known[1]


class _Answers(http.server.BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        """Answer without a body."""
        self._answer(with_body=False)

    def do_GET(self) -> None:
        """Answer with one."""
        self._answer(with_body=True)

    def _answer(self, *, with_body: bool) -> None:
        raise NotImplementedError

    def _refuse_busy(self) -> None:
        status, headers = self.hub.busy
        self._reply(status, headers)

    def _refuse(self, status: int, code: str) -> None:
        self._reply(status, {"X-Error-Code": code})

    def _reply(self, status: int, headers: dict[str, str], body: bytes = b"") -> None:
        (self.send_response_only if "Date" in headers else self.send_response)(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


class _Front(_Answers):
    """The hub itself."""

    def _answer(self, *, with_body: bool) -> None:
        path = unquote(urlsplit(self.path).path).lstrip("/")
        self.hub.asked.append((self.command, path))
        if self.hub.is_down:
            return self._refuse(503, "")
        if self.hub.n_busy_fronts and "/resolve/" in path:
            self.hub.n_busy_fronts -= 1
            return self._refuse_busy()
        if self.hub.token and self.headers.get("Authorization") != f"Bearer {self.hub.token}":
            return self._refuse(401, "GatedRepo" if self.hub.gated else "RepoNotFound")
        if path.startswith("api/models/"):
            return self._list(path.removeprefix("api/models/").partition("/tree/")[0])
        repo, _, rest = path.partition("/resolve/")
        if repo in self.hub.moved:
            return self._reply(307, {"Location": f"/{self.hub.moved[repo]}/resolve/{quote(rest)}"})
        revision, _, file = rest.partition("/")
        if not any(name.startswith(f"{repo}/") for name in self.hub.files):
            return self._refuse(404, "RepoNotFound")
        if revision not in ("main", "v1", self.hub.commit):
            return self._refuse(404, "RevisionNotFound")
        body = self.hub.files.get(f"{repo}/{file}")
        if body is None:
            return self._refuse(404, "EntryNotFound")
        return self._lead_on(f"{repo}/{file}", body)

    def _lead_on(self, name: str, body: bytes) -> None:
        """Answer as for a file in the hub's Xet storage."""
        etag = self.hub.etag_of(body)
        signature = f"{len(self.hub.uses)}"
        self.hub.uses[signature] = 0
        xet_hash = hashlib.sha256(etag.encode()).hexdigest()
        self._reply(
            302,
            {
                "Location": f"{self.hub.store_url}/store/{quote(name)}?Expires=3600&Signature={signature}",
                "X-Repo-Commit": self.hub.commit,
                "X-Linked-Etag": f'"{etag}"',
                "X-Linked-Size": str(len(body)),
                "X-Xet-Hash": xet_hash,
                "Link": f'<{self.hub.url}/api/models/xet-read-token>; rel="xet-auth"',
                "ETag": '"of-the-redirect"',
            },
        )

    def _list(self, repo: str) -> None:
        names = [name.removeprefix(f"{repo}/") for name in self.hub.files if name.startswith(f"{repo}/")]
        if not names:
            return self._refuse(404, "RepoNotFound")
        entries = [{"type": "file", "path": name, "size": 1, "oid": self.hub.commit} for name in names]
        return self._reply(200, {"Content-Type": "application/json"}, json.dumps(entries).encode())


class _Store(_Answers):
    """Others, who store the hub's files. What an address is signed for is a GET."""

    def _answer(self, *, with_body: bool) -> None:
        parts = urlsplit(self.path)
        name = unquote(parts.path).removeprefix("/store/")
        org, repo, file = name.split("/", 2)
        self.hub.asked.append((self.command, f"{org}/{repo}/resolve/{self.hub.commit}/{file}"))
        signature, asked = parse_qs(parts.query).get("Signature", [""])[0], self.headers.get("Range", "")
        if self.headers.get("Authorization"):
            self.hub.n_tokens_leaked += 1
            return self._refuse(400, "")
        if not with_body or self._is_expired(signature, asked):
            return self._refuse(403, "")
        if asked and self.hub.n_busy:
            self.hub.n_busy -= 1
            return self._refuse_busy()
        if asked and self.hub.n_pages:
            self.hub.n_pages -= 1
            return self._reply(200, {"Content-Type": "text/html"}, b"<html>Log in</html>")
        return self._send(name, asked)

    def _is_expired(self, signature: str, asked: str) -> bool:
        if asked and self.hub.n_expired:
            self.hub.n_expired -= 1
            return True
        if signature not in self.hub.uses:
            return True
        self.hub.uses[signature] += 1
        return bool(self.hub.address_uses) and self.hub.uses[signature] > self.hub.address_uses

    def _send(self, name: str, asked: str) -> None:
        body = self.hub.files.get(name, b"")
        status, headers = 200, {"ETag": '"of-the-store"'}
        if asked and self.hub.knows_ranges:
            self.hub.on_part(name, asked)
            self.hub.ranges.append(asked)
            first, _, last = asked.removeprefix("bytes=").partition("-")
            start, n_bytes = int(first) + self.hub.sends_other_parts, len(body)
            body = body[start : int(last) + 1 if last else n_bytes]
            if self.hub.n_short:
                self.hub.n_short -= 1
                body = body[: len(body) // 2]
            status, headers["Content-Range"] = 206, f"bytes {start}-{start + len(body) - 1}/{n_bytes}"
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if asked and self.hub.n_cuts:
            self.hub.n_cuts -= 1
            self.close_connection = True
            body = body[: len(body) // 2]
        for part in range(0, len(body), PART_BYTES):
            self.wfile.write(body[part : part + PART_BYTES])
            self.hub.sent_bytes += min(PART_BYTES, len(body) - part)


def hub_environment(hub_url: str, home: Path) -> dict[str, str]:
    """Return the variables of a process that loads from this hub, and keeps it under `home`."""
    unset = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    return unset | {
        "HF_ENDPOINT": hub_url, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1", "XDG_CACHE_HOME": str(home / "cache"),
    }  # fmt: skip


@contextlib.contextmanager
def serving(hub: Hub) -> Iterator[Hub]:
    """Serve a hub and its store for the length of a with block."""
    with _answering(hub, _Front) as port, _answering(hub, _Store) as store_port:
        hub.url, hub.store_url = f"http://127.0.0.1:{port}", f"http://localhost:{store_port}"
        yield hub


class _Server(http.server.ThreadingHTTPServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of callers that have gone."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


@contextlib.contextmanager
def _answering(hub: Hub, answers: type[_Answers]) -> Iterator[int]:
    handler = type("Handler", (answers,), {"hub": hub})
    server = _Server(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), name="hub", daemon=True)
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
