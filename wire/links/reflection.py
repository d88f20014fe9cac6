"""gRPC's reflection service: tools such as grpcurl and buf ask a port for its services and their messages.

The library answers; here are the forms of its handler that a listener can check, under the names of both versions of
the service, whose messages are the same.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any, TypeAlias

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from relayline.wire.common import bounds
from relayline.wire.common.errors import ProtocolError
from relayline.wire.links import rpc
from relayline.wire.links.roles import REFLECTION_METHOD, REFLECTION_SERVICES

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


def reflection_handlers(services: Sequence[str]) -> tuple[grpc.GenericRpcHandler, ...]:
    """Return the handlers of a port that has `services` (full names; their contracts must have been imported)."""
    # Imported only if it is turned on, so that other processes do not load it.
    from grpc_reflection.v1alpha import reflection_pb2 as pb
    from grpc_reflection.v1alpha.reflection import aio

    answering = aio.ReflectionServicer((*services, *REFLECTION_SERVICES))

    async def parsed(requests: AsyncIterator[bytes]) -> AsyncIterator[pb.ServerReflectionRequest]:
        async for data in requests:
            if len(data) > bounds.UNARY_BYTES_MAX:
                raise ProtocolError(f"a request of {len(data)} bytes is over the limit of {bounds.UNARY_BYTES_MAX}")
            yield pb.ServerReflectionRequest.FromString(data)

    async def answer(requests: AsyncIterator[bytes], context: Context) -> None:
        try:
            async for reply in answering.ServerReflectionInfo(parsed(requests), context):
                await context.write(reply)
        except ProtocolError as error:
            await rpc.abort(context, error)
        except DecodeError:
            await rpc.abort(context, ProtocolError("not a request"))

    method = grpc.stream_stream_rpc_method_handler(answer, None, pb.ServerReflectionResponse.SerializeToString)
    return tuple(
        grpc.method_handlers_generic_handler(service, {REFLECTION_METHOD: method}) for service in REFLECTION_SERVICES
    )
