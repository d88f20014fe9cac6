"""gRPC's health service, with `List`, which the library has in its contract and does not answer."""

from __future__ import annotations

from typing import Any

from grpc_health.v1 import health_pb2
from grpc_health.v1.health import aio as grpc_health_aio


class Health(grpc_health_aio.HealthServicer):  # type: ignore[misc]
    """Health of each service by name; the empty name is the process."""

    def __init__(self) -> None:
        super().__init__()
        self._statuses: dict[str, int] = {}

    async def set(self, service: str, status: int) -> None:
        """Say how a service is."""
        self._statuses[service] = status
        await super().set(service, status)

    async def enter_graceful_shutdown(self) -> None:
        """Say that nothing serves any more."""
        self._statuses = dict.fromkeys(self._statuses, health_pb2.HealthCheckResponse.NOT_SERVING)
        await super().enter_graceful_shutdown()

    async def List(self, request: Any, context: Any) -> health_pb2.HealthListResponse:
        """Answer with the health of every service."""
        statuses = {name: health_pb2.HealthCheckResponse(status=status) for name, status in self._statuses.items()}
        return health_pb2.HealthListResponse(statuses=statuses)
