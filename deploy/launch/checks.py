"""Checks before anything is started: ports, files, credentials, the context."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from relayline.coordinator.model.inspection import inspect_model
from relayline.coordinator.model.pipeline_file import PipelineFile
from relayline.coordinator.text.chat import read_template
from relayline.deploy.launch.arrange import stage_directory
from relayline.deploy.launch.companions import check_companions_here
from relayline.deploy.launch.control import launched
from relayline.deploy.launch.kept_places import check_kept_directories
from relayline.deploy.launch.ports import fixed_ports, loopback_problem, wanted_ports
from relayline.deploy.launch.stage_checks import check_names, check_stage_devices, warn_of_prefix_directory
from relayline.deploy.manifest import Manifest
from relayline.wire.common.errors import StartError, UsageError
from relayline.wire.links.ports import port_problem
from relayline.wire.links.roles import Role
from relayline.wire.links.security import address_of, load_security
from relayline.wire.links.tls_material import check_pair
from relayline.wire.settings.setting import entry_of
from relayline.wire.settings.table import EngineSettings, ServingSettings
from relayline.wire.telemetry.choice import chosen
from relayline.wire.telemetry.config import Level, TelemetryConfig

log = logging.getLogger("relayline.up")


def check_ports(manifest: Manifest, *, may_run: bool = False) -> None:
    """Raise StartError with every port of this machine that is wanted and not free.

    `may_run`: whether it may be this pipeline itself that runs here and holds them; then such ports are left out.
    """
    problems, place = [], ""
    for what, host, port in wanted_ports(manifest):
        problem = port_problem(host, port)
        holder = _holder(port) if problem is not None else ""
        if problem is None or (holder and may_run):
            continue
        if holder:
            ending = f"`relayline down {holder}` ends it, or take another port"
            problem = f"{address_of(host, port)} is taken by the pipeline {holder}; {ending}"
        problems.append(f"{what}: {problem}")
        if port == manifest.spec.coordinator.http.port:
            place = " (--http HOST:PORT, or coordinator.http in the manifest)"
    if problems:
        raise StartError(f"{'; '.join(problems)}{place}")


def _holder(port: int) -> str:
    """Return the name of the pipeline of this machine that listens on a port; empty for none that is known."""
    for pipeline in launched(None):
        state = pipeline.state
        if not pipeline.is_running:
            continue
        chosen = any(place.endswith(f":{port}") for place in (state.url, state.join, state.enrol))
        if chosen or port in fixed_ports(pipeline.directory.manifest):
            return state.name
    return ""


def check_before_work(manifest: Manifest, *, may_run: bool = False) -> None:
    """Check all that can be checked before the model is known. `may_run` as in `check_ports`.

    Raises UsageError, StartError.
    """
    check_names(manifest)
    if problem := loopback_problem():
        raise StartError(problem)
    check_ports(manifest, may_run=may_run)
    check_stage_devices(manifest)
    warn_of_prefix_directory(manifest)
    telemetry = manifest.telemetry
    TelemetryConfig(Level.named(telemetry.level), telemetry.otlp_endpoint, telemetry.sampler_ratio)
    if manifest.serving.cors:
        from relayline.coordinator.http.edge.cors import read_origins  # with aiohttp, which few launches need here

        read_origins(manifest.serving.cors)
    coordinator = manifest.spec.coordinator
    tls, keys, template = coordinator.http.tls, coordinator.api_keys_file, coordinator.chat_template_file
    check_files(
        tls=(manifest.resolve(tls.cert_file), manifest.resolve(tls.key_file)) if tls is not None else None,
        api_keys=manifest.resolve(keys) if keys is not None else None,
        chat_template=manifest.resolve(template) if template is not None else None,
        serving=manifest.serving,
        otlp_endpoint=telemetry.otlp_endpoint,
    )
    check_kept_directories(manifest.serving, may_be_full=may_run)


def check_files(
    *,
    tls: tuple[Path, Path] | None,
    api_keys: Path | None,
    chat_template: Path | None,
    serving: ServingSettings,
    otlp_endpoint: str,
) -> None:
    """Check what a coordinator reads besides the model, and where OTEL_* variables send its spans. Raises UsageError.

    Done before a split, which takes minutes. `tls`: certificate and key of the HTTP API.
    """
    if tls is not None:
        check_pair(*tls)
    if api_keys is not None:
        from relayline.coordinator.http.edge.api_keys import ApiKeys  # with aiohttp, which few launches need here

        ApiKeys(api_keys)
    if chat_template is not None:
        read_template(chat_template)
    if serving.allow_invites and api_keys is None:
        raise UsageError("--allow-invites needs --api-keys FILE: a stage sees what passes through it of every request")
    check_companions_here(serving)
    chosen(otlp_endpoint, os.environ)


def warn_of_context(ctx_tokens: int, file: PipelineFile) -> None:
    """Warn where streams may grow longer than the model's training context."""
    if 0 < file.ctx_train < ctx_tokens:
        log.warning(
            "the context of %d tokens is longer than the %d that %s was trained for: answers beyond them may "
            "make no sense; --ctx %d saves memory too",
                    ctx_tokens, file.ctx_train, file.model_name, file.ctx_train)  # fmt: skip


def warn_of_unused_drafts(engine: EngineSettings, path: Path) -> None:
    """Warn of settings for drafts that do nothing with a model. Raises ModelFileError for a file that is none."""
    if not (engine.mtp_drafts or engine.rewind_rows):
        return
    facts = inspect_model(path)
    model, has_states = facts.model_name or facts.architecture, any(facts.state_bytes_per_lane)
    rewinds, drafts = (entry_of(EngineSettings, name).flag for name in ("rewind_rows", "mtp_drafts"))
    if engine.rewind_rows and not has_states:
        log.warning("%s %d does nothing: %s has no recurrent states", rewinds, engine.rewind_rows, model)
    elif engine.rewind_rows and not facts.rewinds_states:
        text = "%s %d does nothing: llama.cpp cannot take back the recurrent states of %s"
        log.warning(text, rewinds, engine.rewind_rows, model)
    if engine.mtp_drafts and facts.prediction is None:
        log.warning("%s %d does nothing: %s has no prediction layers that can draft", drafts, engine.mtp_drafts, model)
    elif engine.mtp_drafts and has_states and not engine.rewind_rows:
        text = "%s %d does nothing without %s N: %s has recurrent states, which a wrong guess changes"
        log.warning(text, drafts, engine.mtp_drafts, rewinds, model)


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
