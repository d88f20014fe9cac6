"""Makes the orders for a hand-over of lanes: giver, taker and layers. Each pair has its own pass."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence

from relayline.coordinator.engine.conductor import Conductor
from relayline.coordinator.engine.handing import Handed, handed, time_ns
from relayline.coordinator.model.pipeline_file import PipelineFile
from relayline.coordinator.schedule.prompt_time import read_time
from relayline.wire.common import bounds
from relayline.wire.pb.relayline.v1 import join_pb2 as pb

PASS_BYTES = 16


def changing_hands(
    before: tuple[PipelineFile, Sequence[int]], after: tuple[PipelineFile, Sequence[int]], keeps: Sequence[bool]
) -> list[Handed]:
    """Return which layers' lanes change hands from one split and its holders to another; see `handed`."""
    return handed(_layers_of(*before), _layers_of(*after), keeps)


def _layers_of(file: PipelineFile, holders: Sequence[int]) -> list[tuple[int, int, int]]:
    return [(at, stage.layer_start, stage.layer_end) for at, stage in zip(holders, file.stages, strict=True)]


def hand_over_ns(conductor: Conductor) -> int:
    """Return how long lanes may change hands now."""
    running = conductor.admission.running.values()
    return time_ns((len(session.history) for session in running), read_time(conductor.scheduler.planner.stages))


def hand_over_orders(
    changing: Sequence[Handed], names: Sequence[str], addresses: Mapping[int, str]
) -> dict[int, pb.HandOver]:
    """Return each place's order, by place; none at all where some layers' lanes cannot be had.

    names: of all places; addresses: where those serve that give and take lanes. A session resumes only from rows that
    all stages hold. So lanes of some layers alone are worth nothing.
    """
    if any(one.giver not in addresses or one.taker not in addresses for one in changing):
        return {}
    if any(one.giver != one.taker and not addresses[one.giver] for one in changing):
        return {}
    orders: dict[int, pb.HandOver] = {}
    for giver, taker, start, end in changing:
        order = orders.setdefault(taker, pb.HandOver())
        if giver == taker:
            order.takes.add(layer_start=start, layer_end=end)
            continue
        shown_pass = secrets.token_hex(PASS_BYTES)
        order.takes.add(layer_start=start, layer_end=end, address=addresses[giver], shown_pass=shown_pass)
        gives = orders.setdefault(giver, pb.HandOver()).gives
        gives.add(layer_start=start, layer_end=end, to=names[taker], shown_pass=shown_pass)
    too_many = any(max(len(order.gives), len(order.takes)) > bounds.HAND_OVERS_MAX for order in orders.values())
    return {} if too_many else orders
