"""One coordinator's use of a stage of the cluster."""

from __future__ import annotations

import dataclasses

from relayline.deploy.testing.cluster.link import Link
from relayline.stage.sending_back import write_back
from relayline.stage.steps.grants import Grants
from relayline.stage.steps.step_types import RouteOutput
from relayline.wire.envelopes.buffers import BufferPool
from relayline.wire.envelopes.dtypes import DTYPE_TOKENS
from relayline.wire.envelopes.returns import ReturnWriter
from relayline.wire.pb.relayline.v1 import relayline_pb2 as pb


@dataclasses.dataclass(slots=True, eq=False)
class NodeRoute:
    """One coordinator's use of a stage at one epoch."""

    route_id: int
    epoch: int
    returns: Link
    downstream: Link | None
    writer: ReturnWriter = dataclasses.field(default_factory=ReturnWriter)
    tokens: BufferPool = dataclasses.field(default_factory=lambda: BufferPool(DTYPE_TOKENS, 1))
    grants: Grants = dataclasses.field(default_factory=Grants)
    n_envelopes: int = 0
    n_returned: int = 0
    back: Link | None = None
    """The last stage's link to stage 0."""
    n_back: int = 0
    """Messages over that link, sent or received."""

    def counts(self, *, is_back: bool) -> int:
        """Count a message that came from upstream, or from the last stage; returns its number."""
        if is_back:
            self.n_back += 1
            return self.n_back
        self.n_envelopes += 1
        return self.n_envelopes

    def feeds_back(self, stage_index: int, back: Link) -> None:
        """The link to stage 0 stands: tell the coordinator."""
        self.back = back
        for piece in self.writer.write(pb.ReturnResponse(epoch=self.epoch, stage_index=stage_index, feeds_back=True)):
            self.n_returned += 1
            self.returns.send(piece)

    def send_back(self, output: RouteOutput, now_ns: int) -> None:
        """Send the tokens of frames under a grant to stage 0."""
        if output.granted and self.back is not None:
            self.n_back += 1
            n_rows = len(output.granted)
            buffer = self.tokens.lease(n_rows, n_rows)
            message = write_back(buffer, output.granted, self.epoch, self.n_back, now_ns)
            self.back.send(bytes(bytearray(message)))
            self.tokens.give_back(buffer)

    def report(self, stage_index: int, output: RouteOutput) -> None:
        """Send the coordinator the results of a step."""
        if output.samples or output.faults or output.progress or output.dropped_keys:
            message = pb.ReturnResponse(
                epoch=output.epoch,
                stage_index=stage_index,
                samples=output.samples,
                faults=output.faults,
                progress=output.progress,
                dropped_keys=output.dropped_keys,
            )
            for piece in self.writer.write(message):
                self.n_returned += 1
                self.returns.send(piece)
