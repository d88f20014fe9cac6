"""A doctor's visit to a gateway: this machine once, the gateway's own address, and each pipeline behind it."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import ssl
from collections.abc import Mapping

import aiohttp

from relayline.deploy.doctor.examine import Patient, pipeline_probes, shared_probes
from relayline.deploy.doctor.files import look_keys_file
from relayline.deploy.doctor.network import CONNECT_TIMEOUT_S
from relayline.deploy.doctor.report import Finding, Probe, examine, failure, ok, warning
from relayline.deploy.launch.control import Launched, first_key
from relayline.deploy.launch.gateway.pipelines import clashes
from relayline.deploy.launch.state import state_root
from relayline.deploy.manifest.gateway import Behind, GatewayManifest, Place
from relayline.wire.common.texts import system_reason
from relayline.wire.links.ports import port_problem

_REMEDIES = {
    401: "name a file with one of its keys in keyFile",
    403: "let it accept this host: its --allow-host",
    404: "no OpenAI-compatible API is there; correct url",
}


async def examine_gateway(
    gateway: GatewayManifest,
    pipelines: tuple[Behind, ...],
    launched: Mapping[str, Launched],
    timeout_s: float,
    *,
    deep: bool,
) -> list[Finding]:
    """Examine this machine and everything that a gateway's manifest names.

    `pipelines`: those behind it, this machine's hosts as `localhost`; `launched`: those launched here, by name.
    """
    directory = state_root() / gateway.name
    patients = {
        each.name: Patient(each.manifest, launched.get(each.manifest.name), directory / "pipelines" / each.name)
        for each in pipelines
        if each.manifest is not None
    }
    own = launched.get(gateway.name)
    running = own is not None and own.is_running
    visits = [examine(_own_probes(gateway, pipelines, timeout_s, running=running))]
    for each in pipelines:
        if (patient := patients.get(each.name)) is not None:
            visits.append(examine(pipeline_probes(patient, timeout_s, deep=deep)))
        else:
            visits.append(examine([Probe("url", functools.partial(look_place, gateway, each.member.place), timeout_s)]))
    shared, *found = await asyncio.gather(examine(shared_probes([*patients.values()], timeout_s, deep=deep)), *visits)
    names = [gateway.name, *(each.name for each in pipelines)]
    return [
        *shared,
        *(
            dataclasses.replace(finding, check=f"{name}: {finding.check}")
            for name, findings in zip(names, found, strict=True)
            for finding in findings
        ),
    ]


def _own_probes(
    gateway: GatewayManifest, pipelines: tuple[Behind, ...], timeout_s: float, *, running: bool
) -> list[Probe]:
    spec = gateway.spec
    keys = gateway.resolve(spec.api_keys_file) if spec.api_keys_file is not None else None
    return [
        Probe("port", functools.partial(_look_port, spec.http.host, spec.http.port, running=running), timeout_s),
        Probe("ports", functools.partial(_look_clashes, pipelines), timeout_s),
        Probe("api keys", functools.partial(look_keys_file, keys, spec.http.host, "apiKeysFile"), timeout_s),
    ]


def _look_port(host: str, port: int, *, running: bool) -> list[Finding]:
    if not port:
        return [ok("port", "the system chooses it")]
    check, problem = f"port {port}", port_problem(host, port)
    if problem is None:
        return [ok(check, "free for the HTTP API")]
    if running:
        return [ok(check, "the HTTP API: taken, the gateway runs")]
    return [failure(check, f"the HTTP API: {problem}", "end what holds it or name another port in http.port")]


def _look_clashes(pipelines: tuple[Behind, ...]) -> list[Finding]:
    remedy = "name another port for one of them in its manifest"
    return [failure("ports", line, remedy) for line in clashes(pipelines)] or [ok("ports", "no two pipelines want one")]


async def look_place(gateway: GatewayManifest, place: Place) -> list[Finding]:
    """Ask a pipeline that runs elsewhere for its models, with the key and certificates that the gateway has for it."""
    url = (place.url or "").rstrip("/").removesuffix("/v1")
    headers, context = {}, ssl.create_default_context()
    for field, given in (("keyFile", place.key_file), ("caFile", place.ca_file)):
        try:
            if given is not None and field == "keyFile":
                headers["Authorization"] = f"Bearer {first_key(gateway.resolve(given))}"
            elif given is not None:
                context.load_verify_locations(gateway.resolve(given))
        except (OSError, UnicodeDecodeError) as error:
            why = getattr(error, "strerror", None) or str(error)
            return [failure(field, f"{given} cannot be used: {why}", f"correct {field} in the manifest")]
    timeout = aiohttp.ClientTimeout(total=CONNECT_TIMEOUT_S)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout, headers=headers) as session,
            session.get(f"{url}/v1/models", ssl=context) as answer,
        ):
            status = answer.status
    except (aiohttp.ClientError, TimeoutError) as error:
        why = system_reason(error) or str(error) or "no answer in time"
        return [
            warning(
                "url",
                f"{url} does not answer: {why}",
                "start it there; until it answers, its model has replicas, or its clients get 503",
            )
        ]
    if status == 200:
        return [ok("url", f"{url} answers")]
    return [warning("url", f"{url}/v1/models answers {status}", _REMEDIES.get(status, "see its log"))]
