"""Lanes to the tier and back. Decode thread, but where a method says otherwise."""

from __future__ import annotations

from concurrent.futures import Future

from relayline.stage.engine.tier import Tier, TierFigures
from relayline.stage.steps.step_types import Engine, Saver
from relayline.wire.common.errors import PositionGapError, RelaylineError
from relayline.wire.pb.relayline.v1 import relayline_pb2 as pb


class LaneStates:
    """One stage's store of lanes that others took."""

    def __init__(self, engine: Engine, saver: Saver | None, tier: Tier | None) -> None:
        """Without a tier nothing is kept."""
        self._engine, self._saver, self._tier = engine, saver, tier

    @property
    def saver(self) -> Saver | None:
        """What takes lanes' states out of the engine and puts them back."""
        return self._saver

    def store(self, key: int, lane: int, n_tokens: int) -> None:
        """Store the state of a lane with this many tokens. Raises NativeError where the engine cannot save it."""
        if self._tier is not None and self._saver is not None and self._tier.has_room():
            self._tier.store(key, n_tokens, self._saver.save(lane))

    def restore(self, key: int, lane: int, n_tokens: int) -> None:
        """Restore the first n_tokens of a key's state into an empty lane.

        Raises PositionGapError, and leaves the lane empty, where the state is missing, shorter, or cannot be rewound.
        """
        found = self._tier.fetch(key) if self._tier is not None else None
        if found is None or self._saver is None:
            raise PositionGapError(
                f"this stage no longer has the prefix {key:x}, of which {n_tokens} tokens are wanted"
            )
        n_stored, state = found
        if n_tokens > n_stored:
            raise PositionGapError(f"the prefix {key:x} has {n_stored} tokens, {n_tokens} are wanted")
        try:
            if self._saver.restore(lane, state) != n_stored:
                raise PositionGapError(f"the prefix {key:x} has other content than was stored")
            if n_tokens < n_stored:
                self._engine.check_rewind(lane, n_tokens)
                self._engine.drop_from(lane, n_tokens)
        except RelaylineError as error:
            self._engine.clear(lane)
            self.forget(key)  # it would be refused again
            raise PositionGapError(f"the prefix {key:x} cannot be brought back: {error.message}") from error

    def forget(self, key: int) -> None:
        """Give a state's place to others."""
        if self._tier is not None:
            self._tier.forget(key)

    def give_back(self) -> None:
        """Free the memory of an automatic tier. Any thread."""
        if self._tier is not None:
            self._tier.give_back()

    def begin(self, key: int) -> Future[None] | None:
        """Begin to read a state that is on the disk alone; None where there is nothing to wait for. Any thread."""
        return self._tier.begin(key) if self._tier is not None else None

    def tell(self, message: pb.DescribeResponse) -> None:
        """Describe the stored states, and the speed of restoring them, in a handshake. Any thread."""
        if self._tier is None or self._saver is None:
            return
        message.stores, message.stores_on_disk = True, self._tier.is_on_disk
        message.restore_token_ns, message.store_from_ns = self._saver.token_ns, self._tier.store_from_ns
        stored = self._tier.stored()
        message.stored.extend(pb.StoredState(key=key, n_tokens=n_tokens) for key, n_tokens in stored.items())

    def count(self, message: pb.StatusResponse) -> None:
        """Add the tier's contents and counters to a stage's counters. Any thread."""
        figures = self.figures()
        message.tier_memory_bytes, message.tier_disk_bytes = figures.memory_bytes, figures.disk_bytes
        message.tier_states, message.tier_hits, message.tier_misses = figures.n_states, figures.n_hits, figures.n_misses

    def figures(self) -> TierFigures:
        """Return the tier's contents and counters. Any thread."""
        return self._tier.figures() if self._tier is not None else TierFigures()

    def close(self) -> None:
        """Free everything except the disk's files."""
        if self._tier is not None:
            self._tier.close()
