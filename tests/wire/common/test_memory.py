"""Memory of this process and its machine."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from relayline.wire.common import memory

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells by files under /proc")


def test_used_memory_fits_the_total() -> None:
    held, total, free = memory.resident_bytes(), memory.total_memory_bytes(), memory.available_memory_bytes()
    assert held is not None
    assert total is not None
    assert free is not None
    assert 1_000_000 < held < total
    assert 0 < free <= total


@pytest.mark.parametrize(
    ("files", "total", "free"),
    [
        pytest.param({"memory.max": "900", "memory.current": "700"}, 900, 200, id="no-statistics"),
        pytest.param(
            {"memory.max": "900", "memory.current": "850", "memory.stat": "anon 100\ninactive_file 600\nfile 700\n"},
            900, 650, id="cached-files-are-free",
        ),
        pytest.param(
            {"memory/memory.limit_in_bytes": "900", "memory/memory.usage_in_bytes": "850",
             "memory/memory.stat": "inactive_file 1\ntotal_inactive_file 600\n"},
            900, 650, id="version-1",
        ),
        pytest.param({"memory.max": "900", "memory.current": "50", "memory.stat": "inactive_file 60\n"}, 900, 900,
                     id="numbers-of-two-moments"),
        pytest.param({"memory.max": "9", "memory.current": "90"}, 9, 0, id="over-its-limit"),
    ],
)  # fmt: skip
def test_a_container_has_what_its_limit_leaves(
    files: dict[str, str], total: int, free: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "CGROUPS", tmp_path)
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text + "\n")
    assert (memory.total_memory_bytes(), memory.available_memory_bytes()) == (total, free)


@pytest.mark.parametrize("limit", ["max", "9223372036854771712"])
def test_a_container_without_a_limit_has_what_its_machine_has(
    limit: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = memory._meminfo("MemTotal")
    monkeypatch.setattr(memory, "CGROUPS", tmp_path)
    (tmp_path / "memory.max").write_text(limit + "\n")
    (tmp_path / "memory.current").write_text("1000\n")
    assert memory.total_memory_bytes() == machine
