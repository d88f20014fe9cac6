"""Runs others' suites against the demo model, each in its own environment, and writes the results.

`python -m tests.conformance.run [--only NAME] [--url URL]`. A suite that cannot be installed is skipped with the
reason. Nothing that is fetched is kept in the repository. The exit code is 1 if a failure has no explanation.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import datetime
import itertools
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

from relayline.deploy.launch.demo_run import MODEL
from relayline.deploy.launch.local import running
from relayline.deploy.manifest.smallest import smallest_manifest
from tests.conformance.commands import NotEndedError, NotInstalledError
from tests.conformance.kinds import RUNNERS, version
from tests.conformance.results import MESSAGE_CHARS, Result, read_report, written
from tests.conformance.table import SUITES, Suite

ROOT = Path(__file__).parents[2]
WORK = ROOT / "build" / "conformance"
OUT = ROOT / "docs" / "reference" / "conformance.md"
RAN = "ran"  # a file: when a suite ran last, and against which commit
CTX_TOKENS = 1_024  # the demo model never ends by itself


def run_suite(suite: Suite, url: str, model: str, commit: str) -> Result:
    """Install a suite and run it."""
    result, place = Result(suite), WORK / suite.name
    ran = f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}, {commit}"
    try:
        report = RUNNERS[suite.kind](suite, place, url, model)
    except NotInstalledError as error:
        result.skipped = str(error).strip().splitlines()[-1][:MESSAGE_CHARS]
        return result
    except NotEndedError as error:
        result.version, result.ran = version(suite, place), ran
        result.failures.append(("the suite", str(error)))
        return result
    (place / RAN).write_text(ran)
    result.version, result.ran = version(suite, place), ran
    read_report(result, report)
    return result


def _commit() -> str:
    """Return the commit that runs; with a plus if files have changed since."""
    git = ["git", "-C", str(ROOT)]
    head = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    changed = subprocess.run([*git, "diff", "--quiet", "HEAD"], check=False).returncode
    return f"{head.stdout.strip()}{'+' if changed else ''}" if head.stdout else "no commit"


def _last(suite: Suite) -> Result:
    """Return the results of a suite's last run on this machine."""
    result, place = Result(suite), WORK / suite.name
    report = place / suite.report
    if not report.exists() or not (place / RAN).exists():
        result.skipped = "it has not come to its end here"
        return result
    result.version, result.ran = version(suite, place), (place / RAN).read_text()
    read_report(result, report)
    return result


@contextlib.asynccontextmanager
async def served(url: str | None, settings: Mapping[str, Any]) -> AsyncIterator[tuple[str, str]]:
    """Serve the demo model on a free loopback port, unless a server is named; yield its address and its model."""
    if url is not None:
        yield url.rstrip("/"), MODEL.stem
        return
    with tempfile.TemporaryDirectory() as batches:
        manifest = smallest_manifest(
            MODEL, "conformance", **{"ctx_tokens": CTX_TOKENS, "batch_dir": batches, **settings}
        )
        async with running(manifest) as (_, ready):
            yield ready["url"], ready["model"]


def _settings(suite: Suite) -> tuple[tuple[str, Any], ...]:
    return tuple(suite.settings.items())


async def main() -> int:
    """Run the chosen suites, and write the page unless only one suite was chosen."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=[suite.name for suite in SUITES], help="one suite; the page is printed")
    parser.add_argument("--url", help="a server that runs the demo model; else one is started")
    parser.add_argument("--rewrite", action="store_true", help="run nothing; write the page from the last reports")
    args = parser.parse_args()
    if args.rewrite:
        OUT.write_text(written([_last(suite) for suite in SUITES]))
        return 0
    suites = [suite for suite in SUITES if args.only in (None, suite.name)]
    found = {}
    for settings, alike in itertools.groupby(sorted(suites, key=_settings), _settings):
        commit = "not known" if args.url else _commit()  # of the server
        async with served(args.url, dict(settings)) as (url, model):
            for suite in alike:
                print(f"{suite.name}: {suite.what}", flush=True)
                result = found[suite.name] = await asyncio.to_thread(run_suite, suite, url, model, commit)
                print(f"  {result.n_passed} passed, {len(result.failures)} failed {result.skipped}", flush=True)
    results = [found[suite.name] for suite in suites]
    page = written(results)
    if args.only:
        print(page)
    else:
        OUT.write_text(page)
    return 1 if any(result.split()[1] for result in results) else 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
