"""Ports of this machine, names and reachability of the other hosts, and the descriptions that stages there give."""

from __future__ import annotations

import asyncio
import datetime
import email.utils
import json
import socket
import urllib.parse

import aiohttp

from relayline.coordinator.engine.stage_client import StageClient
from relayline.deploy.doctor.report import Finding, failure, in_daemon, ok, warning
from relayline.deploy.launch.ports import loopback_problem, wanted_ports
from relayline.deploy.machine.addresses import is_this_machine
from relayline.deploy.manifest import Manifest, is_local
from relayline.wire.common.errors import RelaylineError
from relayline.wire.common.phase import Phase
from relayline.wire.common.texts import named_stage, system_reason
from relayline.wire.common.versions import version_of
from relayline.wire.links.ports import port_problem
from relayline.wire.links.revocation import Revocations
from relayline.wire.links.roles import Identity, Role
from relayline.wire.links.security import LinkSecurity, address_of, credential_host
from relayline.wire.pb.relayline.v1 import relayline_pb2 as pb

CONNECT_TIMEOUT_S = 5.0
DESCRIBE_TIMEOUT_S = 10.0
CLOCK_APART_MAX_S = 30.0  # of two machines' wall clocks; certificates and log lines suffer beyond
HEALTH_BYTES_MAX = 4_096
SEE_LOG = "see its log"
_REMEDIES: dict[str, str] = {
    Phase.LOADING: "it waits for stages; `relayline status` names them",
    Phase.RECOVERING: "a stage was lost just now; `relayline status` names it",
    Phase.UNREACHABLE: "a stage sends no heartbeat; start it again if it has ended",
    Phase.DRAINING: "it was told to end; start it again with `relayline up`",
}
OTLP_PORTS = {"http": 4318, "https": 4318, "grpc": 4317, "": 4317}


def look_ports(manifest: Manifest, *, running: bool) -> list[Finding]:
    """Look whether this machine reaches itself, and whether the ports that its processes will listen on are free."""
    problem = loopback_problem()
    findings = [failure("loopback", *problem.split("; ", 1))] if problem else []
    for what, host, port in wanted_ports(manifest):
        problem = port_problem(host, port)
        check = f"port {port}"
        if problem is None:
            findings.append(ok(check, f"free for {what}"))
        elif running:
            findings.append(ok(check, f"{what}: taken, {manifest.name} runs"))
        else:
            findings.append(
                failure(check, f"{what}: {problem}", "end what holds it or name another port in the manifest")
            )
    return findings or [ok("ports", "the system chooses them")]


def look_coordinator_host(manifest: Manifest) -> list[Finding]:
    """Check that stages of other hosts get a coordinator address that they can reach."""
    host = manifest.spec.coordinator.host
    remote = [stage.name for stage in manifest.members if not stage.is_local]
    if remote and is_local(host):
        found = f"coordinator.host is {host}, where {', '.join(remote)} cannot reach it"
        return [failure("coordinator.host", found, "name this machine as the other hosts know it")]
    return []


def hosts_of(manifest: Manifest) -> dict[str, tuple[str, int]]:
    """Return (what, port) by host for everything of the manifest that is not on this machine."""
    hosts: dict[str, tuple[str, int]] = {}
    for stage in manifest.stages:
        if not (stage.is_local or stage.relay):
            hosts.setdefault(stage.host, (named_stage(stage.name), manifest.listen_port(stage)))
    if not is_local(manifest.spec.coordinator.host):
        hosts.setdefault(manifest.spec.coordinator.host, ("the coordinator", manifest.join_port))
    return hosts


async def look_host(host: str, what: str, port: int) -> list[Finding]:
    """Look a name up and connect to it."""
    check = f"host {host}"
    try:
        found = await in_daemon(lambda: socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))
    except OSError as error:
        return [failure(check, f"its name is not known: {error.strerror or error}",
                        "correct it in the manifest, or add it to DNS or /etc/hosts")]  # fmt: skip
    address = found[0][4][0]
    where = f"{host} ({address})" if address != host else host
    try:
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            _, writer = await asyncio.open_connection(str(address), port)
    except ConnectionRefusedError:
        if await in_daemon(lambda: is_this_machine(host)):
            return [ok(check, f"{where} is this machine; {what} has not been started yet")]
        return [warning(check, f"{where} answers, but nothing listens on port {port} ({what})",
                        f"ignore this if {what} has not been started yet")]  # fmt: skip
    except (OSError, TimeoutError) as error:
        why = "no answer" if isinstance(error, TimeoutError) else system_reason(error) or str(error)
        return [failure(check, f"{where} port {port} ({what}) cannot be reached: {why}",
                        f"is the machine up? does a firewall block port {port}?")]  # fmt: skip
    writer.close()
    return [ok(check, f"{where} port {port} ({what}) can be reached")]


async def look_stage(name: str, address: str, host: str, security: LinkSecurity) -> list[Finding]:
    """Ask a stage for its version and its clock; an absent stage is not a finding here.

    `host` is the one that its credential is for.
    """
    client = None
    check = f"stage {name}"
    try:
        who = Identity(Role.STAGE, credential_host(host), name)
        client = StageClient(address, security, who, Revocations(security).generation(who))
        async with asyncio.timeout(DESCRIBE_TIMEOUT_S):
            facts = await client.describe()
            first = await client.status(with_recent=False)
            second = await client.status(with_recent=False)
    except TimeoutError:
        return [failure(check, f"{address} did not answer within {DESCRIBE_TIMEOUT_S:.0f} s", "see its log")]
    except RelaylineError as error:
        return [
            failure(
                check, error.message.splitlines()[0], "run the same version, with certificates of one CA, on both ends"
            )
        ]
    finally:
        if client is not None:
            await client.close()
    findings = [judge_version(check, facts.software_version, version_of())]
    if first is not None and second is not None:
        findings.append(judge_stage_clock(check, first, second))
    return findings


def judge_version(check: str, theirs: str, ours: str) -> Finding:
    """Hold the versions of both ends together."""
    if theirs != ours:
        return warning(check, f"runs relayline {theirs}, this is {ours}", "run the same version on both ends")
    return ok(check, f"runs relayline {theirs}, as here")


def judge_stage_clock(check: str, first: pb.StatusResponse, second: pb.StatusResponse) -> Finding:
    """Hold two readings of a stage's monotonic clock together, taken one after the other."""
    if second.now_ns <= first.now_ns or second.uptime_ns < first.uptime_ns:
        return failure(f"{check} clock", "its monotonic clock does not advance", "repair the clock of that machine")
    return ok(f"{check} clock", f"advances; the stage has held its layers for {second.uptime_ns / 1e9:.0f} s")


async def look_coordinator(url: str, shown: str) -> list[Finding]:
    """Ask a running coordinator at `url` for its health, and hold its wall clock against ours."""
    timeout = aiohttp.ClientTimeout(total=CONNECT_TIMEOUT_S)
    try:
        async with aiohttp.ClientSession(timeout=timeout) as session, session.get(f"{url}/health") as answer:
            status, date = answer.status, answer.headers.get("Date", "")
            word = _phase_of(await answer.content.read(HEALTH_BYTES_MAX))
    except (aiohttp.ClientError, TimeoutError) as error:
        why = system_reason(error) or str(error) or "no answer in time"
        return [warning("coordinator", f"{shown} does not answer: {why}", "see its log")]
    status_text = f"{status}: {word}" if word else str(status)
    findings = [
        ok("coordinator", f"{shown} is healthy")
        if status == 200
        else warning("coordinator", f"{shown}/health answers {status_text}", _REMEDIES.get(word, SEE_LOG))
    ]
    if date:
        there = email.utils.parsedate_to_datetime(date)
        findings.append(judge_wall_clocks((datetime.datetime.now(datetime.UTC) - there).total_seconds()))
    return findings


def _phase_of(body: bytes) -> str:
    """Return the phase in a coordinator's /health, empty if there is none."""
    try:
        answer = json.loads(body)
    except ValueError:
        return ""
    word = answer.get("status") if isinstance(answer, dict) else None
    return word if isinstance(word, str) and word in set(Phase) else ""


def judge_wall_clocks(apart_s: float) -> Finding:
    """Judge how far this machine's clock is from the coordinator's."""
    text = f"{abs(apart_s):.0f} s between this machine and the coordinator"
    if abs(apart_s) > CLOCK_APART_MAX_S:
        return warning("wall clocks", text, "set both clocks by NTP: certificates and traces need the same time")
    return ok("wall clocks", text)


def otlp_address(endpoint: str) -> tuple[str, int] | None:
    """Return host and port of an OTLP endpoint (URL or HOST:PORT); None if it is neither."""
    parts = urllib.parse.urlsplit(endpoint if "://" in endpoint else f"//{endpoint}")
    try:
        port = parts.port
    except ValueError:
        return None
    if not parts.hostname:
        return None
    return parts.hostname, port or OTLP_PORTS.get(parts.scheme, 4317)


async def look_otlp(endpoint: str) -> list[Finding]:
    """Connect to the collector. Serving does not depend on it."""
    remedy = "start the collector or correct telemetry.otlpEndpoint; until then spans are dropped and counted"
    address = otlp_address(endpoint)
    if address is None:
        return [failure("otlp", f"{endpoint!r} is no http(s)://HOST:PORT", "correct telemetry.otlpEndpoint")]
    try:
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            _, writer = await asyncio.open_connection(*address)
    except (OSError, TimeoutError) as error:
        why = "no answer" if isinstance(error, TimeoutError) else system_reason(error) or str(error)
        return [warning("otlp", f"{address_of(*address)} cannot be reached: {why}", remedy)]
    writer.close()
    return [ok("otlp", f"{address_of(*address)} can be reached")]
