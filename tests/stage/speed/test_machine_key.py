"""The name of a host's processor, from what Linux says on each architecture."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest

from relayline.stage.speed import machine_key

X86 = """\
processor	: 0
vendor_id	: AuthenticAMD
model		: 17
model name	: AMD EPYC 9R14
flags		: fpu avx2
"""
CORE = """\
processor	: {n}
BogoMIPS	: 108.00
Features	: fp asimd
CPU implementer	: {implementer}
CPU part	: {part}

"""
BOARD = "Revision	: d04170\nSerial		: 0\nModel		: Raspberry Pi 5 Model B Rev 1.0\n"


def cores(*kinds: tuple[str, str]) -> str:
    """Return /proc/cpuinfo of Linux on arm64."""
    return "".join(CORE.format(n=n, implementer=kind[0], part=kind[1]) for n, kind in enumerate(kinds))


@pytest.mark.parametrize(
    ("cpuinfo", "name"),
    [
        pytest.param(X86, "AMD EPYC 9R14", id="x86"),
        pytest.param(cores(*[("0x41", "0xd0b")] * 4) + BOARD, "Raspberry Pi 5 Model B Rev 1.0, Cortex-A76", id="pi"),
        pytest.param(cores(*[("0x41", "0xd4f")] * 2), "Neoverse-V2", id="server"),
        pytest.param(
            cores(("0x41", "0xd05"), ("0x41", "0xd05"), ("0x41", "0xd0b")), "Cortex-A55, Cortex-A76", id="two"
        ),
        pytest.param(cores(("0x99", "0xFFF")), "Arm core 0x99/0xfff", id="unknown"),
        pytest.param("", "some other", id="no-file"),
    ],
)
def test_a_processor_has_a_name_on_every_architecture(
    cpuinfo: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine_key, "_CPUINFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(platform, "processor", lambda: "some other")
    if cpuinfo:
        (tmp_path / "cpuinfo").write_text(cpuinfo)
    assert machine_key.processor_name() == name
