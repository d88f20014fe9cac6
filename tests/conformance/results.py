"""Reads the results of a suite from its runner's report, and writes them as one page."""

from __future__ import annotations

import collections
import dataclasses
import json
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from pathlib import Path

from tests.conformance.explained import EXPLAINED
from tests.conformance.table import Suite

MESSAGE_CHARS = 300


@dataclasses.dataclass(slots=True)
class Result:
    """The results of a suite."""

    suite: Suite
    version: str = ""
    ran: str = ""  # date and commit
    n_passed: int = 0
    n_skipped: int = 0
    failures: list[tuple[str, str]] = dataclasses.field(default_factory=list)  # (test, message)
    skipped: str = ""  # why it did not run

    def split(self) -> tuple[dict[str, list[str]], list[tuple[str, str]]]:
        """Return the tests whose failures are explained, by reason, and the other failures."""
        known: dict[str, list[str]] = {}
        unknown = []
        for test, message in self.failures:
            reason = next((each.reason for each in EXPLAINED if each.fits(self.suite.name, test, message)), "")
            if reason:
                known.setdefault(reason, []).append(test)
            else:
                unknown.append((test, message))
        return known, unknown


def read_report(result: Result, report: Path) -> None:
    """Read the report of a suite that has ended. One without a report has failed."""
    if not report.exists():
        result.failures.append(("the suite", "it ended without a report; see its log"))
    elif report.suffix == ".xml":
        _read_junit(result, report)
    elif report.suffix == ".txt":
        _read_cargo(result, report.read_text())
    else:
        _read_go(result, report)


def _read_junit(result: Result, report: Path) -> None:
    for case in ElementTree.parse(report).iter("testcase"):
        fault = next((found for kind in ("failure", "error") if (found := case.find(kind)) is not None), None)
        name = f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}".removeprefix("::")
        if fault is not None:
            message = fault.get("message") or ""
            is_whole = " " in message  # and no code, as schemathesis writes
            result.failures.append((name, _short(message if is_whole else f"{message} {fault.text or ''}")))
        elif case.find("skipped") is not None:
            result.n_skipped += 1
        else:
            result.n_passed += 1


def _read_go(result: Result, report: Path) -> None:
    """Read the lines of `go test -json`: one event each, with the output of a test before its end."""
    printed: dict[str, str] = {}
    for line in report.read_text().splitlines():
        event = json.loads(line)
        test, action = event.get("Test", ""), event["Action"]
        if action == "output":
            printed[test] = printed.get(test, "") + event["Output"]
        elif action == "fail" and (test or not result.failures):
            result.failures.append((test or "the suite", _short(printed.get(test, ""))))
        elif test:
            result.n_passed += action == "pass"
            result.n_skipped += action == "skip"


def _read_cargo(result: Result, printed: str) -> None:
    """Read what `cargo test` prints: a line for each test, then what each failed one printed."""
    outputs = dict(
        re.findall(r"^---- (\S+) stdout ----\n(.*?)(?=^---- |^failures:|\Z)", printed, re.MULTILINE | re.DOTALL)
    )
    for test, outcome in re.findall(r"(?m)^test (\S+) \.\.\. (ok|FAILED|ignored)", printed):
        result.n_passed += outcome == "ok"
        result.n_skipped += outcome == "ignored"
        if outcome == "FAILED":
            result.failures.append((test, _short(outputs.get(test, "").partition("stack backtrace:")[0])))
    if "\ntest result: " not in printed:
        result.failures.append(("the suite", _short(f"it did not come to its end: {printed[-MESSAGE_CHARS:]}")))


def _short(message: str) -> str:
    return " ".join(message.split())[:MESSAGE_CHARS]


def _named(tests: Sequence[str]) -> str:
    """Return the names of tests, each once; how often, if it ran with several parameters."""
    counts = collections.Counter(test.partition("[")[0] for test in tests)
    return "(" + ", ".join(f"`{name}`" + f" {n}x" * (n > 1) for name, n in counts.items()) + ")"


def written(results: Sequence[Result]) -> str:
    """Return the page."""
    lines = [
        "# Conformance",
        "",
        "`make conformance` runs third-party test suites against the demo model on two stages, each in its own",
        "environment. Some are client libraries without such tests; short files in `tests/conformance/suites` call",
        "them, and the library's own checks of the answers decide.",
        "",
        "| suite | version | run on, commit | passed | skipped by itself | explained | not explained |",
        "|---|---|---|--:|--:|--:|--:|",
    ]
    for result in results:
        known, unknown = result.split()
        counts = [result.n_passed, result.n_skipped, sum(map(len, known.values())), len(unknown)]
        row = [result.suite.name, result.version, result.ran, *counts]
        if result.skipped:
            row = [result.suite.name, f"not run: {result.skipped}", "", "", "", "", ""]
        lines.append(f"| {' | '.join(map(str, row))} |")
    lines += ["", "The suites:", ""]
    lines += [f"* **{result.suite.name}**: {result.suite.what}." for result in results]
    lines += ["", "## Explained failures", ""]
    for result in results:
        known = result.split()[0]
        lines += [f"* {result.suite.name}, {len(tests)}: {reason} {_named(tests)}" for reason, tests in known.items()]
    unexplained = [(result.suite.name, *each) for result in results for each in result.split()[1]]
    if unexplained:
        lines += ["", "## Not explained", ""]
        lines += [f"* {name}, `{test}`: `{message.replace('`', ' ')}`" for name, test, message in unexplained]
    return "\n".join(lines) + "\n"
