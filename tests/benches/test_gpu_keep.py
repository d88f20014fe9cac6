"""The results of a short GPU run become the table of docs/results/gpu.md."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from benches import tables
from benches.gpu import __main__ as bench
from benches.gpu import keep

NOON_S = 1_795_780_800  # 2026-11-27, 12:00 UTC


def points(*tok_s: tuple[int, float], error: str = "") -> dict[str, Any]:
    found = [{"streams": n, "repeat": 0, "decode_tok_s": value, "error": error} for n, value in tok_s]
    return {"found": found, "took_s": 1.0}


def a_run() -> dict[str, Any]:
    steps = [{"rows": 1, "engine_ms": 4.0, "tok_s": 250.0, "bare_ms": 2.0}]
    steps.append({"rows": 8, "engine_ms": 8.0, "tok_s": 1000.0, "bare_ms": 4.0})
    one_stage = points((1, 100.0), (8, 1500.0), (1, 300.0), (1, 200.0), (8, 1700.0))
    one_stage["found"].append({"streams": 8, "repeat": 2, "decode_tok_s": 9.0, "error": "cut off"})
    return {
        "devices": ["CUDA0: NVIDIA H100 80GB HBM3"],
        "machine": {"cpu": "Intel Xeon", "cores": 16, "commit": "unknown"},
        "shape": "llama-8b",
        "type": "q4_0",
        "parts": {
            "engine": {"found": steps, "took_s": 20.0},
            "one-stage": one_stage,
            "unsplit": {"failed": "TimeoutError", "took_s": 9.0},
            "two-stages": points((1, 180.0)),
            "two-halves": {"found": [{"rows": 1, "engine_ms": 5.0, "tok_s": 200.0}], "took_s": 20.0},
            "certify": {"found": {"exit_code": 0, "cuts": []}, "took_s": 50.0},
            "rpc": {"left_out": "3 s were left, and it needs about 45"},
        },
    }


def test_medians_are_next_to_the_engine_and_missing_runs_have_no_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "machines.json").write_text('{"other": "another"}\n')
    short = tmp_path / "gpu-short.json"
    short.write_text(json.dumps(a_run()))
    os.utime(short, (NOON_S, NOON_S))
    monkeypatch.setattr(keep.keep, "__defaults__", (tmp_path,))
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    monkeypatch.setattr(bench, "parse", lambda: bench.argparse.Namespace(pack=None, keep=short))
    assert bench.main() == 0
    assert capsys.readouterr().out == f"{tmp_path}/gpu.json\n"
    measured = tables.load("gpu")
    assert [row.get("id") or row["divide"] for row in measured["rows"]] == [
        "bare", "engine", "halves", "one-stage", "two-stages",
        ["engine", "bare"], ["one-stage", "bare"], ["halves", "engine"], ["two-stages", "one-stage"],
    ]  # fmt: skip
    assert measured["date"] == "2026-11-27"
    page = tables.filled("<!-- table: gpu -->\n<!-- end -->\n")
    assert "| one stage over HTTP | 200 | 1,600 |" in page
    assert "| one stage / `llama-batched-bench` | 0.4 | 0.8 | 0.95" in page
    assert "| two stages / one | 0.9 |  | 0.9 |" in page
    assert "Machine: NVIDIA H100 80GB HBM3; 16 cores of an Intel Xeon." in page
    assert "another" in (tmp_path / "machines.json").read_text()


def test_a_run_without_figures_or_no_file_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty.json").write_text(json.dumps(a_run() | {"parts": {}}))
    for name, message in (("empty.json", "no part of the run"), ("none.json", "No such file")):
        path = tmp_path / name
        monkeypatch.setattr(bench, "parse", lambda path=path: bench.argparse.Namespace(pack=None, keep=path))
        assert bench.main() == 1
        assert message in capsys.readouterr().err
