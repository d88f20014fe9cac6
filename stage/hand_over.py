"""The lanes of layers that move, from stage to stage: one planned change, seen from one stage. Event loop only.

The order to prepare names giver, taker and layers; each pair has its own pass. At the switch the old engine ends its
epoch and gives; the next one takes, session by session, before it says that it serves. None of this can fail the
change: lanes that are not here in time are recomputed. So every error ends in a line of the log.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import hmac
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterator, Sequence
from typing import Any

import grpc.aio
import numpy as np

from relayline.stage.engine.layer_cells import Form, LayerCells, packed
from relayline.stage.steps.handing import HandedLane, Handing, Key, behind, joined
from relayline.wire.common import bounds
from relayline.wire.common.errors import NotReadyError, ProtocolError, StageLostError, UnauthenticatedError
from relayline.wire.common.texts import named_stage
from relayline.wire.envelopes import messages
from relayline.wire.links import rpc
from relayline.wire.links.guard import caller
from relayline.wire.links.security import LinkSecurity
from relayline.wire.pb.relayline.v1 import join_pb2, relayline_pb2

CONNECT_S = 5.0  # for a stage that gives to be reached; it serves, or did until now
HEAD_BYTES_MAX = 32 * 1024  # of a message around its data: a few dozen bytes for each layer

Call = Callable[[Callable[[], Any]], Coroutine[Any, Any, Any]]


@dataclasses.dataclass(frozen=True, slots=True)
class Engine:
    """One loaded engine, as far as it gives or takes lanes."""

    call: Call
    """Runs a function in its decode thread."""
    handing: Handing
    first_layer: int
    """Of the whole model."""

    async def lanes(self, layer_start: int, layer_end: int) -> AsyncGenerator[HandedLane, None]:
        """Yield its lanes' cells in these layers, by ascending keys. Its epochs have ended."""
        first, end = layer_start - self.first_layer, layer_end - self.first_layer
        for key in await self.call(self.handing.left):
            handed = await self.call(functools.partial(self.handing.give, key, first, end))
            if handed is not None:
                yield handed


class HandOver:
    """One change's lanes."""

    def __init__(self, number: int, order: join_pb2.HandOver) -> None:
        """Raises ProtocolError for an order that names too many stages."""
        if max(len(order.gives), len(order.takes)) > bounds.HAND_OVERS_MAX:
            raise ProtocolError(f"the hand-over names more than {bounds.HAND_OVERS_MAX} stages")
        self.number, self.takes = number, list(order.takes)
        self._open = list(order.gives)
        self._giver: asyncio.Future[Engine] = asyncio.get_running_loop().create_future()
        self._n_giving = 0
        self._takes_own = any(not take.address for take in order.takes)
        self._is_given = asyncio.Event()
        self.route_ids: set[int] = set()
        """The routes whose lanes were taken."""
        self._note_given()

    def _note_given(self) -> None:
        if not (self._open or self._n_giving or self._takes_own):
            self._is_given.set()

    def close(self) -> None:
        """Stop waiting."""
        self._is_given.set()

    # --- giving -------------------------------------------------------------------------------------------------------

    def ended(self, engine: Engine) -> None:
        """The old engine has ended its epochs and gives its lanes from now on."""
        if not self._giver.done():
            self._giver.set_result(engine)

    def over(self) -> None:
        """Nothing is given any more: the engine is about to be freed, and is not held here."""
        self._open.clear()
        self._giver = asyncio.get_running_loop().create_future()

    async def given(self) -> None:
        """Wait until every stage has its lanes, or has stopped waiting."""
        await self._is_given.wait()

    async def give(self, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        """Answer the call of another stage. Raises UnauthenticatedError, NotReadyError."""
        layers = self._claimed(rpc.pass_of(context.invocation_metadata()))
        self._open.remove(layers)
        self._n_giving += 1
        try:
            async with asyncio.timeout(bounds.HAND_OVER_S_MAX):
                engine = await asyncio.shield(self._giver)
                async with contextlib.aclosing(engine.lanes(layers.layer_start, layers.layer_end)) as lanes:
                    async for lane in lanes:
                        for piece in pieces(lane):
                            await context.write(piece)
        except TimeoutError as error:
            raise NotReadyError("the stage did not switch in time") from error
        finally:
            self._n_giving -= 1
            self._note_given()

    def _claimed(self, shown_pass: str) -> join_pb2.GivenLayers:
        """Return the lanes that a caller should get."""
        for layers in self._open:
            if layers.shown_pass and hmac.compare_digest(layers.shown_pass.encode(), shown_pass.encode()):
                who = caller()
                if who is not None and who.name != layers.to:
                    raise UnauthenticatedError(f"these lanes are for {named_stage(layers.to)}, not for {who}")
                return layers
        raise UnauthenticatedError("lanes go to a stage that shows the pass of the change, and only once")

    # --- taking -------------------------------------------------------------------------------------------------------

    async def take(self, engine: Engine, security: LinkSecurity) -> int:
        """Let a new engine have the lanes of its layers; returns how many it has then.

        Raises RelaylineError as soon as one source fails; lanes taken by then stay.
        """
        n_taken = 0
        try:
            async with contextlib.AsyncExitStack() as stack:
                sources = []
                for lanes in self._sources(engine, security):
                    sources.append(await stack.enter_async_context(contextlib.aclosing(lanes)))
                async for parts in together(sources):
                    lane = joined(parts)
                    self.route_ids.add(lane.route_id)
                    n_taken += await engine.call(functools.partial(engine.handing.take, lane))
        finally:
            self._takes_own = False
            self._note_given()
        return n_taken

    def _sources(self, engine: Engine, security: LinkSecurity) -> Iterator[AsyncGenerator[HandedLane, None]]:
        forms = engine.handing.forms()
        for layers in self.takes if forms else ():
            if layers.address:
                start, end = layers.layer_start - engine.first_layer, layers.layer_end - engine.first_layer
                assembly = Assembly(forms[start:end], engine.handing.ctx_tokens, f"the stage at {layers.address}")
                yield remote_lanes(layers, self.number, assembly, security)
            else:
                yield self._own_lanes(layers)

    async def _own_lanes(self, layers: join_pb2.TakenLayers) -> AsyncGenerator[HandedLane, None]:
        engine = await asyncio.shield(self._giver)
        async with contextlib.aclosing(engine.lanes(layers.layer_start, layers.layer_end)) as lanes:
            async for lane in lanes:
                yield lane


async def together(sources: Sequence[AsyncIterator[HandedLane]]) -> AsyncIterator[list[HandedLane]]:
    """Yield what all sources have of one session, for each that all of them have. All are in order of their keys."""
    if not sources:
        return
    heads = await _next_of(sources)
    while None not in heads:
        found = [head for head in heads if head is not None]
        late = behind(found)
        if not late:
            yield found
            late = list(range(len(sources)))
        following = await _next_of([sources[index] for index in late])
        for index, head in zip(late, following, strict=True):
            heads[index] = head


async def _next_of(sources: Sequence[AsyncIterator[HandedLane]]) -> list[HandedLane | None]:
    """Return what each source has next, None at its end. Raises the first one's error, when none is at work any more:
    only then can the others be closed.
    """
    asking = [asyncio.ensure_future(anext(source, None)) for source in sources]
    try:
        return await asyncio.gather(*asking)
    finally:
        for task in asking:
            task.cancel()
        await asyncio.wait(asking)


# --- on the wire ------------------------------------------------------------------------------------------------------


def pieces(lane: HandedLane) -> Iterator[bytes]:
    """Yield the messages of one lane."""
    head = relayline_pb2.HandOverResponse(
        route_id=lane.route_id,
        session_id=lane.session_id,
        lane=lane.lane,
        n_tokens=lane.n_tokens,
        forms=[packed(layer.form) for layer in lane.layers],
    )
    yield rpc.serialize(head)
    for layer in lane.layers:
        for tensor in layer.tensors:
            data = np.ascontiguousarray(tensor).reshape(-1)
            for at in range(0, data.size, bounds.HAND_OVER_PART_BYTES):
                part = data[at : at + bounds.HAND_OVER_PART_BYTES].tobytes()
                yield rpc.serialize(relayline_pb2.HandOverResponse(data=part))


async def remote_lanes(
    layers: join_pb2.TakenLayers, number: int, assembly: Assembly, security: LinkSecurity
) -> AsyncGenerator[HandedLane, None]:
    """Yield what another stage gives. Raises its typed error, its loss, or ProtocolError for cells of another form."""
    peer = assembly.peer
    channel = rpc.open_channel(layers.address, security, receive_bytes_max=bounds.MESSAGE_BYTES_MAX)
    try:
        async with asyncio.timeout(CONNECT_S):
            await channel.channel_ready()
        request = rpc.serialize(relayline_pb2.HandOverRequest(change=number))
        make = channel.unary_stream(rpc.method("HandOver"), request_serializer=None, response_deserializer=None)
        call = make(request, metadata=rpc.pass_metadata(layers.shown_pass))
        while isinstance(data := await call.read(), bytes):
            limit = bounds.HAND_OVER_PART_BYTES + HEAD_BYTES_MAX
            message = messages.read(relayline_pb2.HandOverResponse, data, "piece of a lane", bytes_max=limit, who=peer)
            if (lane := assembly.add(message)) is not None:
                yield lane
        assembly.check_end()
    except TimeoutError as error:
        raise StageLostError(f"{peer} cannot be reached within {CONNECT_S:.0f} s") from error
    except grpc.aio.AioRpcError as error:
        raise rpc.typed(error, peer) from error
    finally:
        await channel.close()


class Assembly:
    """Puts the pieces of one stage's lanes together. Takes no more memory than a lane of this stage has."""

    def __init__(self, forms: Sequence[Form], n_tokens_max: int, peer: str) -> None:
        self._forms, self._n_tokens_max, self.peer = tuple(forms), n_tokens_max, peer
        self._packed = [packed(form) for form in forms]
        self._cell_bytes = sum(tensor.cell_bytes for form in forms for tensor in form)
        self._head: relayline_pb2.HandOverResponse | None = None
        self._last: Key = (-1, -1)
        self._data = np.empty(0, np.uint8)
        self._n_bytes = 0

    def add(self, message: relayline_pb2.HandOverResponse) -> HandedLane | None:
        """Take a piece; returns the lane that it completes. Raises ProtocolError."""
        if message.n_tokens:
            self._begin(message)
        piece = np.frombuffer(message.data, np.uint8)
        end = self._n_bytes + piece.size
        if self._head is None or end > self._data.size:
            raise ProtocolError(f"{self.peer} sent cells that belong to no lane")
        self._data[self._n_bytes : end] = piece
        self._n_bytes = end
        if end < self._data.size:
            return None
        head, self._head = self._head, None
        return HandedLane(head.route_id, head.session_id, head.lane, tuple(self._layers(head.n_tokens)))

    def _begin(self, head: relayline_pb2.HandOverResponse) -> None:
        key = (head.route_id, head.session_id)
        if self._head is not None or key <= self._last or head.n_tokens > self._n_tokens_max:
            raise ProtocolError(f"{self.peer} sent lanes out of order, or longer ones than this stage has")
        if list(head.forms) != self._packed:
            raise ProtocolError(f"{self.peer} has KV cells of another form, or other layers")
        self._head, self._last, self._n_bytes = head, key, 0
        self._data = np.empty(head.n_tokens * self._cell_bytes, np.uint8)

    def _layers(self, n_tokens: int) -> Iterator[LayerCells]:
        at = 0
        for form in self._forms:
            tensors = []
            for tensor in form:
                end = at + n_tokens * tensor.cell_bytes
                tensors.append(self._data[at:end].reshape(tensor.n_groups, n_tokens, tensor.n_bytes))
                at = end
            yield LayerCells(form, tuple(tensors))

    def check_end(self) -> None:
        """Raise ProtocolError where the pieces ended within a lane."""
        if self._head is not None:
            raise ProtocolError(f"{self.peer} ended in the middle of a lane")
