"""Certificates that the launcher made are renewed while their pipeline runs: it may run for longer than they last."""

from __future__ import annotations

import asyncio
import datetime
import errno
import logging
import os
from pathlib import Path

import pytest

from relayline.deploy.doctor.files import look_security, names_here
from relayline.deploy.doctor.report import Outcome
from relayline.deploy.launch import own_tls
from relayline.deploy.launch.certificates import revoke
from relayline.deploy.launch.own_tls import DAYS_VALID, make_own_tls, renew_own_tls
from relayline.deploy.launch.renewing import renewing
from relayline.deploy.manifest import Manifest, parse_manifest
from relayline.wire.links.security import load_security
from relayline.wire.links.tls_material import check_material, names_of, read_certificate
from tests.support.polling import pause

NOW = datetime.datetime.now(datetime.UTC)
DAY = datetime.timedelta(days=1)
NAMES = ("coordinator", "here", "box1", "gone")
TEXT = b"""
apiVersion: relayline.dev/v1alpha1
kind: Pipeline
metadata: {name: three}
spec:
  model: {path: model.gguf}
  stages: [{name: here}, {name: box1, host: box1}]
  coordinator: {host: head.test}
"""


@pytest.fixture
def manifest() -> Manifest:
    return parse_manifest(TEXT, "three.yaml")


@pytest.fixture
def aged(manifest: Manifest, tmp_path: Path) -> Path:
    """The material of a pipeline that has run for long: it ends in ten days."""
    make_own_tls(manifest, tmp_path / "tls", NOW - (DAYS_VALID - 10) * DAY)
    return tmp_path / "tls"


def days_left(root: Path, name: str) -> int:
    return (read_certificate(root / name / "cert.pem").not_valid_after_utc - NOW).days


def test_what_ends_soon_is_renewed_for_the_same_process_and_names(aged: Path) -> None:
    before = load_security(aged / "here", environment={}, name="here")
    named = names_of(read_certificate(aged / "here" / "cert.pem"))
    assert renew_own_tls(aged, NAMES) == ("coordinator", "here")
    assert days_left(aged, "coordinator") > 300 < days_left(aged, "here")
    after = load_security(aged / "here", environment={}, name="here")
    assert (after.identity, after.token) == (before.identity, before.token)
    assert {*names_of(read_certificate(aged / "here" / "cert.pem"))} == {*named}
    assert renew_own_tls(aged, NAMES) == (), "they last"


def test_who_is_revoked_stays_so(aged: Path) -> None:
    revoke(aged, lambda identity: identity.name == "here", NOW)
    assert renew_own_tls(aged, NAMES) == ("coordinator",)


def test_a_full_disk_leaves_key_and_certificate_that_belong_together(
    aged: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = [aged / "here" / name for name in ("ca.pem", "cert.pem", "key.pem")]
    for n_good in range(3):  # files that have room: the record of what was issued, and the two
        has_room: set[int] = set()

        def fsync(handle: int, n_good: int = n_good, has_room: set[int] = has_room) -> None:
            if (found := os.fstat(handle).st_ino) not in has_room and len(has_room) == n_good:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            has_room.add(found)

        with monkeypatch.context() as patched:
            patched.setattr(os, "fsync", fsync)
            with pytest.raises(OSError, match="No space left"):
                renew_own_tls(aged, ("here",))
        check_material(*files)
    assert not list(aged.rglob(".*")), "nothing half-written stays"


async def test_a_pipeline_that_runs_renews_them_and_tries_again(
    manifest: Manifest, aged: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    real, n_full = own_tls.issue, 0

    def full_at_first(*given: object, **named: object) -> object:
        nonlocal n_full
        n_full += 1
        if n_full == 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "issued")
        return real(*given, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(own_tls, "issue", full_at_first)
    async with asyncio.timeout(20), renewing(manifest, aged, lambda: NAMES, look_s=0.0):
        while "renewed the certificates of" not in caplog.text:
            await pause()
    assert "cannot be renewed, which is tried again: issued: No space left on device" in caplog.text
    assert "renewed the certificates of coordinator, here" in caplog.text
    assert days_left(aged, "coordinator") > 300


async def test_material_of_the_users_own_is_left_alone(manifest: Manifest, aged: Path) -> None:
    given = parse_manifest(TEXT + b"  wire: {tls: {directory: pki/head}}\n", "three.yaml")
    async with renewing(given, aged, lambda: NAMES, look_s=0.0):
        await pause()
    assert days_left(aged, "coordinator") < 11


def test_doctor_names_who_renews_them(manifest: Manifest, aged: Path) -> None:
    findings, security = look_security(manifest, names_here(manifest), aged / "coordinator")
    assert security is not None
    assert findings[0].outcome is Outcome.WARNING
    assert "`relayline up` renews it" in findings[0].remedy
    ended = aged.parent / "ended"
    make_own_tls(manifest, ended, NOW - (DAYS_VALID + 10) * DAY)
    findings, security = look_security(manifest, names_here(manifest), ended / "coordinator")
    assert security is None
    assert "start `relayline up` again" in findings[0].remedy
    assert "certs issue" not in findings[0].found + findings[0].remedy
