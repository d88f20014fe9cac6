"""Checks before anything is started: names, ports, files, credentials, the context."""

from __future__ import annotations

import logging
from pathlib import Path

from relayline.coordinator.model.pipeline_file import PipelineFile
from relayline.coordinator.model.projectors import read_projector
from relayline.coordinator.text.chat import read_template
from relayline.deploy.launch.arrange import stage_directory
from relayline.deploy.launch.log_files import SUPERVISOR
from relayline.deploy.launch.ports import port_problem, wanted_ports
from relayline.deploy.launch.supervisor import COORDINATOR
from relayline.deploy.manifest import Manifest
from relayline.wire.common.errors import StartError, UsageError
from relayline.wire.links.roles import Role
from relayline.wire.links.security import load_security
from relayline.wire.links.tls_material import check_pair
from relayline.wire.telemetry.config import Level, TelemetryConfig

AUTO_PROJECTOR = "auto"  # the one in the model's repository, or next to the model

log = logging.getLogger("relayline.up")


def check_names(manifest: Manifest) -> None:
    """Raise UsageError for a stage with the name that a process of every launch has."""
    taken = next((stage.name for stage in manifest.members if stage.name in (SUPERVISOR, COORDINATOR)), None)
    if taken is not None:
        raise UsageError(f"no stage can be named {taken!r}: relayline's own logs have that name; rename the stage")


def check_ports(manifest: Manifest) -> None:
    """Raise StartError with every port of this machine that is wanted and not free."""
    problems = [
        f"{what}: {problem}"
        for what, host, port in wanted_ports(manifest)
        if (problem := port_problem(host, port)) is not None
    ]
    if problems:
        raise StartError("; ".join(problems) + "; end what holds it or name another port in the manifest")


def check_before_work(manifest: Manifest) -> None:
    """Check all that can be checked before the model is known. Raises UsageError, StartError."""
    check_names(manifest)
    check_ports(manifest)
    telemetry = manifest.telemetry
    TelemetryConfig(Level.named(telemetry.level), telemetry.otlp_endpoint, telemetry.sampler_ratio)
    coordinator = manifest.spec.coordinator
    if (tls := coordinator.http.tls) is not None:
        check_pair(manifest.resolve(tls.cert_file), manifest.resolve(tls.key_file))
    if coordinator.chat_template_file is not None:
        read_template(manifest.resolve(coordinator.chat_template_file))
    if (mmproj := manifest.serving.mmproj) and mmproj != AUTO_PROJECTOR:
        read_projector(Path(mmproj))


def warn_of_context(ctx_tokens: int, file: PipelineFile) -> None:
    """Warn where streams may grow longer than the model's training context."""
    if 0 < file.ctx_train < ctx_tokens:
        log.warning(
            "the context of %d tokens is longer than the %d that %s was trained for: answers beyond them may "
            "make no sense; --ctx %d saves memory too",
                    ctx_tokens, file.ctx_train, file.model_name, file.ctx_train)  # fmt: skip


def check_security(manifest: Manifest) -> None:
    """Check the credentials of the links of this machine's processes. Raises UsageError."""
    wire = manifest.spec.wire
    token_file = manifest.resolve(wire.token_file) if wire.token_file is not None else None
    if not manifest.uses_tls or wire.tls.directory is None:
        load_security(None, token_file=token_file, insecure=not manifest.all_local, role=Role.COORDINATOR)
        return
    load_security(manifest.resolve(wire.tls.directory), token_file=token_file, role=Role.COORDINATOR)
    for stage in manifest.members:
        if stage.is_local:
            load_security(stage_directory(manifest, stage), role=Role.STAGE, name=stage.name)
