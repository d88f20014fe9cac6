"""A survey: this host measures itself for the coordinator, which has no plan yet and hence no artifact for it.

Slices come without their weights: a header, and as many zeros as the file is long, which take no place on a disk and no
time on a link. Steps of them take as long as those of the real layers.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from relayline.stage.joining.client import Member
from relayline.stage.joining.config import JoinConfig
from relayline.stage.joining.reporting import relay_of
from relayline.stage.joining.tunnel import LOCALHOST, Tunnel
from relayline.wire.common import bounds
from relayline.wire.common.child_command import module_command
from relayline.wire.common.errors import NativeError, RelaylineError, StartError
from relayline.wire.common.scratch import scratch_directory
from relayline.wire.common.tasks import end_task
from relayline.wire.links import way
from relayline.wire.model_files.hollow_slice import write_hollow
from relayline.wire.pb.relayline.v1 import join_pb2 as pb
from relayline.wire.pb.relayline.v1 import relayline_pb2 as pb_wire
from relayline.wire.settings.setting import read_message
from relayline.wire.settings.table import EngineSettings

ROUND_TRIPS = 5  # small calls; the quickest counts
LINK_S = 1.0  # for which bytes are taken from the link at most
SLICE_S = 60.0  # that loading a slice may take beyond its budget


class _Costs(msgspec.Struct, frozen=True):
    decode: list[tuple[int, int]]
    prefill: list[tuple[int, int]]


class _Found(msgspec.Struct, frozen=True):
    """The output of `host_probe`."""

    slices: list[_Costs]
    in_service: float
    is_doubtful: bool


async def survey(member: Member, config: JoinConfig) -> None:
    """Do the survey that a membership's order asks for, and report it.

    Raises the loss of the coordinator. The report names the slices that cannot be measured here.
    """
    order, began_ns = member.order.survey, time.monotonic_ns()
    await member.report_progress(pb.ARTIFACT_PHASE_MEASURING, 0, 0)
    report, round_trips, cache = pb.HostMeasured(), [], config.cache
    if config.is_relayed:
        report.is_relayed = True
        await _measure_relayed(report, member, config)
    elif order.link_bytes:
        round_trips.append(await _round_trip_ns(member, order.link_bytes))
        report.bytes_per_s = await _bytes_per_s(member)
    settings = dataclasses.replace(read_message(EngineSettings, member.order.engine), **config.own_settings)
    try:
        if order.slices:
            await _measure(report, order.slices, settings, cache)
    except RelaylineError as error:
        report.failure.label, report.failure.message = error.label, error.message[: bounds.ERROR_TEXT_BYTES_MAX]
    except OSError as error:
        report.failure.label = StartError.label
        report.failure.message = f"{cache}: cannot be written: {error.strerror or error}; give another with --cache"
    if round_trips:  # again: the other hosts measured their links at the same time as this one
        round_trips.append(await _round_trip_ns(member, order.link_bytes))
        report.round_trip_ns = min(round_trips)
    report.took_ns = time.monotonic_ns() - began_ns
    await member.report(measured=report)


async def _measure_relayed(report: pb.HostMeasured, member: Member, config: JoinConfig) -> None:
    """Have the relay measure the way to this stage, as its neighbours will go: through the tunnel to a port of ours."""
    server = await asyncio.start_server(way.answer, LOCALHOST, 0, limit=way.FRAME_BYTES)
    try:
        port = server.sockets[0].getsockname()[1]
        found = await Tunnel(relay_of(member, config), config.name, config.security, port).measured()
        report.round_trip_ns, report.bytes_per_s = found.round_trip_ns, found.bytes_per_s
    finally:
        server.close()


async def _round_trip_ns(member: Member, end: int) -> int:
    """Return the time of the quickest of some calls for no bytes."""
    found = []
    for _ in range(ROUND_TRIPS):
        began_ns = time.monotonic_ns()
        async for _piece in member.fetch(end):
            pass
        found.append(time.monotonic_ns() - began_ns)
    return min(found)


async def _bytes_per_s(member: Member) -> float:
    """Return how many bytes per second come from the coordinator, from its first piece on."""
    n_bytes, first_ns, last_ns = 0, 0, 0
    async with contextlib.aclosing(member.fetch(0)) as pieces:
        async for piece in pieces:
            last_ns = time.monotonic_ns()
            if first_ns:
                n_bytes += len(piece.data)
            first_ns = first_ns or last_ns
            if last_ns - first_ns > LINK_S * 1e9:
                break
    return n_bytes / (last_ns - first_ns) * 1e9 if last_ns > first_ns else 0.0


async def _measure(
    report: pb.HostMeasured, slices: Sequence[pb.SurveySlice], settings: EngineSettings, cache: Path
) -> None:
    """Measure hollow slices in a separate process. Raises NativeError with its message, OSError for the disk."""
    await asyncio.to_thread(cache.mkdir, parents=True, exist_ok=True)
    with scratch_directory("survey-", cache) as directory:
        arguments = [str(settings.n_threads), str(settings.gpu_layers), settings.kv_type]
        for index, each in enumerate(slices):
            path = directory / f"{index}.gguf"
            await asyncio.to_thread(write_hollow, path, each.header, each.size_bytes)
            arguments += [str(each.budget_ms / 1e3), str(path)]
        limit_s = sum(each.budget_ms / 1e3 + SLICE_S for each in slices)
        found = msgspec.json.decode(await _in_child(arguments, limit_s), type=_Found)
    report.in_service, report.is_doubtful = found.in_service, found.is_doubtful
    for costs in found.slices:
        curves = report.slices.add()
        for points, measured in ((curves.decode, costs.decode), (curves.prefill, costs.prefill)):
            points.extend(pb_wire.CostPoint(n_rows=rows, cost_ns=ns) for rows, ns in measured)


async def _in_child(arguments: Sequence[str], limit_s: float) -> bytes:
    command = module_command("relayline.stage.speed.host_probe", *arguments)
    none, pipe = asyncio.subprocess.DEVNULL, asyncio.subprocess.PIPE
    environment = {**os.environ, "GGML_NO_BACKTRACE": "1"}
    child = await asyncio.create_subprocess_exec(*command, stdin=none, stdout=pipe, stderr=pipe, env=environment)
    talking = asyncio.create_task(child.communicate())
    try:
        async with asyncio.timeout(limit_s):
            printed, errors = await asyncio.shield(talking)
    except TimeoutError:
        raise NativeError(f"measuring took longer than {limit_s:.0f} s") from None
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()
        await end_task(talking)
    if child.returncode:
        lines = errors.decode(errors="replace").strip().splitlines() or ["no reason given"]
        raise NativeError(f"measuring ended with exit code {child.returncode}: {lines[-1]}")
    return printed
