"""The gateway process: several pipelines behind one HTTP address."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Sequence

from relayline.coordinator.gateway.app import make_gateway
from relayline.coordinator.gateway.bounds import BACKENDS_MAX, LEAVE_TIMEOUT_S, READY_POLL_S, READY_TIMEOUT_S
from relayline.coordinator.gateway.forward import Forwarder
from relayline.coordinator.gateway.gate import PipelineLostError
from relayline.coordinator.gateway.links import BackendConfig, Links
from relayline.coordinator.gateway.router import Health
from relayline.coordinator.http.edge.api_keys import protect_http
from relayline.coordinator.http.edge.limits import HttpLimits
from relayline.coordinator.http.edge.listener import HttpListener
from relayline.coordinator.http.edge.server import server_tls, start_http
from relayline.wire.common.bounds import DRAIN_TIMEOUT_S
from relayline.wire.common.errors import NotReadyError, UsageError


@dataclasses.dataclass(frozen=True, slots=True)
class GatewayConfig:
    """One gateway."""

    backends: tuple[BackendConfig, ...]
    """The pipelines, in the order of preference."""
    http: HttpListener = dataclasses.field(default_factory=HttpListener)
    """Where clients connect. Where it demands no keys, those that clients send are passed on."""
    limits: HttpLimits = dataclasses.field(default_factory=HttpLimits)
    """Bounds of the HTTP side."""
    awake_max: int = 0
    """How many pipelines may be awake at once; 0: all."""

    def __post_init__(self) -> None:
        """Raises UsageError for pipelines with equal names, or too many, and for a bound below 0."""
        names = [backend.name for backend in self.backends]
        if not names:
            raise UsageError("a gateway needs at least one pipeline; give it with --backend http://HOST:PORT")
        if self.awake_max < 0:
            raise UsageError(f"--awake-max {self.awake_max}: give a number of pipelines, or 0 for all")
        if len(names) > BACKENDS_MAX:
            raise UsageError(f"a gateway has at most {BACKENDS_MAX} pipelines, not {len(names)}")
        if (twice := next((name for name in names if names.count(name) > 1), None)) is not None:
            raise UsageError(f"two pipelines are named {twice!r}; give each its own name")


class ServedGateway:
    """A running gateway: its address, and changes of its pipelines. Event loop only."""

    def __init__(self, url: str, links: Links, forwarder: Forwarder) -> None:
        self.url, self._links, self._forwarder = url, links, forwarder

    async def add(self, config: BackendConfig) -> None:
        """Take one more pipeline; another one of the same name gets no more requests.

        Until it is heard it is known to serve the models of that one. Raises UsageError for certificates that cannot
        be read, or too many pipelines.
        """
        router = self._links.router
        before = router.named(config.name)
        if before is None and len(router.staying) == BACKENDS_MAX:
            raise UsageError(f"a gateway has at most {BACKENDS_MAX} pipelines")
        link = self._links.add(config)
        if before is not None:
            link.backend.models, link.cards = before.models, self._links.links[before].cards
            router.leave(before)
        await self._links.ask(link)

    async def until_ready(self, name: str) -> bool:
        """Wait until a pipeline takes requests, up to a bound; return whether it does."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(READY_TIMEOUT_S):
                while (backend := self._links.router.named(name)) is not None:
                    await self._links.ask(self._links.links[backend])
                    if backend.health is Health.READY:
                        return True
                    await asyncio.sleep(READY_POLL_S)
        return False

    @contextlib.asynccontextmanager
    async def starting(self, name: str) -> AsyncIterator[None]:
        """Within the context a pipeline starts: others are put to sleep before, where not all may be awake.

        It starts all the same where they cannot, after a bound.
        """
        backend = self._links.router.named(name)
        async with contextlib.AsyncExitStack() as stack:
            if backend is not None:
                with contextlib.suppress(NotReadyError, PipelineLostError):
                    await stack.enter_async_context(self._links.gate.place(backend, is_start=True))
            yield
            if backend is not None and backend in self._links.links and self._links.router.awake.limit:
                await self._links.ask(self._links.links[backend])  # it counts as awake from now on

    @property
    def asleep(self) -> list[str]:
        """The names of the pipelines that sleep."""
        return [backend.name for backend in self._links.router.staying if backend.is_asleep]

    def leave(self, name: str) -> None:
        """Give a pipeline no more requests."""
        if (backend := self._links.router.named(name)) is not None:
            self._links.router.leave(backend)

    async def forget_leaving(self, name: str) -> None:
        """Wait for the requests of the pipeline removed under this name, up to a bound, and forget it."""
        for backend in [each for each in self._links.router.backends if each.name == name and each.is_leaving]:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LEAVE_TIMEOUT_S):
                    await self._forwarder.idle(backend)
            await self._links.forget(self._links.links[backend])

    def set_key(self, name: str, key: str) -> None:
        """Have the gateway show a pipeline this API key from now on; empty for none."""
        if (backend := self._links.router.named(name)) is not None:
            link = self._links.links[backend]
            link.config = dataclasses.replace(link.config, key=key)

    def arrange(self, names: Sequence[str]) -> None:
        """Bring the pipelines into another order of preference."""
        self._links.router.arrange(names)


@contextlib.asynccontextmanager
async def serving_gateway(config: GatewayConfig) -> AsyncIterator[ServedGateway]:
    """Serve within the context; yields the running gateway. Its end waits for running requests, up to the drain's
    bound.

    Raises UsageError, and StartError where the address is taken.
    """
    context = server_tls(config.http.tls)
    async with contextlib.AsyncExitStack() as stack:
        links = await stack.enter_async_context(Links(config.backends, config.awake_max))
        app, gateway = make_gateway(links, config.limits)
        stack.enter_context(protect_http(app, config.http))
        gateway.forwarder.checks_keys = config.http.api_keys_file is not None
        await asyncio.gather(*map(links.ask, links.links.values()))
        runner, port = await start_http(app, config.http.host, config.http.port, context=context)
        stack.push_async_callback(runner.cleanup)
        yield ServedGateway(config.http.url_at(port), links, gateway.forwarder)
        await gateway.drain()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DRAIN_TIMEOUT_S):
                await gateway.forwarder.idle()
