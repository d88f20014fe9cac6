"""The native libraries: llama.cpp's build, this CPU's abilities, and whether steps run and extensions load.

All of it runs in a separate process: a library built for another CPU, or by a faulty compiler, ends its process.
"""

from __future__ import annotations

import json
import os
import platform
import re
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from relayline.deploy.doctor.report import Finding, failure, ok, warning
from relayline.deploy.machine.gpus import gpu_backends
from relayline.wire.common.child_command import code_command
from relayline.wire.common.units import GIB

LLAMA_VERSION = "0.3.36"  # stage/ relies on this version's struct layout and tensor names
LOAD_TIMEOUT_S = 30.0
PROBE_TIMEOUT_S = LOAD_TIMEOUT_S + 5  # the process is ended and judged within the probe's own time
# What llama.cpp says of its build -> the same in /proc/cpuinfo. These make a difference to decode speed.
FEATURES = {
    "AVX": "avx",
    "AVX2": "avx2",
    "F16C": "f16c",
    "FMA": "fma",
    "AVX512": "avx512f",
    "AVX512_VNNI": "avx512_vnni",
    "NEON": "asimd",
    "FP16_VA": "asimdhp",
    "DOTPROD": "asimddp",
    "MATMUL_INT8": "i8mm",
    "SVE": "sve",
}
# pip's cache knows a wheel by its version alone, and would give back the one that was built without the flags.
_NATIVE = f"-DGGML_NATIVE=ON -DCMAKE_PROJECT_ggml_INCLUDE={Path(__file__).parents[1] / 'kernels' / 'kernels.cmake'}"
_PIP = (
    "pip install --force-reinstall --no-deps --no-cache-dir --no-binary llama-cpp-python "
    f"llama-cpp-python=={LLAMA_VERSION}"
)
REBUILD = f'rebuild on this machine: CMAKE_ARGS="{_NATIVE}" {_PIP}'
PORTABLE = (
    "run `make rebuild` in the source tree; if that does not help, build without this CPU's own kernels (and with the "
    f'flags of your GPU, if it has one): CMAKE_ARGS="-DGGML_NATIVE=OFF" {_PIP}'
)
WITH_GPU = f'rebuild with your GPU\'s backend, such as CMAKE_ARGS="-DGGML_CUDA=ON" {_PIP}'
# What says whether a backend's driver is there.
DRIVER_CHECKS = {"cuda": "`nvidia-smi`", "hip": "`rocminfo`", "vulkan": "`vulkaninfo --summary`"}

DEMO_MODEL = Path(__file__).parents[1] / "demo" / "relayline-demo.gguf"
STEP_ROWS = 12  # enough for the kernels of several rows, which need not be those of one
_LOADED = "llama.cpp was loaded"
_OUR_SYMBOL = "relayline_kernels"  # says which they are, in builds that have relayline's kernels
_OUR_FEATURES = {"AVX2", "FMA", "F16C"}  # their requirements
_PROGRAM = f"""
import ctypes, json, importlib, importlib.metadata, os, sys
found = {{}}
for name in ("relayline.stage.engine._capture", "relayline.wire.envelopes._rows"):
    try:
        importlib.import_module(name)
        found[name] = ""
    except Exception as error:
        found[name] = f"{{type(error).__name__}}: {{error}}"
try:
    import llama_cpp
    from relayline.stage.engine import ggml
    from relayline.wire.common.faulty_amx import amx_is_faulty, leave_faulty_amx
    symbol = getattr(llama_cpp.llama_cpp._lib, "{_OUR_SYMBOL}", None)
    if symbol is not None:
        symbol.restype = ctypes.c_char_p
    mark = os.path.join(os.path.dirname(llama_cpp.__file__), "lib", "relayline-build.txt")
    found["llama"] = {{"version": importlib.metadata.version("llama-cpp-python"),
                      "system": llama_cpp.llama_print_system_info().decode(),
                      "gpu": bool(llama_cpp.llama_supports_gpu_offload()),
                      "kernels": symbol and symbol().decode(),
                      "amx_is_faulty": amx_is_faulty(llama_cpp.llama_cpp._lib),
                      "devices": [(each.name, each.description, *(ggml.memory_bytes(each) if each.is_gpu else (0, 0)))
                                  for each in ggml.list_devices()],
                      "left_out": os.path.isfile(mark) and open(mark).readline() == "kernels OFF\\n"}}
    print("{_LOADED}", flush=True)
    params = llama_cpp.llama_model_default_params()
    no_devices = (ctypes.c_void_p * 1)()  # a GPU may be full with what runs
    params.devices = ctypes.addressof(no_devices)
    leave_faulty_amx(llama_cpp.llama_cpp._lib, params)
    model = llama_cpp.llama_model_load_from_file(sys.argv[1].encode(), params)
    context = model and llama_cpp.llama_init_from_model(model, llama_cpp.llama_context_default_params())
    if context:
        tokens = (llama_cpp.llama_token * {STEP_ROWS})(*range({STEP_ROWS}))
        code = llama_cpp.llama_decode(context, llama_cpp.llama_batch_get_one(tokens, {STEP_ROWS}))
        found["step"] = f"a step of {STEP_ROWS} rows ends with code {{code}}" if code else ""
    else:
        found["step"] = f"the demo model cannot be loaded ({{sys.argv[1]}})"
except Exception as error:
    found["llama_error"] = f"{{type(error).__name__}}: {{error}}"
print("\\n" + json.dumps(found), flush=True)
os._exit(0)  # some backends abort at exit if something was not freed
"""


def look_native(
    *,
    wants_gpu: bool,
    asked: Mapping[str, str] | None = None,
    program: str = _PROGRAM,
    cpuinfo: Path = Path("/proc/cpuinfo"),
    machine: str | None = None,
) -> list[Finding]:
    """Load everything native, run one step of the demo model and judge it.

    `asked`: devices that the manifest names for stages here, each with its stage.
    """
    command = code_command(program, str(DEMO_MODEL))
    environment = os.environ | {"GGML_NO_BACKTRACE": "1"}  # a crash would wait for a debugger
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=LOAD_TIMEOUT_S, check=False, env=environment
        )
    except subprocess.TimeoutExpired:
        text = f"loading it and a step of {STEP_ROWS} rows do not end within {LOAD_TIMEOUT_S:.0f} s"
        return [failure("llama.cpp", text, PORTABLE)]
    if done.returncode:
        return [judge_death(done.returncode, done.stderr, is_loaded=_LOADED in done.stdout)]
    facts = json.loads(done.stdout.strip().splitlines()[-1])
    facts["backends"] = gpu_backends()
    devices = judge_devices(facts.get("llama", {}).get("devices", ()), asked or {})
    return [
        *judge_llama(facts, _cpu_flags(cpuinfo, machine or platform.machine()), wants_gpu=wants_gpu),
        *devices,
        judge_extensions(facts),
    ]


def judge_death(code: int, stderr: str, *, is_loaded: bool) -> Finding:
    """Say why the process died, while it loaded llama.cpp or, once it `is_loaded`, in the step."""
    if code == -signal.SIGILL:
        return failure("llama.cpp", "it was built for another CPU (illegal instruction)",
                       REBUILD)  # fmt: skip
    how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
    if is_loaded:
        return failure(
            "llama.cpp", f"a step of {STEP_ROWS} rows ends with {how}: its kernels do not run here", PORTABLE
        )
    return failure("llama.cpp", f"loading it ends with {how}: {(stderr.splitlines() or ['no message'])[-1]}",
                   f"install llama-cpp-python=={LLAMA_VERSION} anew")  # fmt: skip


def judge_llama(facts: dict[str, Any], cpu_flags: set[str], *, wants_gpu: bool) -> list[Finding]:
    """Judge version, CPU features and GPU offload of the installed llama-cpp-python."""
    if facts.get("llama_error"):
        return [failure("llama.cpp", facts["llama_error"], f"pip install llama-cpp-python=={LLAMA_VERSION}")]
    if facts.get("step"):
        return [failure("llama.cpp", facts["step"], PORTABLE)]
    version, system, gpu = facts["llama"]["version"], facts["llama"]["system"], facts["llama"]["gpu"]
    built = {name for name, value in re.findall(r"(\w+) = (\d+)", system) if value != "0"}
    text = f"llama-cpp-python {version}: {' '.join(sorted(built)) or 'no CPU features'}"
    if version.partition("+")[0] != LLAMA_VERSION:
        findings = [
            failure("llama.cpp", text, f"install llama-cpp-python=={LLAMA_VERSION}: the stage relies on its layout")
        ]
    elif unused := [name for name, flag in FEATURES.items() if flag in cpu_flags and name not in built]:
        text += f"; this CPU also has {', '.join(unused)}"
        findings = [warning("llama.cpp", text, REBUILD)]
    else:
        findings = [ok("llama.cpp", text)]
    could_have = built >= _OUR_FEATURES and not gpu
    findings.append(
        judge_kernels(facts["llama"]["kernels"], left_out=facts["llama"]["left_out"], could_have=could_have)
    )
    if facts["llama"]["amx_is_faulty"]:
        text = "products by AMX are wrong for several streams in this build, and stay unused: steps take longer"
        findings.append(warning("amx", text, REBUILD))
    findings.append(judge_offload(facts.get("backends", ()), has_gpu=gpu, wants_gpu=wants_gpu))
    return findings


def judge_offload(backends: Sequence[str], *, has_gpu: bool, wants_gpu: bool) -> Finding:
    """Judge whether layers can go to a GPU. `backends`: this build's for GPUs, also where they find none."""
    if has_gpu:
        return ok("gpu offload", "supported by this build")
    if not backends and wants_gpu:
        text = "not supported by this build, but the manifest has a GPU stage on this machine"
        return failure("gpu offload", text, WITH_GPU)
    if not backends:
        return ok("gpu offload", "not in this build, and no stage here needs it")
    text = f"this build can use GPUs ({', '.join(backends)}) but finds none"
    checks = " or ".join(DRIVER_CHECKS.get(name, name) for name in backends)
    remedy = f"{checks} must list the GPU: install its driver, or pass the GPU into the container"
    if "vulkan" in backends:
        remedy += "; Vulkan's devices in software are used only if GGML_VK_VISIBLE_DEVICES has their numbers"
    if wants_gpu:
        return failure("gpu offload", f"{text}, but the manifest has a GPU stage on this machine", remedy)
    return warning("gpu offload", text, remedy)


def judge_kernels(kernels: str | None, *, left_out: bool, could_have: bool) -> Finding:
    """Report which of relayline's kernels are in: their names, "" where they are off, None for a build without them.

    `left_out`: the build was made without them on purpose. `could_have`: they would speed up steps of this build.
    """
    if kernels:
        return ok("kernels", f"relayline's are compiled in: {kernels.replace(' ', ', ')}")
    if kernels is not None:
        return ok("kernels", "relayline's are compiled in but not used: RELAYLINE_KERNELS=off")
    if left_out:
        return ok("kernels", "only llama.cpp's own; it was built with RELAYLINE_KERNELS=off")
    if could_have:
        text = "llama.cpp was built without relayline's kernels: steps of many rows take longer"
        return warning("kernels", text, REBUILD)
    return ok("kernels", "only llama.cpp's own; relayline's do not help this build")


def judge_devices(found: Sequence[tuple[str, str, int, int]], asked: Mapping[str, str]) -> list[Finding]:
    """Name the devices of this machine, each with its model, free memory and all of it in bytes (0: the host's own).

    `asked`: as of `look_native`.
    """
    if not found:
        return []
    text = "; ".join(
        f"{name}: {model}" + (f", {free / GIB:.1f} of {total / GIB:.1f} GiB free" if total else "")
        for name, model, free, total in found
    )
    missing = [name for name in asked if name not in {name for name, *_ in found}]
    if missing:
        text = f"stage {asked[missing[0]]!r} asks for {missing[0]}; here are {text}"
        return [
            failure("devices", text, "use names from this list, and check that CUDA_VISIBLE_DEVICES hides no device")
        ]
    return [ok("devices", text)]


def judge_extensions(facts: dict[str, Any]) -> Finding:
    """Judge relayline's own C extensions."""
    broken = [
        f"{name} ({facts[name]})"
        for name in ("relayline.stage.engine._capture", "relayline.wire.envelopes._rows")
        if facts.get(name)
    ]
    if broken:
        return failure(
            "extensions", f"cannot be loaded: {', '.join(broken)}", "build them: pip install -e . in the source tree"
        )
    return ok("extensions", "relayline.stage.engine._capture and relayline.wire.envelopes._rows load")


def _cpu_flags(cpuinfo: Path, machine: str) -> set[str]:
    """Return the features of this machine's kind. An emulated process may be shown its host's, of another kind."""
    try:
        text = cpuinfo.read_text()
    except OSError:
        return set()
    key = "Features" if machine in ("aarch64", "arm64") else "flags"
    found = re.search(rf"^{key}\s*:(.*)$", text, re.MULTILINE)
    return set(found[1].split()) if found else set()
