"""A host's side of joining by a code: which pipeline has it, then the exchange. Blocks; before the event loop runs.

Only one coordinator is ever given a chance to test a code, however many say that they have it.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import http.client
import socket
import ssl
import threading
import time
from collections.abc import Sequence
from typing import TypeVar

import msgspec

from relayline.stage.joining.enrol import decoded, words_of
from relayline.wire.common import bounds
from relayline.wire.common.errors import ProtocolError, RelaylineError, StageLostError, UsageError, VersionError
from relayline.wire.common.texts import printable
from relayline.wire.links import code_exchange, enrolment
from relayline.wire.links.code_exchange import HostEnd, Invitation
from relayline.wire.links.join_code import JoinCode
from relayline.wire.links.security import address_of
from relayline.wire.links.tls_probe import unverified_context

M = TypeVar("M", bound=msgspec.Struct)
_LEAST_S = 0.05  # a socket's time-out of zero would be something else


@dataclasses.dataclass(frozen=True, slots=True)
class Coordinator:
    """Where a pipeline's hosts get their certificates."""

    host: str
    port: int

    @property
    def address(self) -> str:
        """host:port."""
        return address_of(self.host, self.port)


def invited(code: JoinCode, at: Coordinator) -> Invitation:
    """Return the join line that a code stands for, from this coordinator.

    Raises UnauthenticatedError for a code that is wrong or not open, and for an answer of somebody who does not know
    it; VersionError for a coordinator without codes; StageLostError where it cannot be reached; ProtocolError for
    another service.
    """
    end = HostEnd(code)
    begun = _post(at, code_exchange.PATH, code_exchange.Begin(code.slot, end.message), code_exchange.Begun)
    proof = code_exchange.Proof(begun.exchange, end.proof(begun.message))
    return end.open(_post(at, code_exchange.PROOF_PATH, proof, code_exchange.Sealed).sealed)


def holder_of(code: JoinCode, nearby: Sequence[tuple[str, Sequence[Coordinator]]]) -> Coordinator:
    """Return the one coordinator that says it has a code, of the pipelines (name, addresses) that were found.

    They are told the code's public digits alone. Takes NEARBY_SEARCH_S at most, whatever they answer. An address that
    several announce is one coordinator: anybody can repeat an announcement. Raises UsageError where several say so, and
    the refusal of those that do not where none does.
    """
    asked = _Asked(code, time.monotonic() + bounds.NEARBY_SEARCH_S)
    with concurrent.futures.ThreadPoolExecutor(bounds.NEARBY_MAX) as pool:  # a slow one delays no other
        answers = list(pool.map(lambda pipeline: asked.first_of(pipeline[1]), nearby))
    having: dict[Coordinator, str] = {}
    for (name, _), answer in zip(nearby, answers, strict=True):
        if isinstance(answer, Coordinator):
            having.setdefault(answer, name)
    if len(having) == 1:
        return next(iter(having))
    if having:
        names = ", ".join(
            f"{printable(name, bounds.NEARBY_TEXT_BYTES_MAX)} at {at.address}" for at, name in having.items()
        )
        raise UsageError(
            f"{len(having)} pipelines nearby have a code that begins with {code.slot}: {names}; name one: "
            f"relayline join HOST {code.slot}-..."
        )
    refusals = list(dict.fromkeys(answer for answer in answers if isinstance(answer, RelaylineError)))
    if len(refusals) == 1:
        raise refusals[0]
    names = ", ".join(printable(name, bounds.NEARBY_TEXT_BYTES_MAX) for name, _ in nearby)
    raise UsageError(
        f"none of the pipelines nearby ({names}) has a code that begins with {code.slot}; a code is good for "
        f"{bounds.JOIN_CODE_S // 60} min: `relayline invite STAGE`, on the coordinator's machine, prints a new one. "
        "Where the pipeline is not among them, give its address: relayline join HOST CODE"
    )


class _Asked:
    """What addresses said of a code: each is asked once, however many pipelines announce it. On any thread."""

    def __init__(self, code: JoinCode, until_s: float) -> None:
        """`until_s`: of the monotonic clock."""
        self._code, self._until_s = code, until_s
        self._answers: dict[Coordinator, concurrent.futures.Future[RelaylineError | None]] = {}
        self._lock = threading.Lock()

    def first_of(self, addresses: Sequence[Coordinator]) -> Coordinator | RelaylineError:
        """Return the first address at which the code is open, or why it is not."""
        refusal: RelaylineError | None = None
        silence: RelaylineError = UsageError("a pipeline nearby has no address")
        for n_left, at in zip(range(len(addresses), 0, -1), addresses, strict=True):  # any may be another pipeline's
            left_s = self._until_s - time.monotonic()
            if left_s <= 0:
                break
            problem = self._problem(at, left_s / n_left)  # a busy coordinator with one address has all the time
            if problem is None:
                return at
            if isinstance(problem, StageLostError):
                silence = problem
            else:
                refusal = refusal or problem
        return refusal or silence

    def _problem(self, at: Coordinator, wait_s: float) -> RelaylineError | None:
        with self._lock:
            is_first = at not in self._answers
            answer = self._answers.setdefault(at, concurrent.futures.Future())
        if is_first:
            try:
                answer.set_result(self._ask(at, wait_s))
            except BaseException as error:
                answer.set_exception(error)  # whoever waits for it would wait for ever
        return answer.result()

    def _ask(self, at: Coordinator, wait_s: float) -> RelaylineError | None:
        try:
            _call(at, f"{code_exchange.PATH}/{self._code.slot}", None, code_exchange.Slot, wait_s)
        except RelaylineError as error:
            return error
        return None


def _post(at: Coordinator, path: str, message: msgspec.Struct, kind: type[M]) -> M:
    return _call(at, path, msgspec.json.encode(message), kind, bounds.ENROL_ANSWER_S)


def _right_port(at: Coordinator) -> str:
    """Return a hint for a port that somebody may have taken from another line, such as that of the API."""
    if at.port == enrolment.PORT:
        return ""
    return f"; hosts join at the port that `relayline up` printed, {enrolment.PORT} unless its line says otherwise"


def _call(at: Coordinator, path: str, body: bytes | None, kind: type[M], timeout_s: float) -> M:
    """Make one call over its own connection, a POST if there is a body, within `timeout_s`."""
    until_s = time.monotonic() + timeout_s
    link = _Link(at, timeout_s)
    try:
        status, content = link.exchange(path, body)
    except (OSError, http.client.HTTPException) as error:
        if time.monotonic() >= until_s:
            raise StageLostError(f"{at.address} has not answered in time") from error
        if isinstance(error, ConnectionResetError):
            raise StageLostError(f"{at.address} ended the connection without an answer{_right_port(at)}") from error
        if isinstance(error, OSError) and not isinstance(error, ssl.SSLError):
            raise StageLostError(
                f"{at.address} cannot be reached: {words_of(error)}; is `relayline up` running there, and is port "
                f"{at.port} open in its firewall?"
            ) from error
        raise ProtocolError(
            f"{at.address} is not where hosts join a pipeline ({words_of(error)}){_right_port(at)}"
        ) from error
    if status == http.client.NOT_FOUND and _is_older(at, until_s - time.monotonic()):
        raise VersionError(
            f"the relayline at {at.address} is of an older version without codes; copy the long line, or upgrade it"
        )
    return decoded((status, content), kind, at.address)


def _is_older(at: Coordinator, timeout_s: float) -> bool:
    """Return whether a port without these calls is one of enrolment."""
    try:
        status, content = _Link(at, timeout_s).exchange(enrolment.PATH)
        msgspec.json.decode(content, type=enrolment.Welcome)
    except (OSError, http.client.HTTPException, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return False
    return status == http.client.OK


class _Link(http.client.HTTPSConnection):
    """A connection for one call that ends after a while, however slowly its peer sends.

    A socket's time-out is for each piece that comes. Nothing is trusted here but what the common key shows.
    """

    def __init__(self, at: Coordinator, whole_s: float) -> None:
        self._whole_s = max(whole_s, _LEAST_S)
        super().__init__(at.host, at.port, timeout=self._whole_s)
        self._line: socket.socket | None = None
        self._is_over = threading.Event()

    def exchange(self, path: str, body: bytes | None = None) -> tuple[int, bytes]:
        """Return status and content of the answer to a call. Raises OSError, HTTPException."""
        clock = threading.Timer(self._whole_s, self._end)
        clock.daemon = True
        clock.start()
        try:
            self.request("GET" if body is None else "POST", path, body)
            answer = self.getresponse()
            content = answer.read(bounds.ENROL_BYTES_MAX)
            if self._is_over.is_set():  # so it may be the half of one
                raise TimeoutError
            return answer.status, content
        finally:
            clock.cancel()
            self.close()
            if self._line is not None:
                self._line.close()

    def connect(self) -> None:
        """Connect, with a second handle of the connection: TLS takes the first for itself during its handshake."""
        bare = socket.create_connection((self.host, self.port), self._whole_s)
        self._line = bare.dup()
        if self._is_over.is_set():
            self._end()
        self.sock = unverified_context().wrap_socket(bare, server_hostname=self.host)

    def _end(self) -> None:
        """Let whoever waits for the peer wait no longer. On any thread."""
        self._is_over.set()
        line = self._line
        if line is not None:
            with contextlib.suppress(OSError):  # the peer has gone meanwhile
                line.shutdown(socket.SHUT_RDWR)
