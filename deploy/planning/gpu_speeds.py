"""The speeds of GPUs by their names: for plans of machines without measurements. Pure.

Memory bandwidth and dense half-precision arithmetic are those of the makers' data sheets. Of these, llama.cpp's kernels
reach the shares below: fitted to one H200 (8B Q4_0, 3.1 ms for one row and 13.3 ms for 64, docs/results/gpu.md). The
estimate is meant to be right within a factor of two.
"""

from __future__ import annotations

from typing import NamedTuple

BYTES_SHARE, FLOPS_SHARE = 0.6, 0.08
STEP_NS = 1.5e6  # launches and the host's work of one step of a whole model


class GpuSpeed(NamedTuple):
    """The attainable speed of a GPU."""

    bytes_per_s: float
    flops: float
    step_ns: float


UNKNOWN = GpuSpeed(300e9, 20e12, 0.0)
# A part of the device's description; the first that fits counts. GB/s and TFLOP/s.
_SHEETS: tuple[tuple[str, int, int], ...] = (
    ("B200", 8_000, 2_250), ("H200", 4_800, 989), ("H100 PCIe", 2_000, 756), ("H100", 3_350, 989),
    ("A100", 1_555, 312), ("L40S", 864, 362), ("L40", 864, 181), ("L4", 300, 121), ("A40", 696, 150),
    ("A10", 600, 125), ("T4", 320, 65), ("V100", 900, 125), ("A6000", 768, 155),
    ("RTX 5090", 1_792, 210), ("RTX 5080", 960, 113), ("RTX 5070", 672, 62),
    ("RTX 4090", 1_008, 165), ("RTX 4080", 717, 98), ("RTX 4070", 504, 58), ("RTX 4060", 272, 30),
    ("RTX 3090", 936, 71), ("RTX 3080", 760, 60), ("RTX 3070", 448, 41), ("RTX 3060", 360, 26),
    ("MI300X", 5_300, 1_307), ("MI250", 3_277, 383), ("MI210", 1_638, 181), ("7900 XTX", 960, 123),
    ("M4 Max", 546, 34), ("M4 Pro", 273, 17), ("M4", 120, 9), ("M3 Ultra", 819, 56), ("M3 Max", 400, 28),
    ("M3 Pro", 150, 14), ("M3", 100, 8), ("M2 Ultra", 800, 54), ("M2 Max", 400, 27), ("M2 Pro", 200, 14),
    ("M2", 100, 7), ("M1 Ultra", 800, 42), ("M1 Max", 400, 21), ("M1 Pro", 200, 10), ("M1", 68, 5),
)  # fmt: skip


def speed_of(description: str) -> GpuSpeed | None:
    """Return the attainable speed of a GPU, None for one that the table lacks.

    description: as llama.cpp lists it, such as `NVIDIA GeForce RTX 4090`.
    """
    words = f" {description} "
    for name, gbytes_per_s, tflops in _SHEETS:
        at = words.find(name)
        if at > 0 and not words[at - 1].isalnum() and not words[at + len(name)].isalnum():
            return GpuSpeed(BYTES_SHARE * gbytes_per_s * 1e9, FLOPS_SHARE * tflops * 1e12, STEP_NS)
    return None
