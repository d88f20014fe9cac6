"""The page of `make conformance`: a failure is explained by a fitting pattern of its own suite only."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.conformance import commands
from tests.conformance.commands import SUITES_DIR
from tests.conformance.explained import EXPLAINED, Explanation
from tests.conformance.results import Result, read_report, written
from tests.conformance.table import SUITES

REPORT = """<testsuites><testsuite>
<testcase classname="a.TestModels" name="test_method_delete[loose]">
<failure message="openai.APIStatusError: Error code: 405 - DELETE is not allowed on /v1/models/relayline-demo"/>
</testcase>
<testcase classname="a.TestModels" name="test_method_delete[strict]">
<failure message="openai.InternalServerError: Error code: 500 - internal error"/></testcase>
<testcase classname="a.TestModels" name="test_list"/>
<testcase classname="a.TestModels" name="test_odd"><skipped/></testcase>
<testcase name="POST /x"><failure message="ST101">1. Server
error</failure></testcase>
<testcase classname="a.TestModels" name="test_bad"><error message="AssertionError: nobody&#10;knows"/></testcase>
</testsuite></testsuites>"""


def test_a_report_is_parsed(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    report.write_text(REPORT)
    result, other = Result(SUITES[0], "openai 1", "2026-11-27, abc"), Result(SUITES[1], "anthropic 1")
    read_report(result, report)
    read_report(other, report)
    assert (result.n_passed, result.n_skipped, len(result.failures)) == (1, 1, 4)
    known, unknown = result.split()
    assert [*known.values()] == [["TestModels::test_method_delete[loose]"]]
    assert unknown == [
        ("TestModels::test_method_delete[strict]", "openai.InternalServerError: Error code: 500 - internal error"),
        ("POST /x", "ST101 1. Server error"),
        ("TestModels::test_bad", "AssertionError: nobody knows"),
    ]
    assert len(other.split()[1]) == 4  # the explanation is of another suite
    page = written([result, Result(SUITES[2], skipped="no such package")])
    assert "| openai-python | openai 1 | 2026-11-27, abc | 1 | 1 | 1 | 3 |" in page
    assert "not run: no such package" in page
    assert "## Not explained" in page
    assert "client. (`TestModels::test_method_delete`)" in page


@pytest.mark.parametrize("explanation", EXPLAINED, ids=lambda each: f"{each.suite}-{each.tests}")
def test_an_explanation_holds_for_no_other_failure(explanation: Explanation) -> None:
    assert explanation.suite in {suite.name for suite in SUITES}
    for message in (
        "",
        "it failed",
        "Error code: 500 - internal error",
        "assert 500 == 200 + where 500 = <utils.Server",
    ):
        assert not re.match(explanation.message, message)
    for test in ("", "test_other", "TestOther::test_other"):
        assert not re.fullmatch(explanation.tests, test)


def test_a_suite_that_leaves_no_report_has_failed(tmp_path: Path) -> None:
    result = Result(SUITES[0])
    read_report(result, tmp_path / "none.xml")
    assert result.split()[1]


def test_output_of_go_is_parsed(tmp_path: Path) -> None:
    events = [
        {"Action": "start"},
        {"Action": "output", "Test": "TestChat", "Output": "main_test.go:9: 400\n  no such model\n"},
        {"Action": "fail", "Test": "TestChat"},
        {"Action": "pass", "Test": "TestModels"},
        {"Action": "skip", "Test": "TestOdd"},
        {"Action": "fail"},  # of the package: it says nothing more
    ]
    report = tmp_path / "report.jsonl"
    report.write_text("".join(json.dumps(event) + "\n" for event in events))
    result = Result(SUITES[0])
    read_report(result, report)
    assert (result.n_passed, result.n_skipped) == (1, 1)
    assert result.failures == [("TestChat", "main_test.go:9: 400 no such model")]


CARGO = """running 3 tests
test models ... ok
test odd ... ignored
test errors ... FAILED

failures:

---- errors stdout ----

thread 'errors' (7) panicked at tests/conformance.rs:9:1:
no such code
stack backtrace:
   0: __rustc::rust_begin_unwind

failures:
    errors

test result: FAILED. 1 passed; 1 failed; 1 ignored
"""


def test_cargo_output_is_parsed(tmp_path: Path) -> None:
    report = tmp_path / "report.txt"
    report.write_text(CARGO)
    result = Result(SUITES[0])
    read_report(result, report)
    assert (result.n_passed, result.n_skipped) == (1, 1)
    assert result.failures == [("errors", "thread 'errors' (7) panicked at tests/conformance.rs:9:1: no such code")]
    report.write_text("error[E0432]: unresolved import\n")  # it was not compiled
    read_report(broken := Result(SUITES[0]), report)
    assert broken.failures


def test_a_suite_that_runs_out_of_time_has_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "RUN_S", 0.05)
    with pytest.raises(commands.NotEndedError, match=r"within 0\.05 s"):
        commands.run(["sleep", "60"], tmp_path, tmp_path / "log", {})


def test_suites_of_ours_are_files_that_no_other_run_collects() -> None:
    for suite in SUITES:
        for test in () if suite.source else suite.tests:
            assert (SUITES_DIR / test).is_file()
            assert not test.startswith("test_")
