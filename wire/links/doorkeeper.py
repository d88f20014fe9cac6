"""Watches the connections of a TLS port, because gRPC does not report the ones it refuses.

gRPC asks for the server's certificate before each handshake. That call has two uses here: to pass on a certificate
renewed on disk, and to look at the new connection. Its first bytes are peeked and left for gRPC. They tell plaintext
from TLS, and carry the reason of a refused relayline client (`wire.links.refusals`). A connection that closes soon
without a call was refused too, by one side or the other.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import select
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import grpc

from relayline.wire.common.errors import UsageError
from relayline.wire.links.refusals import ALPN_PROBE, ALPN_REFUSED_PREFIX, Reason, plain_host, reason_named
from relayline.wire.links.security import is_loopback
from relayline.wire.links.tls_material import check_material, read_material

log = logging.getLogger("relayline.security")

Peer = tuple[str, int]
OnRefused = Callable[[str, Reason], None]

FIRST_BYTES_WAIT_S = 0.5  # a client speaks at once; this covers a busy machine, and holds up one handshake only
WAITED_MAX_S = 1.0  # in a second for first bytes, by all of gRPC's threads together: some clients never speak
SETTLED_AFTER_S = 5.0  # a handshake has succeeded or failed by then, and a refused client has said why
PENDING_MAX = 256  # connections that are watched at a time; more come unwatched
LOOKS_PER_S_MAX = 20  # a flood of connections is not looked at one by one
_HELLO_BYTES_MAX = 16 * 1024
_WORD = re.compile(rf"{ALPN_PROBE}|{ALPN_REFUSED_PREFIX}([a-z-]+)".encode())
_HTTP_STARTS = (b"PRI ", b"GET ", b"POST", b"HEAD", b"OPTI", b"PUT ")
_TLS_HANDSHAKE = b"\x16"


class Doorkeeper:
    """Certificates of one TLS port and a watch over it. Made on the event loop; gRPC calls it on its own threads."""

    def __init__(self, files: tuple[Path, Path, Path], on_refused: OnRefused) -> None:
        """Take CA, certificate and key; `on_refused(host, reason)` is called on the event loop."""
        self.port = 0  # set when the port is known; connections are watched from then on
        self._files, self._on_refused = files, on_refused
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()  # over what gRPC's threads touch: the six below
        self._stamp = _stamp(files)
        self._known: set[Peer] = set()
        self._second, self._looks, self._waited_s = 0, 0, 0.0
        self._closed = False
        self._pending: dict[Peer, asyncio.TimerHandle] = {}  # event loop only
        self._reports: dict[str, float] = {}  # host -> when it said itself why it was refused, on the loop's clock

    def credentials(self) -> grpc.ServerCredentials:
        """Return gRPC's credentials: certificates demanded of every client, own ones renewed without a restart."""
        return grpc.dynamic_ssl_server_credentials(
            self._configuration(), self._connection_came, require_client_authentication=True
        )

    def welcome(self, peer: Peer) -> None:
        """Take note that a connection made a call, so its handshake went well.

        Its host's other connections are no strangers then, such as the one that waits for a coordinator to start. Only
        processes of this machine share an address without sharing credentials.
        """
        host = peer[0]
        for known in [peer] if is_loopback(host) else [other for other in self._pending if other[0] == host]:
            if (pending := self._pending.pop(known, None)) is not None:
                pending.cancel()

    def close(self) -> None:
        """Stop watching."""
        with self._lock:
            self._closed = True
        for pending in self._pending.values():
            pending.cancel()
        self._pending.clear()

    def _configuration(self) -> grpc.ServerCertificateConfiguration:
        material = read_material(*self._files)
        return grpc.ssl_server_certificate_configuration([(material.key, material.cert)], material.ca)

    # --- on gRPC's threads --------------------------------------------------------------------------------------------

    def _connection_came(self) -> grpc.ServerCertificateConfiguration | None:
        try:
            self._look()
            return self._renewed()
        except Exception:  # an exception here would refuse a client that did nothing wrong
            log.exception("the watch over the TLS port failed")
            return None

    def _renewed(self) -> grpc.ServerCertificateConfiguration | None:
        stamp = _stamp(self._files)
        with self._lock:
            if stamp == self._stamp:
                return None
            self._stamp = stamp
        try:
            check_material(*self._files)
            configuration = self._configuration()
        except UsageError as error:
            log.warning("keeping the old certificate: %s", error.message)
            return None
        log.info("took up the renewed certificate %s", self._files[1])
        return configuration

    def _look(self) -> None:
        with self._lock:
            second = int(time.monotonic())
            if second != self._second:
                self._second, self._looks, self._waited_s = second, 0, 0.0
            self._looks += 1
            if self._closed or not self.port or self._looks > LOOKS_PER_S_MAX:
                return
            found = _connections(self.port)
            newcomers = {peer: fd for peer, fd in found.items() if peer not in self._known}
            self._known = set(found)
        for peer, fd in newcomers.items():
            first = self._first_bytes(fd)
            with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
                self._loop.call_soon_threadsafe(self._came, peer, first)

    def _first_bytes(self, fd: int) -> bytes:
        """Peek at the first bytes of a connection. Of the time that is left for waiting, half is left to others."""
        began_s = time.monotonic()
        with self._lock:
            second, wait_s = self._second, min(FIRST_BYTES_WAIT_S, (WAITED_MAX_S - self._waited_s) / 2)
            self._waited_s += wait_s
        first = _first_bytes(fd, wait_s)
        with self._lock:
            if second == self._second:
                self._waited_s -= max(0.0, wait_s - (time.monotonic() - began_s))
        return first

    # --- on the event loop --------------------------------------------------------------------------------------------

    def _came(self, peer: Peer, first: bytes) -> None:
        host = peer[0]
        word = _WORD.search(first)
        if word is not None:
            reason = reason_named((word[1] or b"").decode())
            if reason is not None:
                self._reports = {
                    h: at for h, at in self._reports.items() if at > self._loop.time() - 2 * SETTLED_AFTER_S
                }
                self._reports[host] = self._loop.time()
                self._on_refused(host, reason)
        elif first.startswith(_HTTP_STARTS):
            self._on_refused(host, Reason.PLAINTEXT_CLIENT)
        elif first.startswith(_TLS_HANDSHAKE) and len(self._pending) < PENDING_MAX and not self._closed:
            if (before := self._pending.get(peer)) is not None:  # a connection from there that has ended
                before.cancel()
            self._pending[peer] = self._loop.call_later(SETTLED_AFTER_S, self._settled, peer)

    def _settled(self, peer: Peer) -> None:
        del self._pending[peer]
        has_reported = self._reports.get(peer[0], float("-inf")) > self._loop.time() - 2 * SETTLED_AFTER_S
        if not has_reported and peer not in _connections(self.port):
            self._on_refused(peer[0], Reason.UNKNOWN)


def _stamp(files: tuple[Path, ...]) -> tuple[tuple[int, int], ...]:
    """Return what changes when a file is replaced; a missing file counts as unchanged-able."""
    found = []
    for path in files:
        try:
            status = path.stat()
            found.append((status.st_mtime_ns, status.st_ino))
        except OSError:
            found.append((0, 0))
    return tuple(found)


def _connections(port: int) -> dict[Peer, int]:
    """Return the file descriptors of this process's connections to its local port, by peer. Empty without /dev/fd."""
    found: dict[Peer, int] = {}
    try:
        names = os.listdir("/dev/fd")
    except OSError:
        return found
    for name in names:
        try:
            borrowed = socket.socket(fileno=int(name))
        except (OSError, ValueError):
            continue  # not a socket, or closed since
        try:
            if borrowed.family in (socket.AF_INET, socket.AF_INET6) and borrowed.getsockname()[1] == port:
                host, peer_port, *_ = borrowed.getpeername()
                found[plain_host(host), peer_port] = int(name)
        except OSError:
            pass  # the listening socket itself, or a connection that has just gone
        finally:
            borrowed.detach()  # it belongs to gRPC
    return found


def _first_bytes(fd: int, timeout_s: float) -> bytes:
    """Peek at the first bytes of a connection; empty if none came within `timeout_s`."""
    try:
        borrowed = socket.socket(fileno=fd)
    except OSError:
        return b""
    try:
        waiting = select.poll()
        waiting.register(fd, select.POLLIN)
        waiting.poll(timeout_s * 1_000)
        return borrowed.recv(_HELLO_BYTES_MAX, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except OSError:
        return b""
    finally:
        borrowed.detach()
