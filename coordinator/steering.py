"""What changes a running pipeline: who holds which layers, and whether it sleeps."""

from __future__ import annotations

import dataclasses

from relayline.coordinator.config import ServeConfig
from relayline.coordinator.engine.pipeline import Pipeline
from relayline.coordinator.engine.roster import JoinedRoster
from relayline.coordinator.joining.mover import LayerMover, rebalancer_of
from relayline.coordinator.joining.service import JoinService
from relayline.coordinator.joining.sleeper import Sleeper
from relayline.coordinator.observe.observer import Observer


@dataclasses.dataclass(frozen=True, slots=True)
class Steering:
    """The parts that change one pipeline while it serves. Event loop only."""

    mover: LayerMover
    sleeper: Sleeper

    def attach(self, service: JoinService) -> None:
        """Get to know what stages join at."""
        self.mover.attach(service)
        self.sleeper.attach(service)

    async def close(self) -> None:
        """Stop any change in progress."""
        await self.sleeper.close()
        await self.mover.close()


def steering_of(config: ServeConfig, pipeline: Pipeline, roster: JoinedRoster | None, observer: Observer) -> Steering:
    """Return what changes a pipeline.

    Raises UsageError where its layers are to move by themselves and cannot, or where it is to sleep and cannot.
    """
    mover = LayerMover(
        pipeline,
        config.cut_model,
        rebalancer=rebalancer_of(config.pipeline.serving, can_move=bool(config.join and config.cut_model)),
        read_shape=config.read_shape,
        takeover_s=config.pipeline.serving.takeover_s,
        known=config.join.known if config.join is not None else None,
        on_moved=config.on_moved or (lambda state: None),
        explain_move=config.explain_move or (lambda state: None),
    )
    return Steering(mover, Sleeper(pipeline, roster, observer))
