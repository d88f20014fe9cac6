"""The stages' descriptions, read: whether they fit the pipeline, how fast they are, what all of them can do. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from relayline.coordinator.engine.epoch_facts import EpochFacts
from relayline.coordinator.model.pipeline_file import PipelineFile
from relayline.coordinator.schedule.overhead import HOST_STEP_NS
from relayline.coordinator.schedule.shared_devices import Place, device_numbers, sharing
from relayline.coordinator.schedule.stage_cost import StageCost
from relayline.coordinator.sessions.tier import TierFacts, stored_by_all
from relayline.wire.common.curve import CostCurve
from relayline.wire.common.errors import HandshakeError
from relayline.wire.common.sampler_fields import OPTIONS
from relayline.wire.common.texts import counted, named_layers
from relayline.wire.model_files.adapters import NO_ADAPTERS
from relayline.wire.pb.relayline.v1 import relayline_pb2 as pb

Descriptions = Sequence[pb.DescribeResponse]
"""Of all stages of a pipeline, in layer order."""


def merge(
    stages: Descriptions,
    held: Mapping[int, int],
    costs: Sequence[StageCost],
    wire_dtype: int,
    notes: Mapping[int, bytes] = MappingProxyType({}),
) -> EpochFacts:
    """Return what the stages of an epoch say together.

    held: {session id: tokens that all of them hold}; costs: of each stage; wire_dtype: of the rows between stages;
    notes: stage 0's on stored prefixes, by key.
    """
    takes_mutual_rows = all(stage.takes_mutual_rows for stage in stages)
    return EpochFacts(
        n_lanes=min(stage.n_lanes for stage in stages),
        ctx_tokens=min(stage.ctx_tokens for stage in stages),
        held=held,
        instances=tuple(stage.instance_id for stage in stages),
        costs=costs,
        rewinds=all(stage.rewinds for stage in stages),
        keeps_state=any(stage.keeps_state for stage in stages),
        rewind_rows=min((stage.rewind_rows for stage in stages if not stage.rewinds), default=0),
        predictions=stages[-1].predictions if all(stage.takes_guess_wishes for stage in stages) else 0,
        tier=_tier_of(stages, wire_dtype, notes),
        options=frozenset(stages[-1].options) & OPTIONS,
        mutual_rows_max=min(stage.max_rows for stage in stages) if takes_mutual_rows else 0,
        takes_grids=all(stage.takes_grids for stage in stages),
    )


def _tier_of(stages: Descriptions, wire_dtype: int, notes: Mapping[int, bytes]) -> TierFacts:
    """Return which prefixes the tiers of all stages have, and what these cost."""
    stored = [{each.key: each.n_tokens for each in stage.stored} for stage in stages]
    return TierFacts(
        stored_by_all(stored),
        is_used=all(stage.stores for stage in stages),
        is_on_disk=all(stage.stores_on_disk for stage in stages),
        token_ns=sum(_price_ns(stage.restore_token_ns) for stage in stages),
        store_from_ns=max(stage.store_from_ns for stage in stages),
        adapters=tuple(stages[0].adapters),
        rounding=f"{pb.Dtype.Name(pb.Dtype.ValueType(wire_dtype))} {[stage.layer_start for stage in stages]}",
        keeps_notes=stages[0].keeps_notes,
        notes=notes,
    )


def described_costs(addresses: Sequence[str], stages: Descriptions) -> list[StageCost]:
    """Return each stage's measured speed, with the hosts and devices that it shares with others."""
    share = share_host(addresses)
    devices = device_numbers([place_of(stage.place) for stage in stages])
    return [
        stage_cost(stage, stage.max_rows, is_per_lane=stage.kv_per_lane, shares_host=shares, device=device)
        for stage, shares, device in zip(stages, share, devices, strict=True)
    ]


def device_lines(stages: Descriptions, names: Sequence[str]) -> tuple[str, ...]:
    """Return a line for each device that several stages share. `names`: of the stages; without, by number."""
    numbered = [f"stage-{index}" for index in range(len(stages))]
    return tuple(sharing([place_of(stage.place) for stage in stages], names or numbered))


def stage_cost(
    reported: pb.DescribeResponse | pb.StatusResponse,
    rows_max: int,
    host_ns: int = HOST_STEP_NS,
    *,
    is_per_lane: bool = False,
    shares_host: bool = False,
    device: int = -1,
) -> StageCost:
    """Read a stage's reported speed, and add the cost of a step outside the native decode."""
    return StageCost(
        CostCurve((point.n_rows, point.cost_ns + host_ns) for point in reported.decode_curve),
        CostCurve((point.n_rows, point.cost_ns + host_ns) for point in reported.prefill_curve),
        rows_max,
        _price_ns(reported.context_ns),
        _price_ns(reported.context_tiled_ns),
        is_per_lane=is_per_lane,
        takes_lanes_apart=reported.takes_lanes_apart,
        has_tiles=reported.has_tiles,
        runs_ahead=reported.runs_ahead,
        shares_host=shares_host,
        device=device,
    )


def place_of(place: pb.Place) -> Place:
    """Return the place that a stage's description names."""
    gpus = {device.id: f"{device.name} ({device.description})" for device in place.devices}
    return Place(place.host_id, gpus, frozenset(place.cores), place.n_threads)


def share_host(addresses: Sequence[str]) -> list[bool]:
    """Return of each address whether another is of the same host, by its name."""
    hosts = [address.rpartition(":")[0] for address in addresses]
    return [hosts.count(host) > 1 for host in hosts]


def _price_ns(price_ns: float) -> float:
    """Return a price for planning; 0.0 (unknown) if it is not a usable number."""
    return max(0.0, price_ns) if math.isfinite(price_ns) else 0.0


def check_stages(
    addresses: Sequence[str],
    facts: Descriptions,
    pipeline: PipelineFile,
    *,
    wants_rows: bool = False,
    adapters: Sequence[str] = NO_ADAPTERS,
    inner_layers: Sequence[int] = (),
) -> None:
    """Check the stages' descriptions against the pipeline, in order. `wants_rows`: stage 0 gets rows of images.
    `adapters`: a key of each choice of LoRA adapters. `inner_layers`: those whose inputs all are to hand on.

    Raises HandshakeError.
    """
    if len(addresses) != len(pipeline.stages):
        given = counted(len(addresses), "address was", "addresses were")
        raise HandshakeError(f"the pipeline has {counted(len(pipeline.stages), 'stage')}, but {given} given")
    for index, (address, fact) in enumerate(zip(addresses, facts, strict=True)):
        if fact.pipeline_id != pipeline.pipeline_id:
            what = "another model" if fact.source_sha256 != pipeline.source.sha256 else "another split of this model"
            raise HandshakeError(f"{address} holds {what}; start it with an artifact of this pipeline")
        if fact.stage_index != index:
            raise HandshakeError(
                f"stages are in the wrong order: {address} is stage {fact.stage_index} "
                f"({named_layers(fact.layer_start, fact.layer_end)}), but is number {index} in --stages"
            )
        if fact.n_embd != pipeline.n_embd:
            raise HandshakeError(f"{address} has rows of {fact.n_embd} values, the pipeline {pipeline.n_embd}")
        if fact.kv_per_lane != facts[0].kv_per_lane:  # see wire.common.kv_layout
            raise HandshakeError(
                f"{address} and {addresses[0]} lay out their KV cells differently; start all stages with the same "
                "--kv-layout, per-lane or unified"
            )
        _check_rope(addresses[0], facts[0], address, fact)
        if (tuple(fact.adapters) or NO_ADAPTERS) != tuple(adapters):
            text = "has other LoRA adapters than the coordinator; give both the same --lora and one version"
            raise HandshakeError(f"{address} {text}")
        _check_inner(address, fact, inner_layers)
    if wants_rows and not facts[0].takes_rows:
        text = "cannot take image rows; run this version of relayline there, or start the coordinator without --mmproj"
        raise HandshakeError(f"{addresses[0]} {text}")


def _check_inner(address: str, fact: pb.DescribeResponse, layers: Sequence[int]) -> None:
    """Hold which layers' inputs a stage hands on against those that the draft model of the pipeline reads."""
    found = list(fact.inner_layers)
    if found == list(layers):
        return
    if layers:
        text = "does not hand on the inner rows that the EAGLE-3 model reads"
        helps = "run this version of relayline there with the same --draft-model, or serve without it"
    else:
        text = "hands on inner rows for an EAGLE-3 model, and the coordinator has none"
        helps = "give both the same --draft-model"
    raise HandshakeError(f"{address} {text}; {helps}")


def _check_rope(first_address: str, first: pb.DescribeResponse, address: str, fact: pb.DescribeResponse) -> None:
    """Hold which set of rope factors a stage takes against the first stage's (see wire.common.rope_factors)."""
    if fact.rope_original_tokens != first.rope_original_tokens:
        text = "choose rope factors differently; run the same version on both"
        raise HandshakeError(f"{address} and {first_address} {text}")
    limit = fact.rope_original_tokens
    if limit and (fact.ctx_tokens > limit) != (first.ctx_tokens > limit):
        raise HandshakeError(
            f"{address} has lanes of {fact.ctx_tokens} tokens and {first_address} of {first.ctx_tokens}; this model "
            f"has other rope factors for lanes of more than {limit} tokens, so start all stages with the same --ctx"
        )
