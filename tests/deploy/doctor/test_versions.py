"""Dependencies in other versions than the tried ones are named, and prevent nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from relayline.deploy.doctor import versions
from relayline.deploy.doctor.report import Outcome

TRIED = {"numpy": "2.4.6", "grpcio": "1.85.1", "pytest": "9.2.0"}


def test_the_tried_versions_are_fine() -> None:
    finding = versions.judge_versions(TRIED, {"numpy": "2.4.6", "grpcio": "1.85.1", "uvloop": "0.1"})
    assert finding.outcome is Outcome.OK


def test_other_versions_are_named_with_the_tried_ones() -> None:
    finding = versions.judge_versions(TRIED, {"numpy": "2.5.0", "grpcio": "1.85.1"})
    assert finding.outcome is Outcome.WARNING
    assert finding.found == "numpy 2.5.0 (tested: 2.4.6)"
    assert "make setup" in finding.remedy


def test_many_others_stay_one_line() -> None:
    tried = {f"package-{number:02}": "1" for number in range(20)}
    finding = versions.judge_versions(tried, dict.fromkeys(tried, "2"))
    assert finding.found.count("tested") == versions.NAMED_MAX
    assert finding.found.endswith("and 12 more")


def test_requirements_are_read_without_extras() -> None:
    lines = ["numpy>=2.0", 'uvloop>=0.21; sys_platform != "win32"', "Llama_cpp_python==0.3.36", 'mypy; extra == "dev"']
    assert versions.requirements(lines) == ["numpy", "uvloop", "llama-cpp-python"]


def test_the_file_names_everything_that_relayline_needs() -> None:
    (finding,) = versions.look_versions()
    assert finding.check == "versions"
    tried = versions.read_constraints(versions.TRIED.read_text())
    assert {"numpy", "grpcio", "llama-cpp-python", "pytest"} <= set(tried)


def test_a_missing_file_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "TRIED", tmp_path / "none.txt")
    (finding,) = versions.look_versions()
    assert finding.outcome is Outcome.WARNING
