"""Join lines over HTTP: a holder of an API key gets the line with which one more machine becomes a stage.

Only with `--allow-invites`: a stage sees what passes through it of every request, so a key that makes join lines can do
more than ask. Who runs `relayline invite` on the coordinator's machine needs none of this.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from typing import Protocol

from relayline.coordinator.joining.config import NAME, Authority
from relayline.wire.common.errors import InvalidRequestError, NotReadyError, UsageError
from relayline.wire.common.texts import named_stage
from relayline.wire.links.join_code import code_line
from relayline.wire.links.roles import TAKEN_NAMES, Identity, Role
from relayline.wire.links.security import credential_host


class AddPlace(Protocol):
    """Makes a place for one more stage."""

    def __call__(self, name: str, *, is_spare: bool) -> None:
        """Raise InvalidRequestError where there can be none."""


@dataclasses.dataclass(frozen=True, slots=True)
class JoinLine:
    """A line that was made, for whoever asked for it alone."""

    name: str
    host: str
    """Where the stage may join from."""
    expires_unix_s: int
    line: str = dataclasses.field(repr=False)
    """What to run there; it holds a secret."""
    code: str = dataclasses.field(default="", repr=False)
    """The short code that stands for it."""
    short: str = dataclasses.field(default="", repr=False)
    """What to run with the code, in place of the line."""
    code_expires_unix_s: int = 0


class Inviter:
    """Makes join lines. Event loop only."""

    def __init__(
        self,
        authority: Authority,
        names: Callable[[], list[str]],
        add: AddPlace,
        fixed: tuple[str, ...] = (),
        *,
        is_announced: bool = False,
    ) -> None:
        """`names` returns those of all places. `fixed`: stages whose layers the manifest fixes. `is_announced`: hosts
        find the pipeline by themselves.
        """
        self._is_announced = is_announced
        self._authority, self._names, self._add, self._fixed = authority, names, add, fixed
        self.address = ""
        """Where hosts enrol, host:port; empty until they can."""
        self._bare = set[str]()  # places, at most all, whose invitation could not be written
        self._one_at_a_time = asyncio.Lock()

    async def invite(self, name: str, host: str, *, is_spare: bool) -> JoinLine:
        """Return a new line for a stage; the one before opens nothing any more.

        A new stage needs its `host`; one that was invited before keeps its own. Raises InvalidRequestError,
        NotReadyError.
        """
        async with self._one_at_a_time:
            return await self._invite(name, host.strip(), is_spare=is_spare)

    async def _invite(self, name: str, host: str, *, is_spare: bool) -> JoinLine:
        if not self.address:
            raise NotReadyError("hosts cannot join yet; try again in a moment")
        is_new = name not in self._names()
        if not NAME.fullmatch(name):
            text = "must be lower-case letters, digits and hyphens, 63 at most"
            raise InvalidRequestError.of_field("name", text)
        if name in TAKEN_NAMES:
            raise InvalidRequestError.of_field("name", f"no stage can be named {name}: that is another role")
        before = await asyncio.to_thread(self._authority.invitation, name)
        if not is_new and not (before is None and name in self._bare):
            if before is None:
                raise InvalidRequestError(f"{named_stage(name)} is not on another host, so there is no line for it")
            if host and credential_host(host) != before.stage.host:
                text = f"{named_stage(name)} belongs on {before.stage.host}; give a new stage another name"
                raise InvalidRequestError.of_field("host", text)
            host = before.stage.host
        if "*" in host or not Identity(Role.STAGE, credential_host(host), name).is_valid:
            raise InvalidRequestError.of_field("host", "must be the address of the machine, as others reach it")
        if is_new:
            self._add_new(name, is_spare=is_spare)
        try:
            coded = await asyncio.to_thread(self._authority.invite, name, host)
        except UsageError as error:
            raise InvalidRequestError(error.message) from error
        except OSError as error:
            raise NotReadyError(f"the invitation of {name} cannot be written: {error.strerror or error}") from error
        made = await asyncio.to_thread(self._authority.invitation, name)
        assert made is not None
        self._bare.discard(name)
        line = f"relayline join {self.address} {coded.token}"
        until_s, code_until_s = int(made.expires.timestamp()), int(coded.expires.timestamp())
        short = code_line(coded.code, self.address, is_announced=self._is_announced)
        return JoinLine(name, host, until_s, line, str(coded.code), short, code_until_s)

    def _add_new(self, name: str, *, is_spare: bool) -> None:
        """Make the place, before anything is written down. Raises InvalidRequestError where there can be none."""
        if self._fixed and not is_spare:
            raise InvalidRequestError(
                f"{named_stage(name)} would share all layers, and the manifest fixes those of {', '.join(self._fixed)}"
                "; it can join as a spare",
                "spare",
            )
        self._add(name, is_spare=is_spare)
        self._bare.add(name)
