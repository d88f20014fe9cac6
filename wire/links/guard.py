"""Checks callers against the table of calls: by certificate, or on plaintext links by their tokens' proofs.

One guard serves one listening port. It also ends running calls as soon as their caller's credential is revoked.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
from collections import OrderedDict
from collections.abc import AsyncIterator
from typing import Any

from relayline.wire.links import role_tokens
from relayline.wire.links.refusals import Reason
from relayline.wire.links.revocation import LOOK_S, Revocations
from relayline.wire.links.roles import Credential, Identity, Proof, Role, call_named
from relayline.wire.links.security import LinkSecurity

CERTIFICATES_MAX = 64  # of callers, read once and remembered; the one longest unused is forgotten first
_BEARER = "Bearer "

_CALLER: contextvars.ContextVar[Credential | None] = contextvars.ContextVar("relayline_caller", default=None)


def credential() -> Credential | None:
    """Return the identity shown by the present call's caller.

    None where links have no credentials, and for proofs without a name: a coordinator's, or a pass.
    """
    return _CALLER.get()


def caller() -> Identity | None:
    """Return the caller of the call being handled, as far as its credential states it."""
    shown = _CALLER.get()
    return shown.identity if shown is not None else None


class CallerRefusedError(Exception):
    """A caller that may not make this call. Stays inside `wire.links.listening`."""

    def __init__(self, reason: Reason, detail: str = "") -> None:
        super().__init__(reason.value)
        self.reason, self.detail = reason, detail


class Guard:
    """The checks of one port. Event loop only."""

    def __init__(self, security: LinkSecurity, coordinator: Identity | None = None) -> None:
        """`coordinator`: the only one that may call; None: any of the CA's.

        Raises UsageError for a revocation list that cannot be used.
        """
        self._security, self._coordinator = security, coordinator
        self._token = role_tokens.read(security.token) if security.token else None
        self.revocations = Revocations(security)
        self._known: OrderedDict[bytes, Credential] = OrderedDict()
        self._under_way: dict[asyncio.Event, Credential] = {}
        self._watch: asyncio.Task[None] | None = None

    def check(self, method: str, context: Any) -> Credential | None:
        """Return the caller's identity, None if its credential has no name. Raises CallerRefusedError."""
        call = call_named(method)
        if call is None:
            raise CallerRefusedError(Reason.ROLE_WRONG, f"no role may call {method}")
        shown = _shown(context.invocation_metadata())
        if not self._security.is_tls:
            return self._proven(call.proof, shown) if self._security.token else None
        certified = self._certified(context.auth_context())
        if call.proof is Proof.NONE:
            return certified
        name, identity = method.rpartition("/")[2], certified.identity
        if self.revocations.is_revoked(certified):
            raise CallerRefusedError(Reason.REVOKED, f"{identity} called {name}")
        if identity is None:
            raise CallerRefusedError(Reason.ROLE_NONE)
        if identity.role not in call.roles:
            raise CallerRefusedError(Reason.ROLE_WRONG, f"{identity} called {name}")
        if identity.role is Role.COORDINATOR and self._coordinator not in (None, identity):
            raise CallerRefusedError(
                Reason.ROLE_WRONG, f"{identity} called {name}, but this stage belongs to {self._coordinator}"
            )
        if call.proof is Proof.STAGE and self._security.token:
            proven = self._proven(call.proof, shown)
            if proven is None or proven.identity is None or proven.identity.name != identity.name:
                raise CallerRefusedError(Reason.TOKEN_WRONG, f"{identity} showed another process's token")
        return certified

    def _proven(self, proof: Proof, shown: str | None) -> Credential | None:
        """Return the identity that a caller's token proves, None if it has no name. Raises CallerRefusedError."""
        if proof in (Proof.NONE, Proof.PASS):
            return None
        if shown is None:
            raise CallerRefusedError(Reason.TOKEN_MISSING)
        token = self._token
        is_joined = token is not None and token.role is Role.COORDINATOR  # stages call this port
        if proof is Proof.STAGE or (proof is Proof.PORT and is_joined):
            identity = role_tokens.joined_identity(self._security.token, shown, self.revocations.generation)
            if token is None or token.role is not Role.COORDINATOR or identity is None:
                raise CallerRefusedError(Reason.TOKEN_WRONG)
            return Credential(identity, self.revocations.generation(identity))
        if token is None or token.role is not Role.STAGE or not role_tokens.is_coordinator(token, shown):
            raise CallerRefusedError(Reason.TOKEN_WRONG)
        return None

    def _certified(self, auth: Any) -> Credential:
        pem = next(iter(auth.get("x509_pem_cert", ())), b"")
        known = self._known.get(pem)
        if known is None:
            from relayline.wire.links.tls_material import credential_of

            known = self._known[pem] = credential_of(pem)
            if len(self._known) > CERTIFICATES_MAX:
                self._known.popitem(last=False)
        self._known.move_to_end(pem)
        return known

    # --- calls under way ----------------------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def admitted(self, shown: Credential | None) -> AsyncIterator[asyncio.Event]:
        """Note a call for as long as it takes; the event is set once its caller's credential is revoked."""
        revoked = asyncio.Event()
        token = _CALLER.set(shown)
        if shown is not None:
            self._under_way[revoked] = shown
        if self._watch is None and (self._security.is_tls or self._security.token):
            self._watch = asyncio.create_task(self._look_again())
        try:
            yield revoked
        finally:
            self._under_way.pop(revoked, None)
            _CALLER.reset(token)

    async def _look_again(self) -> None:
        seen = -1  # others look too, and lists are handed over
        while True:
            self.revocations.look()
            if self.revocations.version != seen:
                seen = self.revocations.version
                self.end_revoked()
            await asyncio.sleep(LOOK_S)

    def end_revoked(self) -> None:
        """End every call whose caller's credential is revoked by now."""
        for revoked, shown in list(self._under_way.items()):
            if self.revocations.is_revoked(shown):
                revoked.set()

    def close(self) -> None:
        """Watch no more."""
        if self._watch is not None:
            self._watch.cancel()


def _shown(metadata: Any) -> str | None:
    sent = next((value for key, value in metadata or () if key == "authorization"), None)
    if sent is None:
        return None
    text = sent.decode(errors="replace") if isinstance(sent, bytes) else str(sent)
    return text.removeprefix(_BEARER)
