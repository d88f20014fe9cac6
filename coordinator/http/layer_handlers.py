"""Routes of planned changes: the layers of each stage, and changes to them while requests run."""

from __future__ import annotations

import logging
from typing import Protocol

from aiohttp import web

from relayline.coordinator.http.edge.body import read_small
from relayline.coordinator.http.edge.middleware import response_of
from relayline.coordinator.http.edge.steering import check_steers
from relayline.coordinator.http.requests.bodies import DrainBody, InviteBody, LayersBody, NewStageBody, decode_body
from relayline.coordinator.joining.inviting import Inviter
from relayline.wire.common.errors import InvalidRequestError

PATH = "/v1/pipeline/layers"
STAGES_PATH = "/v1/pipeline/stages"
INVITATIONS_PATH = "/v1/pipeline/invitations"

_NO_LINES = (
    "this server makes no join lines: that needs --allow-invites, API keys and a CA whose key is here; "
    "`relayline invite` prints one on the coordinator's machine"
)

log = logging.getLogger("relayline.http")


class LayerControl(Protocol):
    """The one that moves layers."""

    def move(self, cuts: tuple[int, ...]) -> None:
        """Begin a change. Raises InvalidRequestError, NotReadyError."""

    async def drain(self, name: str, *, is_drained: bool) -> None:
        """Begin to free a stage of its layers, or offer it some again. Raises InvalidRequestError, NotReadyError."""

    def add(self, name: str, *, is_spare: bool) -> None:
        """Let one more stage join. Raises InvalidRequestError."""

    def describe(self) -> dict[str, object]:
        """Return the present layers and the latest change."""


def layer_routes(control: LayerControl | None, inviter: Inviter | None = None) -> list[web.RouteDef]:
    """Return the routes; none if layers cannot be moved."""
    if control is None:
        return []

    async def described(_request: web.Request) -> web.StreamResponse:
        """GET /v1/pipeline/layers: the layers of each stage, and how far the latest change is."""
        return response_of(control.describe())

    async def move(request: web.Request) -> web.StreamResponse:
        """PUT /v1/pipeline/layers: begin a change; 202, and GET reports the outcome."""
        check_steers(request)
        control.move(decode_body(await read_small(request), LayersBody).cuts)
        return response_of(control.describe(), 202)

    async def drain(request: web.Request) -> web.StreamResponse:
        """PUT /v1/pipeline/stages/NAME: drain a stage, or offer it layers again; 202, and GET reports the outcome."""
        check_steers(request)
        is_drained = decode_body(await read_small(request), DrainBody).drained
        await control.drain(request.match_info["name"], is_drained=is_drained)
        return response_of(control.describe(), 202)

    async def add(request: web.Request) -> web.StreamResponse:
        """POST /v1/pipeline/stages: make a place for one more stage; 201."""
        check_steers(request)
        body = decode_body(await read_small(request), NewStageBody)
        control.add(body.name, is_spare=body.spare)
        return response_of(control.describe(), 201)

    async def invite(request: web.Request) -> web.StreamResponse:
        """POST /v1/pipeline/invitations: make the line with which a machine joins; 201."""
        check_steers(request)
        body = decode_body(await read_small(request), InviteBody)
        if inviter is None:
            raise InvalidRequestError(_NO_LINES)
        made = await inviter.invite(body.name, body.host, is_spare=body.spare)
        fields = {"stage": made.name, "host": made.host, "from": request.remote or ""}
        log.info("join line made", extra={"fields": fields})
        return response_of(made, 201, {"Cache-Control": "no-store"})

    return [
        web.post(INVITATIONS_PATH, invite),
        web.get(PATH, described),
        web.put(PATH, move),
        web.post(STAGES_PATH, add),
        web.put(f"{STAGES_PATH}/{{name}}", drain),
    ]
