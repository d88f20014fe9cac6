"""Defaults of the GPU bench. Imports nothing that loads llama.cpp's libraries."""

from __future__ import annotations

ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)  # of a step
STREAMS = (1, 2, 4, 8, 16, 32, 64)
QUICK_ROWS, QUICK_STREAMS = (1, 4), (1, 2)  # of a check of the bench itself
SHORT_STREAMS = (1, 8, 32, 64)
MANY_STREAMS, QUICK_MANY_STREAMS = (64, 255), (2, 3)  # of both layouts of KV cells; a pipeline has 255 lanes at most
PARTS = (
    "engine",
    "one-stage",
    "many-unified",
    "many-per-lane",
    "two-stages",
    "two-halves",
    "one-stage-drawn",
    "one-stage-drawn-host",
    "one-stage-drawn-rows",
    "unsplit",
    "one-stage-waits",
    "one-stage-host",
    "one-stage-per-lane",
    "one-stage-profiled",
    "certify",
    "rpc",
)  # of a short run, in the order of their worth
