"""Enrolment: invitations, and the decision about one request. Pure: time is an argument.

An invitation is for one stage and one key. The first request that shows its secret binds it to the key of that request.
The same host may ask again with the same key, because an answer can get lost. No other key is accepted.
"""

from __future__ import annotations

import dataclasses
import datetime
import hmac
from collections import OrderedDict, deque

from relayline.wire.common import bounds
from relayline.wire.common.errors import OverloadedError, UnauthenticatedError
from relayline.wire.common.texts import named_stage
from relayline.wire.links.enrolment import digest_of
from relayline.wire.links.roles import Identity
from relayline.wire.links.security import credential_host, is_loopback

_NOBODY = digest_of(b"")  # compared with where there is no invitation, so that both refusals take the same time
_NEW_LINE = "`relayline invite {name}`, on the coordinator's machine, prints a new line"


@dataclasses.dataclass(frozen=True, slots=True)
class Invitation:
    """One token that was handed out."""

    stage: Identity
    """Whom the certificate will name."""
    digest: str = dataclasses.field(repr=False)
    """`digest_of` its secret."""
    expires: datetime.datetime
    """With its zone."""
    key_digest: str = ""
    """SHA-256, in hex, of the public key that it is bound to; empty until it is used."""
    used_by: str = ""
    """Address of the host that used it."""


class Desk:
    """Decides about requests to enrol."""

    def __init__(self) -> None:
        self._wrong: OrderedDict[str, deque[int]] = OrderedDict()

    def check_address(self, address: str, now_ns: int) -> None:
        """Raise OverloadedError for an address that has shown too many wrong tokens of late."""
        recent = self._recent(address, now_ns)
        if len(recent) >= bounds.ENROL_WRONG_MAX:
            wait_s = max(1, round((recent[0] - now_ns) / 1e9 + bounds.ENROL_WRONG_S))
            raise OverloadedError(f"too many wrong tokens came from {address}; wait {wait_s} s", wait_s)

    def check_secret(
        self, name: str, secret: bytes, key_digest: str, invitation: Invitation | None, now: datetime.datetime
    ) -> None:
        """Raise UnauthenticatedError unless the secret opens this invitation for this key at `now`."""
        new_line = _NEW_LINE.format(name=name)
        known = invitation.digest if invitation is not None else _NOBODY
        is_right = hmac.compare_digest(known, digest_of(secret))
        if invitation is None or not is_right:
            raise WrongTokenError(
                f"this token is not the newest one for {named_stage(name)}; copy the line again, or: {new_line}"
            )
        if invitation.key_digest:
            if not hmac.compare_digest(invitation.key_digest, key_digest):
                raise UnauthenticatedError(
                    f"the token for {named_stage(name)} was already used, by {invitation.used_by}; if that was not "
                    f"you, revoke it with `relayline certs revoke`. {new_line}"
                )
        elif now > invitation.expires:
            raise UnauthenticatedError(
                f"the token for {named_stage(name)} expired at {invitation.expires:%Y-%m-%d %H:%M} UTC; {new_line}"
            )

    def note_wrong(self, address: str, now_ns: int) -> None:
        """Count a wrong token from an address."""
        recent = self._recent(address, now_ns)
        recent.append(now_ns)
        self._wrong[address] = recent
        self._wrong.move_to_end(address)
        if len(self._wrong) > bounds.ENROL_ADDRESSES_MAX:
            self._wrong.popitem(last=False)

    def _recent(self, address: str, now_ns: int) -> deque[int]:
        found = self._wrong.get(address, deque())
        while found and now_ns - found[0] > bounds.ENROL_WRONG_S * 1e9:
            found.popleft()
        return found


class WrongTokenError(UnauthenticatedError):
    """A secret that opens nothing; it is counted."""


def may_be_called(advertise: str, stage: Identity, address: str) -> bool:
    """Return whether a stage that calls from `address` may have a certificate for the host `advertise`.

    It may for the host that the manifest names, for where it calls from, and for loopback, which is every host's own.
    """
    return not advertise or is_loopback(advertise) or credential_host(advertise) in (stage.host, address)
