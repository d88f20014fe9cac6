"""The calls of joining by a code, at the port of enrolment. What travels is in `wire.links.code_exchange`.

The decisions are those of `coordinator.joining.codes`. Arithmetic and files are left to threads.
"""

from __future__ import annotations

import asyncio
import dataclasses
import datetime
import functools
import logging
import secrets
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

import msgspec
from aiohttp import web

from relayline.coordinator.http.edge.middleware import response_of
from relayline.coordinator.joining.codes import CodedInvitation, Exchanges, WrongTries, checked, new_line, wrong
from relayline.coordinator.joining.config import Authority
from relayline.wire.common.errors import (
    NotReadyError,
    ProtocolError,
    RelaylineError,
    UnauthenticatedError,
    http_status,
)
from relayline.wire.common.tasks import start_among
from relayline.wire.links import code_exchange, enrolment
from relayline.wire.links.code_exchange import CoordinatorEnd
from relayline.wire.links.join_code import JoinCode

log = logging.getLogger("relayline.coordinator")

M = TypeVar("M", bound=msgspec.Struct)
Call = Callable[[web.Request], Awaitable[msgspec.Struct]]
_NAME_BYTES = 16  # of an exchange


@dataclasses.dataclass(frozen=True, slots=True)
class _Exchange:
    code: JoinCode
    end: CoordinatorEnd


class CodeCalls:
    """Event loop only."""

    def __init__(self, authority: Authority, pipeline: str) -> None:
        """`pipeline` is its name."""
        self._authority, self._pipeline = authority, pipeline
        self._exchanges: Exchanges[_Exchange] = Exchanges()
        self._wrong = WrongTries()
        self._one_at_a_time = asyncio.Lock()  # a wrong try is counted before the next one is looked at
        self._deciding = set[asyncio.Task[CodedInvitation]]()  # as many as exchanges may begin, at most
        self.address = ""
        """Where hosts enrol, host:port, as a join line has it; empty until they can."""

    def add_to(self, app: web.Application) -> None:
        """Add the calls to an application."""
        app.router.add_get(f"{code_exchange.PATH}/{{slot:[0-9]{{3}}}}", self._answering(self._slot))
        app.router.add_post(code_exchange.PATH, self._answering(self._begin))
        app.router.add_post(code_exchange.PROOF_PATH, self._answering(self._prove))

    async def _slot(self, request: web.Request) -> msgspec.Struct:
        """GET: say whether a code is open."""
        await self._open(int(request.match_info["slot"]))
        return code_exchange.Slot(self._pipeline)

    async def _begin(self, request: web.Request) -> msgspec.Struct:
        """Answer a host's first message."""
        asked = _read(await request.read(), code_exchange.Begin)
        found = await self._open(asked.slot)
        self._exchanges.check_rate(time.monotonic_ns())
        end = await asyncio.to_thread(CoordinatorEnd, found.code, asked.message)
        name = secrets.token_hex(_NAME_BYTES)
        self._exchanges.begin(name, _Exchange(found.code, end), time.monotonic_ns())
        return code_exchange.Begun(name, end.message)

    async def _prove(self, request: web.Request) -> msgspec.Struct:
        """Give the invitation to a host that knows the code, or count a wrong try."""
        asked = _read(await request.read(), code_exchange.Proof)
        exchange = self._exchanges.end(asked.exchange, time.monotonic_ns())
        deciding = start_among(self._deciding, self._decide(exchange, asked.proof))
        try:
            found = await asyncio.shield(deciding)
        except asyncio.CancelledError:  # a host that hangs up is counted and logged, too
            deciding.add_done_callback(functools.partial(_left, request))
            raise
        invitation = code_exchange.Invitation(self._pipeline, self.address, found.token, found.is_relayed)
        log.info("invited by code", extra={"fields": {"stage": found.name, "from": request.remote or ""}})
        return code_exchange.Sealed(exchange.end.seal(invitation))

    async def _decide(self, exchange: _Exchange, proof: str) -> CodedInvitation:
        """Return the invitation of a host that knows the code. Raises UnauthenticatedError."""
        async with self._one_at_a_time:
            found = await self._open(exchange.code.slot)
            if found.code != exchange.code:  # a newer one that begins alike
                raise UnauthenticatedError("the code was replaced by a newer one; use that")
            if exchange.end.is_right(proof):
                return found
            counted = self._wrong.count(found)
            try:
                await asyncio.to_thread(self._authority.note_wrong, found.code, counted.n_wrong)
            except OSError as error:
                self._wrong.make_void(counted)
                why = f"it could not be written down on the coordinator's machine ({_words(error)})"
                raise UnauthenticatedError(f"the code is wrong, and void now: {why}; {new_line(found.name)}") from error
            raise wrong(counted)

    async def _open(self, slot: int) -> CodedInvitation:
        try:
            found = await asyncio.to_thread(self._authority.coded, slot)
        except OSError as error:
            raise NotReadyError(f"codes cannot be read on the coordinator's machine: {_words(error)}") from error
        known = self._wrong.known(found) if found is not None else None
        return checked(known, slot, datetime.datetime.now(datetime.UTC), self.address)

    def _answering(self, call: Call) -> Callable[[web.Request], Awaitable[web.Response]]:
        async def handler(request: web.Request) -> web.Response:
            status = 200
            try:
                answer = await call(request)
            except RelaylineError as error:
                # Each host that joins a pipeline asks all pipelines around it which of them has its code.
                _log_refused(request, error, logging.INFO if request.method == "GET" else logging.WARNING)
                status, answer = http_status(error), enrolment.Refusal(error.label, error.message)
            return response_of(answer, status)

        return handler


def _read(body: bytes, kind: type[M]) -> M:
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        text = "this is no message of an exchange by code; run the same relayline version on both ends"
        raise ProtocolError(text) from error


def _left(request: web.Request, decided: asyncio.Task[CodedInvitation]) -> None:
    """Log how it ended for a host that had hung up."""
    if not decided.cancelled() and isinstance(error := decided.exception(), RelaylineError):
        _log_refused(request, error, logging.WARNING)


def _log_refused(request: web.Request, error: RelaylineError, level: int) -> None:
    log.log(level, "code refused", extra={"fields": {"from": request.remote or "", "reason": error.message}})


def _words(error: OSError) -> str:
    return error.strerror or str(error)
