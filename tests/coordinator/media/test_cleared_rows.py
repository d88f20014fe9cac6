"""Images are encoded alike whatever memory held before: rows that llama.cpp makes by a factor of zero are zeros."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llama_cpp import llama_cpp as llama

from relayline.coordinator.media import projector as module
from relayline.coordinator.media.projector import Projector
from relayline.wire.common.errors import InternalError
from tests.support.tiny_models import make_tiny
from tests.support.tiny_projectors import make_projector, picture
from tests.support.tiny_shapes import N_EMBD
from tests.support.whole_with_images import MARKER, WholeWithImages, needs_library

LIBC: Any = ctypes.CDLL(None)
M_PERTURB, ALL_ONES = -6, 0x100  # of glibc's mallopt, which fills with the inverse: bytes of 0xff are NaN
pytestmark = [
    needs_library,
    pytest.mark.skipif(not hasattr(LIBC, "mallopt"), reason="only glibc fills memory before it gives it out"),
]
KEPT: list[Projector] = []  # llama.cpp goes on writing its log to the last one
PICTURES = [picture(1), picture(2, size=(64, 20))]


@contextlib.contextmanager
def memory_full_of_nan() -> Iterator[None]:
    assert LIBC.mallopt(M_PERTURB, ALL_ONES)
    try:
        yield
    finally:
        LIBC.mallopt(M_PERTURB, 0)


@pytest.fixture(scope="module", name="files")
def files_fixture(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A projector whose lines end by a row, and a model for it."""
    directory = tmp_path_factory.mktemp("model")
    model = make_tiny("mistral3", directory / "model.gguf", tokenizer=True)
    return make_projector(directory / "mmproj.gguf", "pixtral"), model


def encoded(files: tuple[Path, Path]) -> list[np.ndarray]:
    KEPT.append(projector := Projector(*files, N_EMBD))
    return [projector.encode(each, 100)[1] for each in PICTURES]


def test_rows_of_images_do_not_depend_on_old_memory(files: tuple[Path, Path]) -> None:
    expected = encoded(files)
    with memory_full_of_nan():
        found = encoded(files)
    for one, other in zip(found, expected, strict=True):
        assert np.array_equal(one, other)


def test_the_reference_of_tests_does_not_either(files: tuple[Path, Path]) -> None:
    def logits() -> np.ndarray:
        with WholeWithImages(files[1], files[0], 256) as whole:
            return whole.logits_along(f"<|user|>x{MARKER.decode()}?", PICTURES[:1], [0])[1]

    expected = logits()
    with memory_full_of_nan():
        assert np.array_equal(logits(), expected)


def test_llama_cpp_alone_still_depends_on_it(files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Once it does not, `coordinator/media/cleared_rows.py` can go."""
    monkeypatch.setattr(module, "clearing", lambda library: llama.ggml_backend_sched_eval_callback(0))
    with memory_full_of_nan(), pytest.raises(InternalError, match="not finite"):
        encoded(files)
