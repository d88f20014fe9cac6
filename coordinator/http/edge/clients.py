"""The sender of a request, by key or address, so that clients get fair turns."""

from __future__ import annotations

import dataclasses
import functools
import ipaddress

from aiohttp import web

from relayline.coordinator.http.edge.key_file import ApiKey
from relayline.coordinator.http.edge.token_rate import TokenRate
from relayline.coordinator.sessions.model_names import without_latest
from relayline.coordinator.sessions.tenants import ANYONE, Tenant
from relayline.wire.common.errors import ModelNotFoundError


@dataclasses.dataclass(frozen=True, slots=True)
class Payer:
    """The key for which a request's tokens are counted: it was shown, or what asks now was made with it."""

    name: str
    """`ApiKey.lasting_name` of the key in the file; empty where none was demanded."""
    behalf: str = ""
    """What its gateway said of the client."""


CLIENT = web.RequestKey("client", str)  # by the key that it has shown
BEHALF = "x-relayline-on-behalf"  # a gateway's word for whom it asks, which pipelines believe of `gateway=yes` keys
KEY = web.RequestKey("api_key", ApiKey)  # that key
TENANT = web.RequestKey("tenant", Tenant)  # whose key it is
BATCH = web.RequestKey("batch", str)  # id of the batch of /v1/batches that asks
PAYER = web.RequestKey("payer", Payer)  # of a request from inside from the start, of others with KEY
RATE = web.RequestKey("rate", TokenRate)  # of tokens, where the key has a bound


def tenant_of(request: web.Request) -> Tenant:
    """Return whose key a request has shown; ANYONE where none is demanded."""
    found: Tenant = request.get(TENANT, ANYONE)
    return found


def check_may_use(tenant: Tenant, name: str, model_id: str = "") -> None:
    """Raise ModelNotFoundError, in OpenAI's words, unless the tenant may use the model of this name.

    `model_id`: the served model's own name, where `name` is another one of it.
    """
    may_be = {name, without_latest(name), model_id} - {""}  # which is no model's name
    if tenant.models and not may_be & {*tenant.models}:
        there_are = ", ".join(map(repr, sorted(tenant.models)))
        text = f"the model {name[:200]!r} does not exist or this API key has no access to it; it may use {there_are}"
        raise ModelNotFoundError(text, param="model")


def client_of(request: web.Request) -> str:
    """Return who sent a request: the key that it has shown, or its address; of IPv6 the network."""
    return request[CLIENT] if CLIENT in request else _client_at(request.remote or "")


@functools.lru_cache(maxsize=1_024)
def _client_at(remote: str) -> str:
    try:
        address = ipaddress.ip_address(remote)
    except ValueError:  # of a Unix socket
        return remote
    if isinstance(address, ipaddress.IPv6Address):
        return str(ipaddress.ip_network((int(address) >> 64 << 64, 64)))  # a holder of one address has all of these
    return str(address)
