"""`relayline doctor`: every outcome of every check, with the real condition wherever it can be made."""

from __future__ import annotations

import asyncio
import datetime
import importlib.metadata
import json
import os
import signal
import socket
import stat
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from relayline.coordinator.model.split import split_model
from relayline.deploy.doctor import files, host, native, network
from relayline.deploy.doctor.examine import examine_manifest
from relayline.deploy.doctor.plan import needed_memory_bytes, split_of, writes_bytes
from relayline.deploy.doctor.report import Finding, Outcome, Probe, examine, ok
from relayline.deploy.launch.certificates import init_authority, issue
from relayline.deploy.launch.control import Launched
from relayline.deploy.launch.process_id import identify
from relayline.deploy.launch.state import LaunchState, ProcessRecord, StateDir
from relayline.deploy.machine import ports
from relayline.deploy.manifest import Manifest, load_manifest
from relayline.deploy.testing.processes import relayline, running
from relayline.wire.common.errors import UsageError
from relayline.wire.common.phase import HostState, Phase
from relayline.wire.links.roles import Role
from relayline.wire.links.security import PLAINTEXT
from relayline.wire.pb.relayline.v1 import relayline_pb2 as pb
from tests.support.tiny_models import make_tiny

OK, WARNING, FAILURE = Outcome.OK, Outcome.WARNING, Outcome.FAILURE
GIB = 1 << 30


def one(findings: list[Finding]) -> Finding:
    (found,) = findings
    return found


def manifest_of(directory: Path, spec: str = "", model: str = "model.gguf") -> Manifest:
    path = directory / "pipeline.yaml"
    path.write_text(
        "apiVersion: relayline.dev/v1alpha1\nkind: Pipeline\nmetadata: {name: patient}\n"
        f"spec:\n  model: {{path: {model}}}\n  context: {{tokens: 64, lanes: 2}}\n{spec}"
    )
    return load_manifest(path)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama", tmp_path_factory.mktemp("model") / "model.gguf", n_layers=4)


@pytest.fixture
def taken() -> Iterator[int]:
    """A port with a listener."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


@pytest.fixture
def free_port() -> int:
    return ports.free_port()


# --- the machine ------------------------------------------------------------------------------------------------------


def test_python() -> None:
    assert host.judge_python((3, 10, 4), "python").outcome is FAILURE
    assert one(host.look_python()).outcome is OK


def test_compiler(tmp_path: Path) -> None:
    def compiler(name: str, script: str) -> str:
        path = tmp_path / name
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        return str(path)

    assert one(host.look_compiler((compiler("good", "echo cc 1.2.3"),))).found.endswith("cc 1.2.3")
    assert one(host.look_compiler((compiler("bad", "exit 3"),))).outcome is WARNING
    missing = one(host.look_compiler((str(tmp_path / "none"),)))
    assert missing.outcome is WARNING
    assert "install" in missing.remedy


@pytest.mark.parametrize(
    ("available", "needed", "outcome"),
    [(GIB, None, OK), (GIB, GIB // 2, OK), (GIB, GIB - 1, WARNING), (GIB, 2 * GIB, FAILURE), (None, 1, WARNING)],
)
def test_memory(available: int | None, needed: int | None, outcome: Outcome) -> None:
    found = host.judge_memory(available, needed)
    assert found.outcome is outcome
    assert outcome is not FAILURE or "1.0 GiB are missing" in found.remedy


def test_open_files() -> None:
    assert host.judge_files(1_024, 4_096, 100).outcome is OK
    assert host.judge_files(256, 4_096, 1_000).remedy == "raise it with `ulimit -n 1128`"
    assert "hard limit" in host.judge_files(256, 256, 1_000).remedy
    assert host.judge_files(64, 64, 0).outcome is FAILURE
    assert one(host.look_files(0)).outcome is not FAILURE


def test_disk(tmp_path: Path) -> None:
    assert host.judge_disk(tmp_path, 3 * GIB, GIB).outcome is OK
    assert host.judge_disk(tmp_path, 3 * GIB, 3 * GIB - 1).outcome is WARNING
    assert host.judge_disk(tmp_path, GIB, 2 * GIB).outcome is FAILURE
    assert one(host.look_disk(tmp_path / "not" / "there" / "yet", 0)).outcome is not FAILURE
    assert one(host.look_disk(tmp_path, 1 << 60)).outcome is FAILURE
    (tmp_path / "file").touch()
    found = one(host.look_disk(tmp_path / "file" / "relayline", 0))
    assert (found.outcome, found.found) == (FAILURE, f"{tmp_path / 'file'} is no directory")


def test_clock() -> None:
    assert host.judge_clock(2026, 1e-9, monotonic=True).outcome is OK
    assert host.judge_clock(1970, 1e-9, monotonic=True).outcome is FAILURE
    assert host.judge_clock(2026, 1e-9, monotonic=False).outcome is FAILURE
    assert host.judge_clock(2026, 0.016, monotonic=True).outcome is WARNING
    assert one(host.look_clock()).outcome is OK


# --- native libraries -------------------------------------------------------------------------------------------------


def test_the_libraries_of_this_installation_load() -> None:
    found = {found.check: found.outcome for found in native.look_native(wants_gpu=False)}
    assert found.keys() == {"llama.cpp", "kernels", "gpu offload", "devices", "extensions"}
    assert (found["gpu offload"], found["extensions"]) == (OK, OK)


def test_a_library_for_another_cpu() -> None:
    program = f"import os, signal; os.kill(os.getpid(), {int(signal.SIGILL)})"
    found = one(native.look_native(wants_gpu=False, program=program))
    assert found.outcome is FAILURE
    assert "another CPU" in found.found
    crashed = one(native.look_native(wants_gpu=False, program="import sys; sys.exit('undefined symbol: x')"))
    assert "undefined symbol: x" in crashed.found


def test_a_library_that_loads_but_whose_kernels_end_the_process() -> None:
    """Such as AMX kernels by a GCC whose ldtilecfg reads unwritten memory."""
    program = native._PROGRAM.replace("code = llama_cpp.llama_decode", f"os.kill(os.getpid(), {int(signal.SIGSEGV)})")
    assert program != native._PROGRAM
    found = one(native.look_native(wants_gpu=False, program=program.replace("(context, ", "#")))
    assert found.outcome is FAILURE
    assert "a step of 12 rows ends with SIGSEGV" in found.found
    assert "-DGGML_NATIVE=OFF" in (found.remedy or "")
    refused = native._PROGRAM.replace("if code else", "if not code else")
    assert one(native.look_native(wants_gpu=False, program=refused)[:1]).found == "a step of 12 rows ends with code 0"


def test_a_step_that_cannot_be_tried_is_no_fault_of_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "DEMO_MODEL", Path(__file__))
    found = one(native.look_native(wants_gpu=False)[:1])
    assert found.outcome is FAILURE
    assert found.found.startswith("the demo model cannot be loaded")


def test_a_step_that_does_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "LOAD_TIMEOUT_S", 0.5)
    found = one(native.look_native(wants_gpu=False, program="import signal; signal.pause()"))
    assert found.outcome is FAILURE
    assert "do not end within" in found.found


def llama(
    version: str = native.LLAMA_VERSION,
    system: str = "CPU : AVX = 1 | AVX2 = 1 |",
    gpu: bool = False,
    kernels: str | None = "q4_0 attention",
    left_out: bool = False,
    amx_is_faulty: bool = False,
) -> Any:
    facts = {"version": version, "system": system, "gpu": gpu, "kernels": kernels, "left_out": left_out}
    return {"llama": facts | {"amx_is_faulty": amx_is_faulty}}


def test_llama_builds() -> None:
    def outcomes(facts: Any, flags: set[str], wants_gpu: bool = False) -> list[Outcome]:
        return [found.outcome for found in native.judge_llama(facts, flags, wants_gpu=wants_gpu)]

    assert outcomes(llama(), {"avx", "avx2"}) == [OK, OK, OK]
    slow = native.judge_llama(llama(), {"avx", "avx2", "avx512f"}, wants_gpu=False)[0]
    assert slow.outcome is WARNING
    assert "AVX512" in slow.found
    assert outcomes(llama("0.3.1"), set()) == [FAILURE, OK, OK]
    assert outcomes(llama(), set(), wants_gpu=True) == [OK, OK, FAILURE]
    assert outcomes(llama(amx_is_faulty=True), set()) == [OK, OK, WARNING, OK]
    without_gpu = native.judge_llama(llama(), set(), wants_gpu=True)[2]
    for remedy in (slow.remedy, without_gpu.remedy):
        assert {"--force-reinstall", "--no-cache-dir"} <= set(remedy.split()), "pip's cache has the build without flags"
    assert outcomes(llama(gpu=True), set(), wants_gpu=True) == [OK, OK, OK]
    assert outcomes({"llama_error": "ImportError: no"}, set()) == [FAILURE]


def test_a_build_for_gpus_that_finds_none() -> None:
    idle = native.judge_offload(("vulkan",), has_gpu=False, wants_gpu=False)
    assert (idle.outcome, idle.found) == (WARNING, "this build can use GPUs (vulkan) but finds none")
    assert "`vulkaninfo --summary` must list the GPU" in idle.remedy
    assert "GGML_VK_VISIBLE_DEVICES" in idle.remedy
    wanted = native.judge_offload(("cuda",), has_gpu=False, wants_gpu=True)
    assert wanted.outcome is FAILURE
    assert "`nvidia-smi` must list the GPU" in wanted.remedy
    assert "rebuild" not in wanted.remedy
    assert native.judge_offload(("cuda",), has_gpu=True, wants_gpu=True).outcome is OK
    facts = llama() | {"backends": ("cuda",)}
    assert native.judge_llama(facts, set(), wants_gpu=True)[2] == wanted


GRAVITON_3 = """\
processor	: 0
BogoMIPS	: 2100.00
Features	: fp asimd aes crc32 atomics fphp asimdhp cpuid asimdrdm asimddp sve svei8mm svebf16 i8mm bf16
CPU implementer	: 0x41
CPU part	: 0xd40
"""


@pytest.mark.parametrize(
    ("cpuinfo", "system", "missing"),
    [
        (GRAVITON_3, "CPU : NEON = 1 | ARM_FMA = 1 |", "this CPU also has FP16_VA, DOTPROD, MATMUL_INT8, SVE"),
        (GRAVITON_3, "CPU : NEON = 1 | ARM_FMA = 1 | FP16_VA = 1 | MATMUL_INT8 = 1 | SVE = 1 | DOTPROD = 1 |", ""),
        ("flags : fpu avx avx2 avx512f", "CPU : NEON = 1 |", ""),  # emulated on x86
    ],
)
def test_a_build_for_any_arm_misses_what_this_one_has(cpuinfo: str, system: str, missing: str, tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text(cpuinfo)
    facts = {**llama(system=system, kernels=None), **dict.fromkeys(
        ("relayline.stage.engine._capture", "relayline.wire.envelopes._rows"), ""
    )}  # fmt: skip
    program = f"print(); print({json.dumps(json.dumps(facts))})"
    found = native.look_native(wants_gpu=False, program=program, cpuinfo=tmp_path / "cpuinfo", machine="aarch64")
    assert found[0].outcome is (WARNING if missing else OK)
    assert found[0].found.endswith(missing)
    assert "do not help this build" in found[1].found


V3 = "CPU : AVX = 1 | AVX2 = 1 | FMA = 1 | F16C = 1 |"


@pytest.mark.parametrize(
    ("facts", "outcome", "text"),
    [
        (llama(), OK, "relayline's are compiled in: q4_0, attention"),
        (llama(kernels=""), OK, "not used: RELAYLINE_KERNELS=off"),
        (llama(system=V3, kernels=None), WARNING, "steps of many rows take longer"),
        (llama(system=V3, kernels=None, left_out=True), OK, "built with RELAYLINE_KERNELS=off"),
        (llama(system=V3, kernels=None, gpu=True), OK, "relayline's do not help this build"),
        (llama(system="CPU : AVX = 1 |", kernels=None), OK, "relayline's do not help this build"),
    ],
)
def test_which_kernels_are_in(facts: Any, outcome: Outcome, text: str) -> None:
    (found,) = [found for found in native.judge_llama(facts, set(), wants_gpu=False) if found.check == "kernels"]
    assert found.outcome is outcome
    assert text in found.found
    assert ("kernels.cmake" in (found.remedy or "")) == (outcome is WARNING)


def test_devices_and_those_that_a_manifest_names() -> None:
    found = [("CUDA0", "H100", 70 * native.GIB, 80 * native.GIB), ("CPU", "EPYC", 0, 0)]
    (finding,) = native.judge_devices(found, {"CUDA0": "a", "CPU": "a"})
    assert finding.outcome is OK
    assert finding.found == "CUDA0: H100, 70.0 of 80.0 GiB free; CPU: EPYC"
    (finding,) = native.judge_devices(found, {"CUDA0": "a", "CUDA1": "b"})
    assert finding.outcome is FAILURE
    assert finding.found.startswith("stage 'b' asks for CUDA1; here are CUDA0: H100")
    assert native.judge_devices((), {"CUDA0": "a"}) == []  # llama.cpp does not load, which another line says


def test_this_machines_own_devices() -> None:
    (finding,) = [f for f in native.look_native(wants_gpu=False, asked={"CUDA77": "card"}) if f.check == "devices"]
    assert finding.outcome is FAILURE
    assert "stage 'card' asks for CUDA77; here are CPU: " in finding.found


def test_extensions() -> None:
    assert (
        native.judge_extensions({"relayline.stage.engine._capture": "", "relayline.wire.envelopes._rows": ""}).outcome
        is OK
    )
    broken = native.judge_extensions(
        {"relayline.stage.engine._capture": "ImportError: undefined symbol", "relayline.wire.envelopes._rows": ""}
    )
    assert broken.outcome is FAILURE
    assert "relayline.stage.engine._capture (ImportError: undefined symbol)" in broken.found


# --- files ------------------------------------------------------------------------------------------------------------


def test_the_model(model: Path, tmp_path: Path) -> None:
    assert one(files.look_model(manifest_of(tmp_path, model=str(model)))).outcome is OK
    missing = one(files.look_model(manifest_of(tmp_path)))
    assert missing.outcome is FAILURE
    assert "model.gguf" in missing.found
    (tmp_path / "model.gguf").write_bytes(b"GGUF is not everything")
    assert one(files.look_model(manifest_of(tmp_path))).outcome is FAILURE
    wrong = files.look_model(manifest_of(tmp_path, model=f"{model}, sha256: '{'0' * 64}'"))
    assert [found.outcome for found in wrong] == [OK, FAILURE]
    split_model(model, tmp_path / "split", cuts=(1,))
    part = one(files.look_model(manifest_of(tmp_path, model=str(tmp_path / "split" / "stage-0.gguf"))))
    assert (part.outcome, "is already one stage of a split" in part.found) == (FAILURE, True)
    import hashlib

    right = hashlib.sha256(model.read_bytes()).hexdigest()
    assert [f.outcome for f in files.look_model(manifest_of(tmp_path, model=f"{model}, sha256: '{right}'"))] == [OK, OK]


def test_artifacts(model: Path, tmp_path: Path) -> None:
    assert one(files.look_split(None)).outcome is OK
    assert one(files.look_split(tmp_path)).outcome is OK
    # It may have been split for another plan, from measurements, and run like that.
    assert one(files.look_split(tmp_path)).found == "none for the plan as it is now; the next start splits the model"
    assert relayline("split", model, "--cuts", "2", "--out", tmp_path / "split").returncode == 0
    assert one(files.look_split(tmp_path / "split")).outcome is OK
    artifact = tmp_path / "split" / "stage-1.gguf"
    content = bytearray(artifact.read_bytes())
    content[-100] ^= 1
    artifact.write_bytes(content)
    altered = one(files.look_split(tmp_path / "split"))
    assert altered.outcome is FAILURE
    assert "sha256" in altered.found
    artifact.unlink()
    assert one(files.look_split(tmp_path / "split")).outcome is FAILURE


def test_a_manifests_need_of_memory_and_disk_is_known(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    manifest = manifest_of(tmp_path, "  stages: [{name: a, layers: [0, 1]}, {name: b, layers: [1, 4]}]\n", str(model))
    needed = needed_memory_bytes(manifest)
    assert needed is not None
    assert needed > model.stat().st_size
    assert writes_bytes([manifest]) == model.stat().st_size
    place = split_of(manifest)
    assert place is not None
    assert relayline("split", model, "--cuts", "1", "--out", place).returncode == 0
    assert writes_bytes([manifest]) == 0
    assert needed_memory_bytes(manifest_of(tmp_path)) is None, "a model that is not here"
    assert split_of(manifest_of(tmp_path)) is None


PHASES = {
    Phase.LOADING: "it waits for stages",
    Phase.RECOVERING: "a stage was lost just now",
    Phase.UNREACHABLE: "a stage sends no heartbeat",
    Phase.DRAINING: "it was told to end",
}
APART = "  stages: [{name: a}, {name: b, host: box.test}]\n  coordinator: {host: head.test}\n"


def test_tls(tmp_path: Path) -> None:
    now = datetime.datetime.now(datetime.UTC)
    long_ago = now - datetime.timedelta(days=30)
    init_authority(tmp_path / "ca", "patient", long_ago)

    def look(wire: str, spec: str = APART) -> list[Finding]:
        manifest = manifest_of(tmp_path, f"{spec}  wire: {{{wire}}}\n")
        return files.look_security(manifest, files.names_here(manifest), tmp_path / "own" / "coordinator")[0]

    assert one(look("", spec="")).found.startswith("not needed")
    assert one(look("tls: {mode: off}")).outcome is WARNING
    assert "will make its own" in one(look("")).found
    assert one(look("tls: {directory: nowhere}")).outcome is FAILURE
    issue(tmp_path / "ca", "head.test", (), 365, tmp_path / "good", now, role=Role.COORDINATOR)
    assert [found.outcome for found in look("tls: {directory: good}")] == [OK, OK]
    (tmp_path / "good" / "token").unlink()
    assert [found.outcome for found in look("tls: {directory: good}")] == [OK, WARNING]
    issue(tmp_path / "ca", "other.test", (), 365, tmp_path / "other", now, role=Role.COORDINATOR)
    other = look("tls: {directory: other}")[0]
    assert (other.outcome, "not for head.test" in other.found) == (FAILURE, True)
    issue(tmp_path / "ca", "head.test", (), 5, tmp_path / "soon", now, role=Role.COORDINATOR)
    assert look("tls: {directory: soon}")[0].outcome is WARNING
    issue(tmp_path / "ca", "head.test", (), 5, tmp_path / "late", long_ago, role=Role.COORDINATOR)
    assert "expired" in one(look("tls: {directory: late}")).found
    issue(tmp_path / "ca", "head.test", (), 365, tmp_path / "own" / "coordinator", now, role=Role.COORDINATOR)
    assert [found.outcome for found in look("")] == [OK, OK]


def test_api_keys(tmp_path: Path) -> None:
    def look(coordinator: str) -> Finding:
        return one(files.look_keys(manifest_of(tmp_path, f"  coordinator: {{{coordinator}}}\n")))

    assert look("http: {port: 0}").outcome is OK
    assert look("http: {host: 0.0.0.0}").outcome is WARNING
    assert look("apiKeysFile: keys").outcome is FAILURE
    keys = tmp_path / "keys"
    keys.write_text("# nothing\n")
    assert "no API key" in look("apiKeysFile: keys").found
    keys.write_text("me: 0123456789abcdef share=none\n")
    assert look("apiKeysFile: keys").found.endswith("keys:1: share: expected `int`, got `str`")
    keys.write_text("me: 0123456789abcdef\n")
    keys.chmod(stat.S_IRUSR | stat.S_IROTH)
    assert look("apiKeysFile: keys").remedy == f"run: chmod 600 {keys}"
    keys.chmod(stat.S_IRUSR)
    assert look("apiKeysFile: keys").outcome is OK


# --- the network ------------------------------------------------------------------------------------------------------


def test_ports(tmp_path: Path, taken: int, free_port: int) -> None:
    def look(port: int, *, runs: bool = False) -> Finding:
        return one(
            network.look_ports(manifest_of(tmp_path, f"  coordinator: {{http: {{port: {port}}}}}\n"), running=runs)
        )

    assert look(free_port).outcome is OK
    assert look(taken).outcome is FAILURE
    assert look(taken, runs=True).outcome is OK
    assert look(0).check == "ports"


async def test_hosts(taken: int, free_port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert one(await network.look_host("localhost", "stage a", taken)).outcome is OK
    here = one(await network.look_host("127.0.0.1", "the coordinator", free_port))
    assert (here.outcome, "is this machine; the coordinator has not been started yet" in here.found) == (OK, True)
    monkeypatch.setattr(network, "is_this_machine", lambda _: False)
    refused = one(await network.look_host("127.0.0.1", "stage a", free_port))
    assert (refused.outcome, "has not been started yet" in refused.remedy) == (WARNING, True)
    unknown = one(await network.look_host("no-such-host.invalid", "stage a", 1))
    assert (unknown.outcome, "its name is not known" in unknown.found) == (FAILURE, True)


def test_hosts_elsewhere_are_found_in_the_manifest(tmp_path: Path) -> None:
    manifest = manifest_of(tmp_path, APART)
    assert network.hosts_of(manifest) == {"box.test": ("stage b", 50_051), "head.test": ("the coordinator", 50_050)}
    assert network.look_coordinator_host(manifest) == []
    unreachable = manifest_of(tmp_path, "  stages: [{name: a}, {name: b, host: box.test}]\n")
    assert one(network.look_coordinator_host(unreachable)).outcome is FAILURE


async def test_otlp(taken: int, free_port: int) -> None:
    assert one(await network.look_otlp(f"http://127.0.0.1:{taken}")).outcome is OK
    assert one(await network.look_otlp(f"127.0.0.1:{free_port}")).outcome is WARNING
    assert one(await network.look_otlp("http://")).outcome is FAILURE
    assert network.otlp_address("http://collector") == ("collector", 4318)
    assert network.otlp_address("grpc://[::1]") == ("::1", 4317)
    assert network.otlp_address("x:notaport") is None


async def test_stages_and_their_clocks(model: Path, tmp_path: Path) -> None:
    assert relayline("split", model, "--cuts", "2", "--out", tmp_path / "split").returncode == 0
    artifact = tmp_path / "split" / "stage-1.gguf"
    with running("stage", "--artifact", artifact, "--ctx", "64", "--lanes", "2", "--no-calibrate", "--json") as stage:
        address = stage.event["address"]
        assert [found.outcome for found in await network.look_stage("b", address, "localhost", PLAINTEXT)] == [OK, OK]
    assert one(await network.look_stage("b", address, "localhost", PLAINTEXT)).outcome is FAILURE
    version = importlib.metadata.version("relayline")
    assert network.judge_version("stage b", version, version).outcome is OK
    assert network.judge_version("stage b", "9.9.9", version).outcome is WARNING
    stuck = pb.StatusResponse(now_ns=5, uptime_ns=5)
    assert network.judge_stage_clock("stage b", stuck, stuck).outcome is FAILURE


def serving(answer: bytes) -> tuple[int, Callable[[], None]]:
    """Answer one HTTP request on a port."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        connection, _ = listener.accept()
        with connection, listener:
            connection.recv(4_096)
            connection.sendall(answer)

    thread = threading.Thread(target=serve)
    thread.start()
    return listener.getsockname()[1], thread.join


@pytest.mark.parametrize(
    ("status", "date", "outcomes"),
    [
        ("200 OK", "", [OK]),
        ("503 Service Unavailable", "", [WARNING]),
        ("200 OK", "Date: Thu, 01 Jan 2026 00:00:00 GMT\r\n", [OK, WARNING]),
    ],
)
async def test_the_coordinator_and_its_clock(status: str, date: str, outcomes: list[Outcome]) -> None:
    port, join = serving(f"HTTP/1.1 {status}\r\nContent-Length: 0\r\n{date}Connection: close\r\n\r\n".encode())
    findings = await network.look_coordinator(f"http://127.0.0.1:{port}", "http://box:8080")
    await asyncio.to_thread(join)
    assert [found.outcome for found in findings] == outcomes
    gone = one(await network.look_coordinator(f"http://127.0.0.1:{port}", "http://box:8080"))
    assert (gone.outcome, gone.found) == (WARNING, "http://box:8080 does not answer: Connection refused")


@pytest.mark.parametrize(
    ("body", "says", "remedy"),
    [
        *((b'{"status":"%s"}' % phase.value.encode(), f"503: {phase.value}", words) for phase, words in PHASES.items()),
        (b'{"status":"dreaming"}', "/health answers 503", "see its log"),
        (b"[1", "/health answers 503", "see its log"),
        (b'{"status":["loading"]}', "/health answers 503", "see its log"),
    ],
)
async def test_the_coordinators_own_state_is_shown(body: bytes, says: str, remedy: str) -> None:
    port, join = serving(b"HTTP/1.1 503 No\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%s" % (len(body), body))
    finding = one(await network.look_coordinator(f"http://127.0.0.1:{port}", "http://box:8080"))
    await asyncio.to_thread(join)
    assert finding.outcome is WARNING
    assert finding.found.endswith(says)
    assert remedy in finding.remedy


def test_wall_clocks() -> None:
    assert network.judge_wall_clocks(-2).outcome is OK
    assert network.judge_wall_clocks(-3_600).outcome is WARNING


# --- the visit --------------------------------------------------------------------------------------------------------


async def test_probes_are_bounded_and_side_by_side() -> None:
    release = threading.Event()
    begun = threading.Event()

    def hang() -> list[Finding]:
        begun.set()
        release.wait()
        return []

    def meanwhile() -> list[Finding]:
        assert begun.wait(30)
        return [ok("quick", "done beside the other")]

    def fail() -> list[Finding]:
        raise UsageError("what is wrong")

    def absent() -> list[Finding]:
        raise FileNotFoundError(2, "No such file or directory", "/x")

    slow, quick, wrong, missing = await examine(
        [
            Probe("slow", hang, 0.5),
            Probe("quick", meanwhile, 30),
            Probe("wrong", fail, 30),
            Probe("missing", absent, 30),
        ]
    )
    release.set()
    assert (slow.outcome, slow.check) == (WARNING, "slow")
    assert quick.outcome is OK
    assert (wrong.outcome, wrong.found) == (FAILURE, "what is wrong")
    assert missing.found == "/x No such file or directory"


async def test_a_manifest_with_everything_wrong(model: Path, tmp_path: Path, taken: int, free_port: int) -> None:
    manifest = manifest_of(
        tmp_path,
        "  stages: [{name: a}, {name: b, host: no-such-host.invalid}]\n"
        f"  coordinator: {{host: 127.0.0.1, http: {{port: {taken}}}, apiKeysFile: nowhere}}\n"
        f"  telemetry: {{otlpEndpoint: 'http://127.0.0.1:{free_port}'}}\n",
    )
    found = {finding.check: finding for finding in await examine_manifest(manifest, None, 30)}
    for check in ("model", f"port {taken}", "api keys", "coordinator.host", "host no-such-host.invalid"):
        assert found[check].outcome is FAILURE, found[check]
        assert found[check].remedy
    assert found["otlp"].outcome is WARNING
    assert found["python"].outcome is OK


async def test_a_pipeline_of_every_interface_is_called_by_its_own_address(model: Path, tmp_path: Path) -> None:
    port, join = serving(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
    me = identify(os.getpid())
    assert me is not None
    reached = ProcessRecord("coordinator", "coordinator", "localhost", HostState.READY, address="http://10.0.0.9:8080")
    url = f"http://0.0.0.0:{port}"
    state = LaunchState(1, "small", "m", Phase.READY, me.pid, me.start_ticks, url, processes=(reached,))
    launched = Launched(StateDir(tmp_path / "state"), state)
    findings = await examine_manifest(manifest_of(tmp_path, model=str(model)), launched, 30)
    await asyncio.to_thread(join)
    (healthy,) = (found.found for found in findings if found.check == "coordinator")
    assert healthy == "http://10.0.0.9:8080 is healthy"


def test_the_command(model: Path, tmp_path: Path) -> None:
    done = relayline("doctor", "--json")
    findings = json.loads(done.stdout)
    assert {"python", "llama.cpp", "memory", "disk"} <= {found["check"] for found in findings}
    assert done.returncode == (1 if any(found["outcome"] == "failure" for found in findings) else 0)
    manifest_of(tmp_path, model="nowhere.gguf")
    sick = relayline("doctor", tmp_path / "pipeline.yaml")
    assert sick.returncode == 1
    line = next(line for line in sick.stdout.splitlines() if line.startswith("failure") and " model " in line)
    assert "nowhere.gguf" in line
    assert "-> correct spec.model in the manifest" in sick.stdout
    assert relayline("doctor", tmp_path / "none.yaml").returncode == 2
    assert "Traceback" not in sick.stderr
    assert sys.executable in relayline("doctor").stdout
