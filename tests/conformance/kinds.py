"""How a suite of each kind is installed and run. Each has its own folder for its environment and its report."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable, Mapping
from pathlib import Path

from tests.conformance.commands import SUITES_DIR, call, new, program, run
from tests.conformance.compiled import run_cargo, run_go, run_maven
from tests.conformance.table import Suite

TEST_S = 90
_MODEL_NAMES = (
    (re.compile(r'model="[^"]*"'), 'model="{model}"'),
    (re.compile(r'^(\s+)"(gpt|claude|text|ft:gpt)-?[^"]*",$', re.MULTILINE), r'\1"{model}",'),
    (re.compile(r'model_id="model_id"'), 'model_id="{model}"'),
)


def run_pytest(suite: Suite, place: Path, url: str, model: str) -> Path:
    """Run a suite of pytest, ours or of a package's source archive."""
    python = _python(suite, place)
    tests = _sources(suite, place, python, model) if suite.source else _copied(suite, place / "tests")
    report = new(place / suite.report)
    settings = ["-p", "no:cacheprovider", "-p", "no:unraisableexception", "-q", f"--timeout={TEST_S}"]
    # Clients keep connections for longer than one test, so all tests share one event loop.
    settings += ["-o", "asyncio_mode=auto", "-o", "asyncio_default_test_loop_scope=session", "-o", "addopts="]
    settings += [f"--junitxml={report}", f"--rootdir={tests}"] + (["-k", suite.select] if suite.select else [])
    settings += ["-m", suite.marked] if suite.marked else []
    environment = {"TEST_API_BASE_URL": url + suite.base_path, "CONFORMANCE_URL": url, "CONFORMANCE_MODEL": model}
    environment |= {"DEBUG_EXTERNAL": "1", "PORT": url.rpartition(":")[2]}  # of llama.cpp's tests
    run([python, "-m", "pytest", *suite.tests, *settings], tests, place / "log", environment)
    return report


def run_schemathesis(suite: Suite, place: Path, url: str, _model: str) -> Path:
    """Send requests made from the server's own /openapi.json."""
    python = _python(suite, place)
    report = new(place / suite.report)
    command: list[object] = [python.parent / "schemathesis", "run", f"{url}/openapi.json", "--max-examples", "15"]
    # Health is 503 and metrics are text by design; this checks that no body makes the server fail.
    command += ["--checks", "not_a_server_error,status_code_conformance,content_type_conformance"]
    command += ["--phases", "examples,fuzzing", "--seed", "1", "--report-junit-path", report, "--request-timeout", "60"]
    command += ["--exclude-path", "/v1/telemetry"]  # it would change how the server records
    run(command, place, place / "log", {})
    return report


def run_npm(suite: Suite, place: Path, url: str, model: str) -> Path:
    """Run a suite of ours by Node's own test runner."""
    tests, report = _copied(suite, place), new(place / suite.report)
    call([program("npm"), "install", "--no-audit", "--no-fund", "--silent", "--prefix", place, *suite.requirements])
    command = [program("node"), "--test", "--test-reporter=junit", f"--test-reporter-destination={report}"]
    command += [f"--test-timeout={TEST_S * 1000}", *suite.tests]
    run(command, tests, place / "log", {"CONFORMANCE_URL": url, "CONFORMANCE_MODEL": model})
    return report


def version(suite: Suite, place: Path) -> str:
    """Return name and version of the package that a suite tests."""
    name, _, pinned = re.sub(r"\[.*?\]", "", suite.requirements[0]).replace("==", "@").rpartition("@")
    if pinned and name:
        return f"{name} {pinned}"
    script = f"from importlib.metadata import version; print(version({pinned!r}))"
    python = place / "venv" / "bin" / "python"
    done = subprocess.run([python, "-c", script], capture_output=True, text=True, check=False)
    return f"{pinned} {done.stdout.strip()}"


RUNNERS: Mapping[str, Callable[[Suite, Path, str, str], Path]] = {
    "pytest": run_pytest,
    "schemathesis": run_schemathesis,
    "npm": run_npm,
    "go": run_go,
    "cargo": run_cargo,
    "maven": run_maven,
}


def _python(suite: Suite, place: Path) -> Path:
    """Install a suite's packages. llama-cpp-python itself is not: only its sources are of use."""
    place.mkdir(parents=True, exist_ok=True)
    python = place / "venv" / "bin" / "python"
    if not python.exists():
        call([sys.executable, "-m", "venv", place / "venv"])
    wanted = [each for each in suite.requirements if not (suite.sources_dir and each is suite.requirements[0])]
    pip: list[object] = [python, "-m", "pip", "install", "--disable-pip-version-check"]
    if uv := shutil.which("uv"):  # it resolves in seconds what takes pip minutes
        pip = [uv, "pip", "install", "--python", python]
    call([*pip, "--quiet", *wanted])
    return python


def _sources(suite: Suite, place: Path, python: Path, model: str) -> Path:
    """Unpack the source archive of a package; its tests then name our model. Return the folder to run them in."""
    pin = suite.requirements[0]
    name = f"{suite.source}-{pin.partition('==')[2]}"
    if not (place / f"{name}.tar.gz").exists():
        call([python, "-m", "pip", "install", "--quiet", *suite.build_needs])
        only = ["--no-deps", "--no-binary", suite.source, "--no-build-isolation", "-d", place]
        call([python, "-m", "pip", "download", "--quiet", *only, pin])
    shutil.rmtree(place / name, ignore_errors=True)
    with tarfile.open(place / f"{name}.tar.gz") as archive:
        inside = f"{name}/{suite.sources_dir}" if suite.sources_dir else name
        archive.extractall(place, [each for each in archive if each.name.startswith(inside)], filter="data")
    for path in (place / name / "tests" / "api_resources").rglob("*.py"):
        text = path.read_text()
        for pattern, ours in _MODEL_NAMES:
            text = pattern.sub(ours.replace("{model}", model), text)
        path.write_text(text)
    tests = place / name / suite.sources_dir
    conftest = tests / "conftest.py"
    if suite.sources_dir:
        conftest.write_text(conftest.read_text().replace("ServerPreset.load_all()", "pass  # no models are fetched"))
    return tests


def _copied(suite: Suite, tests: Path) -> Path:
    tests.mkdir(parents=True, exist_ok=True)
    for name in suite.tests:
        shutil.copy(SUITES_DIR / name, tests / name)
    (tests / "pytest.ini").write_text("[pytest]\n")  # else our own settings hold here, and every warning is an error
    return tests
