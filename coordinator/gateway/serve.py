"""The gateway process: several pipelines behind one HTTP address."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator
from pathlib import Path

from relayline.coordinator.gateway.app import make_gateway
from relayline.coordinator.gateway.bounds import BACKENDS_MAX
from relayline.coordinator.gateway.links import BackendConfig, Links
from relayline.coordinator.http.api_keys import protect_http
from relayline.coordinator.http.limits import HttpLimits
from relayline.coordinator.http.server import server_tls, start_http
from relayline.wire.common.bounds import DRAIN_TIMEOUT_S
from relayline.wire.common.errors import UsageError
from relayline.wire.links.security import address_of


@dataclasses.dataclass(frozen=True, slots=True)
class GatewayConfig:
    """One gateway."""

    backends: tuple[BackendConfig, ...]
    host: str = "127.0.0.1"
    port: int = 8080
    """0 lets the system choose."""
    api_keys_file: Path | None = None
    """File with the keys that are demanded; None demands none, and passes clients' keys on."""
    http_tls: tuple[Path, Path] | None = None
    """Certificate (with intermediates) and private key, PEM; None serves in the clear."""
    allow_hosts: tuple[str, ...] = ()
    """Host names under which web pages may reach it, besides loopback."""
    cors: tuple[str, ...] = ()
    """Origins whose web pages may read it."""
    protect_metrics: bool = False
    """Whether /metrics needs a key too."""
    limits: HttpLimits = dataclasses.field(default_factory=HttpLimits)
    """Bounds of the HTTP side."""

    def __post_init__(self) -> None:
        """Raises UsageError for pipelines that cannot be told apart, or too many."""
        names = [backend.name for backend in self.backends]
        if not names:
            raise UsageError("a gateway needs a pipeline; give one with --backend http://HOST:PORT")
        if len(names) > BACKENDS_MAX:
            raise UsageError(f"a gateway has {BACKENDS_MAX} pipelines at most, not {len(names)}")
        if (twice := next((name for name in names if names.count(name) > 1), None)) is not None:
            raise UsageError(f"two pipelines are named {twice!r}; give each a name of its own")


@contextlib.asynccontextmanager
async def serving_gateway(config: GatewayConfig) -> AsyncIterator[str]:
    """Serve within the context; yields the address. Its end waits for running requests, up to the drain's bound.

    Raises UsageError, and StartError where the address is taken.
    """
    context = server_tls(config.http_tls)
    async with contextlib.AsyncExitStack() as stack:
        links = await stack.enter_async_context(Links(config.backends))
        app, gateway = make_gateway(links, config.limits)
        stack.enter_context(
            protect_http(
                app, config.host, config.api_keys_file, protect_metrics=config.protect_metrics,
                is_tls=context is not None, allow_hosts=config.allow_hosts, cors=config.cors,
            )
        )  # fmt: skip
        gateway.forwarder.checks_keys = config.api_keys_file is not None
        await asyncio.gather(*map(links.ask, links.links.values()))
        runner, port = await start_http(app, config.host, config.port, context=context)
        stack.push_async_callback(runner.cleanup)
        yield f"{'http' if context is None else 'https'}://{address_of(config.host, port)}"
        gateway.is_draining = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DRAIN_TIMEOUT_S):
                await gateway.forwarder.idle()
