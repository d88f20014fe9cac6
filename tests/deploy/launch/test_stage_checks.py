"""Devices and directories of this machine's stages, checked before anything is started."""

from __future__ import annotations

import errno
import logging
import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from relayline.deploy.launch import ports
from relayline.deploy.launch.stage_checks import (
    check_stage_devices,
    warn_of_prefix_directory,
    warn_of_shared_gpus,
)
from relayline.deploy.machine.gpus import HostDevice
from relayline.deploy.manifest import Manifest, parse_manifest
from relayline.deploy.testing.processes import relayline
from relayline.wire.common.errors import UsageError
from relayline.wire.links.ports import port_problem
from tests.support.tiny_models import make_tiny
from tests.support.tiny_projectors import make_projector

CPU = HostDevice("CPU", "EPYC", is_gpu=False, shares_memory=False, memory_bytes=0)
GPU = HostDevice("CUDA0", "H100", is_gpu=True, shares_memory=False, memory_bytes=80 << 30)


def manifest_of(stage: str, top: str = "", other: str = "threads: 0") -> Manifest:
    text = (
        "apiVersion: relayline.dev/v1alpha1\nkind: Pipeline\nmetadata: {name: p}\n"
        f"spec:\n  model: {{path: m.gguf}}\n  stages: [{{name: big, {stage}}}, {{name: other, {other}}}]\n{top}"
    )
    return parse_manifest(text.encode(), "p.yaml")


@pytest.mark.parametrize(
    ("stage", "found", "line"),
    [
        ("device: gpu, devices: CUDA1", [CPU, GPU], "--device CUDA1 is unknown here; choose among CUDA0, none"),
        ("device: gpu, devices: CUDA0", [CPU], "--device CUDA0: llama.cpp finds no GPU on this host; leave it out"),
        ("devices: cuda0", [CPU, GPU], "--device cuda0 is unknown here; choose among CUDA0, none"),
        ("device: gpu, mainGpu: 1", [CPU, GPU], "--main-gpu 1: the stage has 1 GPU (CUDA0), counted from 0"),
        ("device: gpu, mainGpu: 1", [CPU], "--main-gpu 1: the stage has no GPU"),
        ('tensorSplit: "3,1"', [CPU, GPU], "--tensor-split 3,1 has 2 shares; the stage has 1 GPU (CUDA0)"),
        ("overrideTensor: ffn=CUDA1", [CPU, GPU], "--override-tensor ffn=CUDA1: no such device here; choose among CPU"),
    ],
)
def test_a_device_that_is_not_here_is_refused_with_its_stage(
    stage: str, found: Sequence[HostDevice], line: str
) -> None:
    with pytest.raises(UsageError) as refused:
        check_stage_devices(manifest_of(stage), lambda: found)
    assert refused.value.message.startswith(f"stage 'big': {line}")
    check_stage_devices(manifest_of(f"{stage}, host: 10.0.0.7"), lambda: found)  # what that host has is not known here
    check_stage_devices(manifest_of(stage), lambda: None)  # nor what a driver does not tell


@pytest.mark.parametrize(
    "stage", ["threads: 1", "devices: none, device: gpu", "overrideTensor: ffn=CPU", "cpuMoeLayers: 3"]
)
def test_nothing_is_asked_where_no_stage_wants_a_gpu(stage: str) -> None:
    """To ask takes a process of its own."""
    check_stage_devices(manifest_of(stage), lambda: pytest.fail("asked"))
    warn_of_shared_gpus(manifest_of(stage), lambda: pytest.fail("asked"))


def test_layers_for_a_gpu_without_one_are_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    manifest = manifest_of("device: gpu, gpuLayers: 5")
    with caplog.at_level(logging.WARNING):
        check_stage_devices(manifest, lambda: [CPU, GPU])
        assert not caplog.messages
        check_stage_devices(manifest, lambda: [CPU])
    (line,) = caplog.messages
    assert line == (
        "llama.cpp finds no GPU on this host, so the processor computes all layers of big; see `relayline doctor`"
    )


@pytest.mark.parametrize(("found", "n_lines"), [([CPU], 0), ([CPU, GPU], 1), (None, 1)])
def test_a_gpu_that_is_not_there_is_not_shared(
    found: Sequence[HostDevice] | None, n_lines: int, caplog: pytest.LogCaptureFixture
) -> None:
    manifest = manifest_of("device: gpu", other="device: gpu")
    with caplog.at_level(logging.WARNING):
        warn_of_shared_gpus(manifest, lambda: found)
    assert len(caplog.messages) == n_lines
    assert all("big and other share all GPUs of localhost" in line for line in caplog.messages)


def test_a_directory_that_holds_no_prefixes_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()

    def warned(directory: Path, n_bytes: int = 1 << 20) -> list[str]:
        caplog.clear()
        context = f"  context: {{prefixDiskBytes: {n_bytes}, prefixDiskDir: {directory}}}\n"
        warn_of_prefix_directory(manifest_of("threads: 0", context))
        return caplog.messages

    assert not warned(tmp_path / "kept")
    assert not warned(tmp_path / "file", n_bytes=0)
    (line,) = warned(tmp_path / "file")
    assert line == f"{tmp_path}/file cannot be used for the prefix cache: File exists; prefixes stay in memory"


def test_ports_that_cannot_be_had_say_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    says = port_problem("nosuchhost.invalid", 1)
    assert says is not None
    assert says.endswith("; give a name or an address of this machine")
    assert port_problem("192.0.2.1", 1) == (
        "192.0.2.1 is no address of this machine; 127.0.0.1 is this machine alone, 0.0.0.0 all addresses"
    )

    def forbid(*_: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(socket.socket, "bind", forbid)
    assert port_problem("127.0.0.1", 80) == "127.0.0.1:80: Permission denied; take a port from 1024 on"


def test_too_few_files_are_not_taken_for_a_loopback_that_is_down(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(ports.socket, "create_server", refuse)
    assert ports.loopback_problem() == "this process may open no more files; raise `ulimit -n`"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama", tmp_path_factory.mktemp("model") / "tiny.gguf", n_layers=4)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--device", "CUDA77"), "stage 'stage-0': --device CUDA77"),
        (("--device", "CUDA77", "--dry-run"), "stage 'stage-0': --device CUDA77"),
        (("--cors", "*x"), "--cors '*x' is not an origin"),
        (("--allow-invites",), "--allow-invites needs --api-keys FILE"),
        (("--mmproj", "PROJECTOR"), "its rows have 128 values, but the model's have 64: it belongs to another model"),
    ],
)
def test_up_refuses_before_it_splits_and_starts(
    flags: tuple[str, ...], says: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    projector = make_projector(tmp_path / "mmproj.gguf", n_embd=128)
    done = relayline("up", model, "--http", "127.0.0.1:0", *(str(projector) if f == "PROJECTOR" else f for f in flags))
    assert done.returncode == 2, done.stderr
    line = done.stderr.splitlines()[-1]  # before it: the context that was chosen
    assert says in line
    assert not (tmp_path / "cache" / "relayline" / "splits").exists()
    assert not [*(tmp_path / "state").rglob("state.json")]


@pytest.mark.parametrize(
    ("flags", "says"),
    [(("--device", "CUDA77"), "--device CUDA77"), (("--stages", "2", "--cuts", "3"), "either --stages or --cuts")],
)
def test_a_model_is_not_loaded_from_the_hub_for_flags_that_cannot_be(
    flags: tuple[str, ...], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    done = relayline("up", "nobody/nothing", "--http", "127.0.0.1:0", *flags)
    assert done.returncode == 2, done.stderr
    assert says in done.stderr
    assert "hub" not in done.stderr
