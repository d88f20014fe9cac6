"""Run others' suites against the demo model, each in an environment of its own, and write what they found.

`python -m tests.conformance.run [--only NAME] [--url URL]`. What cannot be installed is skipped with the reason.
Nothing that is fetched is kept in the repository. The exit code is 1 where a failure has no explanation.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import os
import re
import shutil
import subprocess
import sys
import tarfile
import xml.etree.ElementTree as ElementTree
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from relayline.deploy.launch.demo_run import MODEL
from relayline.deploy.launch.local import running
from relayline.deploy.manifest.smallest import smallest_manifest
from tests.conformance.explained import EXPLAINED

ROOT = Path(__file__).parents[2]
WORK = ROOT / "build" / "conformance"
OUT = ROOT / "docs" / "reference" / "conformance.md"
SUITES_DIR = Path(__file__).parent / "suites"
INSTALL_S, RUN_S, TEST_S = 600, 900, 60
CTX_TOKENS = 1_024  # the demo model never ends by itself
MESSAGE_CHARS = 300
_PYTEST = ("pytest", "pytest-asyncio", "pytest-timeout")
_STAINLESS = (*_PYTEST, "pytest-xdist", "respx", "dirty-equals", "time-machine", "rich")
_MODEL_NAMES = (
    (re.compile(r'model="[^"]*"'), 'model="{model}"'),
    (re.compile(r'^(\s+)"(gpt|claude|text|ft:gpt)-?[^"]*",$', re.MULTILINE), r'\1"{model}",'),
    (re.compile(r'model_id="model_id"'), 'model_id="{model}"'),
)


@dataclasses.dataclass(frozen=True, slots=True)
class Suite:
    """One suite."""

    name: str
    what: str
    requirements: tuple[str, ...]  # the first is what is tested
    tests: tuple[str, ...]  # files
    source: str = ""  # the package whose source archive holds the tests; else they are in suites/
    select: str = ""  # pytest's -k
    base_path: str = ""  # of the API, after the host


SUITES = (
    Suite(
        "openai-python",
        "the official Python client's own API tests, with our model's name",
        ("openai==3.57.0", *_STAINLESS),
        (
            "tests/api_resources/test_models.py",
            "tests/api_resources/test_completions.py",
            "tests/api_resources/chat/test_completions.py",
            "tests/api_resources/test_responses.py",
            "tests/api_resources/responses",
        ),
        source="openai",
        select="loose and not Async",
        base_path="/v1",
    ),
    Suite(
        "anthropic-sdk",
        "the official Python client's own API tests, with our model's name",
        ("anthropic==2.14.0", *_STAINLESS, "inline-snapshot", "http-snapshot[httpx]==0.1.9"),
        ("tests/api_resources/test_models.py", "tests/api_resources/test_messages.py"),
        source="anthropic",
        select="loose and not Async",
    ),
    Suite(
        "langchain",
        "langchain-tests' standard tests of ChatOpenAI (chats, responses) and ChatAnthropic (messages)",
        ("langchain-tests==1.1.9", "langchain-openai==1.7.4", "langchain-anthropic==1.7.10", *_PYTEST),
        ("langchain_standard.py",),
    ),
    Suite(
        "openai-agents",
        "runs, streams, tools and typed outputs over responses and chats",
        ("openai-agents==0.24.0", *_PYTEST),
        ("openai_agents.py",),
    ),
    Suite(
        "pydantic-ai",
        "text, streams and typed outputs over chats, responses and messages",
        ("pydantic-ai-slim[openai,anthropic]", *_PYTEST),
        ("pydantic_ai_agents.py",),
    ),
    Suite(
        "instructor",
        "typed answers by tools and by a schema",
        ("instructor", "anthropic", *_PYTEST),
        ("instructor_models.py",),
    ),
    Suite("schemathesis", "requests made from our own /openapi.json", ("schemathesis==4.32.5",), ()),
)


@dataclasses.dataclass(slots=True)
class Result:
    """What a suite found."""

    suite: Suite
    version: str = ""
    n_passed: int = 0
    n_skipped: int = 0
    failures: list[tuple[str, str]] = dataclasses.field(default_factory=list)  # (test, message)
    skipped: str = ""  # why it did not run

    def split(self) -> tuple[dict[str, int], list[tuple[str, str]]]:
        """Return the failures that are explained, counted by reason, and the others."""
        known: dict[str, int] = {}
        unknown = []
        for test, message in self.failures:
            reason = next(
                (why for name, pattern, why in EXPLAINED if re.fullmatch(name, self.suite.name)
                 and re.search(pattern, f"{test}: {message}")), "",
            )  # fmt: skip
            if reason:
                known[reason] = known.get(reason, 0) + 1
            else:
                unknown.append((test, message))
        return known, unknown


class NotInstalledError(Exception):
    """A suite that cannot be had here."""


def run_suite(suite: Suite, url: str, model: str) -> Result:
    """Install a suite and run it."""
    result, place = Result(suite), WORK / suite.name
    try:
        python = _installed(suite, place)
        result.version = _version(python, suite.requirements[0])
        tests = _sources(suite, place, python, model) if suite.source else place / "tests"
    except (NotInstalledError, subprocess.TimeoutExpired) as error:
        result.skipped = str(error).strip().splitlines()[-1][:MESSAGE_CHARS]
        return result
    if suite.source:
        command = ["-m", "pytest", *suite.tests]
    elif suite.tests:
        shutil.copytree(SUITES_DIR, tests, dirs_exist_ok=True)
        command = ["-m", "pytest", *suite.tests]
    else:
        return _schemathesis(result, place, python, url)
    report = place / "report.xml"
    report.unlink(missing_ok=True)
    settings = [
        "-p",
        "no:cacheprovider",
        "-p",
        "no:unraisableexception",
        "-q",
        f"--timeout={TEST_S}",
        f"--junitxml={report}",
        "-o",
        "addopts=",
    ]
    settings += ["-o", "asyncio_mode=auto", f"--rootdir={tests}"] + (["-k", suite.select] if suite.select else [])
    environment = {
        **os.environ,
        "TEST_API_BASE_URL": url + suite.base_path,
        "CONFORMANCE_URL": url,
        "CONFORMANCE_MODEL": model,
    }
    environment.pop("PYTHONPATH", None)
    with (place / "log").open("w") as log, contextlib.suppress(subprocess.TimeoutExpired):
        subprocess.run(
            [python, *command, *settings],
            cwd=tests,
            env=environment,
            stdout=log,
            stderr=log,
            timeout=RUN_S,
            check=False,
        )
    _read_report(result, report)
    return result


def _installed(suite: Suite, place: Path) -> Path:
    place.mkdir(parents=True, exist_ok=True)
    python = place / "venv" / "bin" / "python"
    if not python.exists():
        _call([sys.executable, "-m", "venv", place / "venv"])
    _call([python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *suite.requirements])
    return python


def _sources(suite: Suite, place: Path, python: Path, model: str) -> Path:
    """Unpack the source archive of a package; its tests then name our model. Return its folder."""
    pin = suite.requirements[0]
    name = f"{suite.source}-{pin.partition('==')[2]}"
    if not (place / f"{name}.tar.gz").exists():
        _call([python, "-m", "pip", "install", "--quiet", "hatchling", "hatch-fancy-pypi-readme"])
        only = ["--no-deps", "--no-binary", suite.source, "--no-build-isolation", "-d", place]
        _call([python, "-m", "pip", "download", "--quiet", *only, pin])
    shutil.rmtree(place / name, ignore_errors=True)
    with tarfile.open(place / f"{name}.tar.gz") as archive:
        archive.extractall(place, filter="data")
    for path in (place / name / "tests" / "api_resources").rglob("*.py"):
        text = path.read_text()
        for pattern, ours in _MODEL_NAMES:
            text = pattern.sub(ours.replace("{model}", model), text)
        path.write_text(text)
    return place / name


def _call(command: Sequence[object]) -> None:
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=INSTALL_S, check=False)
    if done.returncode:
        raise NotInstalledError(done.stderr.strip() or "pip failed")


def _version(python: Path, requirement: str) -> str:
    name = re.split(r"[=\[<>]", requirement)[0]
    script = f"from importlib.metadata import version; print(version({name!r}))"
    done = subprocess.run([python, "-c", script], capture_output=True, text=True, check=False)
    return f"{name} {done.stdout.strip()}"


def _schemathesis(result: Result, place: Path, python: Path, url: str) -> Result:
    report = place / "report.xml"
    report.unlink(missing_ok=True)
    command: list[object] = [python.parent / "schemathesis", "run", f"{url}/openapi.json", "--max-examples", "15"]
    # Health is 503 and metrics are text by design; what is checked is that no body makes the server fail.
    command += ["--checks", "not_a_server_error,status_code_conformance,content_type_conformance"]
    command += ["--phases", "examples,fuzzing", "--seed", "1", "--report-junit-path", report, "--request-timeout", "60"]
    command += ["--exclude-path", "/v1/telemetry"]  # it would change how the server records
    with (place / "log").open("w") as log, contextlib.suppress(subprocess.TimeoutExpired):
        subprocess.run(list(map(str, command)), stdout=log, stderr=log, timeout=RUN_S, check=False)
    _read_report(result, report)
    return result


def _last(suite: Suite) -> Result:
    """Return what a suite found when it last ran here."""
    result, place = Result(suite), WORK / suite.name
    if not (place / "report.xml").exists():
        result.skipped = "it has not come to its end here"
        return result
    result.version = _version(place / "venv" / "bin" / "python", suite.requirements[0])
    _read_report(result, place / "report.xml")
    return result


def _read_report(result: Result, report: Path) -> None:
    if not report.exists():
        result.failures.append(("the suite", "it ended without a report; see its log"))
        return
    for case in ElementTree.parse(report).iter("testcase"):
        fault = next((found for kind in ("failure", "error") if (found := case.find(kind)) is not None), None)
        name = f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}".removeprefix("::")
        if fault is not None:
            message = " ".join((fault.get("message") or fault.text or "").split())
            result.failures.append((name, message[:MESSAGE_CHARS]))
        elif case.find("skipped") is not None:
            result.n_skipped += 1
        else:
            result.n_passed += 1


def written(results: Sequence[Result]) -> str:
    """Return the page."""
    lines = [
        "# Conformance",
        "",
        "`make conformance` runs suites that nobody here wrote against the demo model of two stages. Each has an",
        "environment of its own. The suites without an API of their own to test are driven by short files in",
        "`tests/conformance/suites`; the libraries' own checks of what they read decide.",
        "",
        "| suite | version | passed | skipped by itself | explained | not explained |",
        "|---|---|--:|--:|--:|--:|",
    ]
    for result in results:
        known, unknown = result.split()
        row = [result.suite.name, result.version, result.n_passed, result.n_skipped, sum(known.values()), len(unknown)]
        if result.skipped:
            row = [result.suite.name, f"not run: {result.skipped}", "", "", "", ""]
        lines.append(f"| {' | '.join(map(str, row))} |")
    lines += ["", "What each is:", ""]
    lines += [f"* **{result.suite.name}**: {result.suite.what}." for result in results]
    lines += ["", "## Explained failures", ""]
    for result in results:
        lines += [f"* {result.suite.name}, {count}: {reason}" for reason, count in result.split()[0].items()]
    unknown = [(result.suite.name, *each) for result in results for each in result.split()[1]]
    if unknown:
        lines += ["", "## Not explained", ""]
        lines += [f"* {name}, `{test}`: `{message.replace('`', ' ')}`" for name, test, message in unknown]
    return "\n".join(lines) + "\n"


@contextlib.asynccontextmanager
async def served(url: str | None) -> AsyncIterator[tuple[str, str]]:
    """Serve the demo model on a free loopback port, unless a server is named; yield its address and its model."""
    if url is not None:
        yield url.rstrip("/"), MODEL.stem
        return
    async with running(smallest_manifest(MODEL, "conformance", ctx_tokens=CTX_TOKENS)) as (_, ready):
        yield ready["url"], ready["model"]


async def main() -> int:
    """Run what is asked for, and write the page unless only one suite was."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=[suite.name for suite in SUITES], help="one suite; the page is printed")
    parser.add_argument("--url", help="a server that runs the demo model; else one is started")
    parser.add_argument("--rewrite", action="store_true", help="run nothing; write the page from the last reports")
    args = parser.parse_args()
    if args.rewrite:
        OUT.write_text(written([_last(suite) for suite in SUITES]))
        return 0
    suites = [suite for suite in SUITES if args.only in (None, suite.name)]
    results = []
    async with served(args.url) as (url, model):
        for suite in suites:
            print(f"{suite.name}: {suite.what}", flush=True)
            results.append(await asyncio.to_thread(run_suite, suite, url, model))
            print(
                f"  {results[-1].n_passed} passed, {len(results[-1].failures)} failed {results[-1].skipped}", flush=True
            )
    page = written(results)
    if args.only:
        print(page)
    else:
        OUT.write_text(page)
    return 1 if any(result.split()[1] for result in results) else 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
