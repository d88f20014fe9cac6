"""Files: the model, the split and its hashes, TLS material, tokens and keys."""

from __future__ import annotations

import dataclasses
import datetime
import stat
from pathlib import Path

from relayline.coordinator.http.edge.key_file import parse_keys
from relayline.coordinator.model.inspection import inspect_whole
from relayline.coordinator.model.pipeline_file import (
    PIPELINE_NAME,
    PipelineFile,
    check_artifact,
    load_pipeline,
)
from relayline.coordinator.model.projectors import read_projector
from relayline.deploy.doctor.report import Finding, Outcome, failure, ok, warning
from relayline.deploy.launch.draft_model import check_draft_model
from relayline.deploy.launch.own_tls import JOIN_DIR
from relayline.deploy.launch.projector import check_projector_of
from relayline.deploy.manifest import Manifest, is_local
from relayline.deploy.manifest.model import AUTO_PROJECTOR
from relayline.deploy.models.model_source import check_here, is_on_hub, projector_here
from relayline.deploy.planning.drafting import draft_memory, eagle3_of, encoder_bytes
from relayline.stage.joining.artifact_store import cached
from relayline.wire.common.errors import ArtifactError, RelaylineError, UsageError
from relayline.wire.common.file_hash import noted_sha256, sha256_of
from relayline.wire.common.places import expanded
from relayline.wire.common.units import GIB, MIB
from relayline.wire.links.roles import Role
from relayline.wire.links.security import CERT_FILE, TOKEN_FILE, LinkSecurity, load_security
from relayline.wire.links.tls_material import RENEW_DAYS, canonical_name, names_of, read_certificate

_MADE_AGAIN = "start `relayline up` again, which makes another one"


def look_model(manifest: Manifest) -> list[Finding]:
    """Look whether the model is there, can be read and split, and is the one that the manifest names."""
    path = manifest.model_path
    if path is None:
        return [ok("model", f"{manifest.spec.model.hf}, downloaded from the hub when needed")]
    try:
        facts = inspect_whole(path)
    except (RelaylineError, OSError) as error:
        return [failure("model", " ".join(str(error).split()), "correct spec.model in the manifest")]
    if not facts.supported:
        return [failure("model", facts.refusal or f"{facts.architecture} is not supported", "choose a supported model")]
    findings = [ok("model", f"{path}: {facts.architecture}, {facts.n_layers} layers, {facts.file_bytes / MIB:.0f} MiB")]
    if manifest.spec.model.sha256 is not None:
        found = sha256_of(path, afresh=True)
        if found != manifest.spec.model.sha256:
            findings.append(
                failure("model sha256", f"{path.name} has {found}", "it is not the manifest's file: download it again")
            )
        else:
            findings.append(ok("model sha256", "as in the manifest"))
    return findings


def look_draft_model(manifest: Manifest) -> list[Finding]:
    """Look whether the draft model is there and can draft for the model, and what it takes; nothing where none is
    named.
    """
    serving, model = manifest.serving, manifest.model_path
    if not serving.draft_model:
        return []
    if is_on_hub(serving.draft_model):
        return [
            ok("draft model", f"{serving.draft_model}, downloaded from the hub when needed; its memory is not counted")
        ]
    try:
        check_here(serving.draft_model)
        if model is not None and model.exists():
            check_draft_model(serving, model)
    except (RelaylineError, OSError) as error:
        return [failure("draft model", " ".join(str(error).split()), "correct coordinator.draftModel in the manifest")]
    if (eagle := eagle3_of(serving)) is not None:
        size = f"{eagle.weights_bytes / GIB:.2f} GiB"
        return [ok("draft model", f"{serving.draft_model}: an EAGLE-3 model of {size}, counted on the last stage")]
    memory = draft_memory(serving)
    if memory is None:
        return [warning("draft model", f"{serving.draft_model}: its memory is not known", "leave room for its file")]
    on_gpu = "" if memory.gpu is None else f" and {memory.gpu.total_bytes / GIB:.2f} of the GPU's"
    cells = f"{serving.draft_ctx_tokens:,} tokens"
    return [ok("draft model", f"{serving.draft_model}: {memory.total_bytes / GIB:.2f} GiB{on_gpu}, for {cells}")]


def look_projector(manifest: Manifest) -> list[Finding]:
    """Look whether the projector is there and belongs to the model, and what its process takes; nothing where none is
    named.
    """
    named, model = manifest.serving.mmproj, manifest.model_path
    if not named:
        return []
    path = projector_here(named, model)
    if path is None and named == AUTO_PROJECTOR and model is None:
        return [ok("projector", "that of the model's repository, downloaded when needed; its memory is not counted")]
    remedy = "correct coordinator.mmproj in the manifest"
    try:
        if path is None and named == AUTO_PROJECTOR:
            return [failure("projector", f"none (mmproj*.gguf) is next to {model}", remedy)]
        found = read_projector(path or expanded(named))
        if path is not None and model is not None and model.exists():
            check_projector_of(path, model)
    except (RelaylineError, OSError) as error:
        return [failure("projector", " ".join(str(error).split()), remedy)]
    takes = " and ".join(what for what, kind in (("images", found.images), ("audio", found.audio)) if kind)
    taken = encoder_bytes(dataclasses.replace(manifest.serving, mmproj=str(path)))
    return [ok("projector", f"{path}: for {takes}, {taken / GIB:.2f} GiB")]


def look_split(directory: Path | None, *, deep: bool = False) -> list[Finding]:
    """Check that the files of a split are unchanged.

    `directory` is None where none is known yet. Files whose status is as at their last hash are read only with `deep`.
    """
    if directory is None or not (directory / PIPELINE_NAME).exists():
        return [ok("artifacts", "none for the plan as it is now; the next start splits the model")]
    try:
        file: PipelineFile = load_pipeline(directory)
    except ArtifactError as error:
        return [failure("artifacts", error.message, f"remove {directory}; the next start splits the model again")]
    findings = []
    for entry in file.artifacts:
        try:
            check_artifact(directory / entry.file, entry, afresh=deep)
        except (ArtifactError, OSError) as error:
            findings.append(
                failure("artifacts", str(error), f"remove {directory}; the next start splits the model again")
            )
    return findings or [ok("artifacts", f"{len(file.artifacts)} files in {directory} have the right sha256")]


def look_caches(splits: Path, fetched: Path) -> list[Finding]:
    """Read every split and every fetched artifact of this user whole, also those that look as they did."""
    findings: list[Finding] = []
    directories = sorted(path.parent for path in splits.glob(f"*/{PIPELINE_NAME}"))
    for directory in directories:
        findings += [found for found in look_split(directory, deep=True) if found.outcome is not Outcome.OK]
    n_fetched = 0
    for entry in cached(fetched):
        path = entry.directory / entry.file
        if entry.is_whole:
            n_fetched += 1
            if sha256_of(path, afresh=True) != (noted_sha256(path) or entry.directory.name):
                findings.append(failure(
                    "artifacts", f"{path}: its content has changed since it was fetched (sha256 differs)",
                                        "the next start fetches it again"))  # fmt: skip
    return findings or [
        ok("artifacts", f"every sha256 is right (splits: {len(directories)}, fetched artifacts: {n_fetched})")
    ]


def look_security(manifest: Manifest, names: tuple[str, ...], own: Path) -> tuple[list[Finding], LinkSecurity | None]:
    """Look at TLS material and join token; also returns the security with which stages can be asked, if it is usable.

    `names` are the host names under which others know processes of this machine; `own` is the directory that the
    launcher makes for a manifest that names none.
    """
    wire = manifest.spec.wire
    token_file = manifest.resolve(wire.token_file) if wire.token_file is not None else None
    if not manifest.uses_tls:
        made = own.parent.parent / JOIN_DIR / TOKEN_FILE
        if token_file is None and made.exists():
            token_file = made  # by `relayline up`
        security = load_security(None, token_file=token_file, insecure=not manifest.all_local, role=Role.COORDINATOR)
        if manifest.all_local:
            return [ok("tls", "not needed: every process is on this machine")], security
        return [warning("tls", "wire.tls.mode is off: activations and prompts cross the network in the clear",
                        "set wire.tls.mode to auto and make material with `relayline certs`")], security  # fmt: skip
    directory = own if wire.tls.directory is None else manifest.resolve(wire.tls.directory)
    if wire.tls.directory is None and not (own / CERT_FILE).exists():
        return [ok("tls", f"`relayline up` will make its own material in {own.parent}")], None
    try:
        security = load_security(directory, token_file=token_file, role=Role.COORDINATOR)
        findings = [_certificate(directory, names, is_own=wire.tls.directory is None)]
    except (RelaylineError, OSError) as error:
        if wire.tls.directory is None:
            return [failure("tls", str(error).partition("; ")[0], _MADE_AGAIN)], None
        return [failure("tls", str(error), "see `relayline certs --help`")], None
    if not security.token:
        findings.append(warning("join token", "none: a stage's certificate is enough to join",
                                "`relayline certs issue` makes one next to the certificate"))  # fmt: skip
    else:
        findings.append(ok("join token", "there"))
    return findings, security


def _certificate(directory: Path, names: tuple[str, ...], *, is_own: bool) -> Finding:
    """Judge a usable certificate; `is_own`: the launcher has made it."""
    certificate = read_certificate(directory / CERT_FILE)
    days = (certificate.not_valid_after_utc - datetime.datetime.now(datetime.UTC)).days
    covered = names_of(certificate)
    text = f"{directory}: for {', '.join(covered)}, {days} days left"
    missing = [name for name in names if canonical_name(name) not in covered]
    if missing:
        return failure(
            "tls",
            f"{text}; not for {', '.join(missing)}",
            _MADE_AGAIN if is_own else "issue it again with these names: relayline certs issue",
        )
    if days < RENEW_DAYS:
        renews = "`relayline up` renews it while it runs, and when it starts"
        return warning("tls", text, renews if is_own else "renew it with `relayline certs issue`")
    return ok("tls", text)


def names_here(manifest: Manifest) -> tuple[str, ...]:
    """Return the names under which other hosts know processes of this machine."""
    host = manifest.spec.coordinator.host
    return (host,) if not is_local(host) else ("localhost",)


def look_keys(manifest: Manifest) -> list[Finding]:
    """Look at the file with API keys of a pipeline."""
    coordinator = manifest.spec.coordinator
    path = manifest.resolve(coordinator.api_keys_file) if coordinator.api_keys_file is not None else None
    return look_keys_file(path, coordinator.http.host, "coordinator.apiKeysFile")


def look_keys_file(path: Path | None, http: str, field: str) -> list[Finding]:
    """Look at a file with API keys. `http`: the host on which the API listens; `field`: of the manifest."""
    if path is None:
        if is_local(http):
            return [ok("api keys", f"none; the API is on {http} only")]
        return [warning("api keys", f"none, and the API listens on {http}: anyone who can reach it may use it",
                        f"name a file with keys in {field}")]  # fmt: skip
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        return [
            failure(
                "api keys",
                f"{path} cannot be read: {getattr(error, 'strerror', None) or error}",
                "make it, one key a line",
            )
        ]
    try:
        keys = parse_keys(text, path)
    except UsageError as error:
        return [failure("api keys", error.message, "write one key a line, as NAME: KEY OPTIONS")]
    if path.stat().st_mode & stat.S_IROTH:
        return [warning("api keys", f"{path} can be read by every user", f"run: chmod 600 {path}")]
    return [ok("api keys", f"{len(keys)} in {path}")]
