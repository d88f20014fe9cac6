"""The unsplit model with a projector, run by libmtmd's own helpers: the reference for chats with media.

It shares no code with coordinator/media, but for what clears rows that llama.cpp leaves as they were.
"""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import numpy.typing as npt
import pytest
from llama_cpp import llama_cpp as llama

from relayline.coordinator.media.cleared_rows import clearing
from relayline.deploy.testing.reference import ReferenceModel
from tests.support.tiny_videos import as_helper, is_video

MARKER = b"<__media__>"
HAS_LIBRARY = importlib.util.find_spec("llama_cpp.mtmd_cpp") is not None and any(
    (Path(llama_cpp.__file__).parent / "lib").glob("*mtmd.*")
)
needs_library = pytest.mark.skipif(not HAS_LIBRARY, reason="this llama.cpp was built without libmtmd")


# It outlives every model: libmtmd holds a bare pointer.
_no_log = llama.llama_log_callback(lambda level, text, data: None)


class WholeWithImages(ReferenceModel):
    """One context over a whole GGUF, and its projector."""

    def __init__(self, path: Path, projector: Path, n_ctx: int, max_tokens: int = 0) -> None:
        """`max_tokens`: of one image; 0: as the projector says."""
        super().__init__(path, n_ctx, 1, max_rows=32)
        from llama_cpp import mtmd_cpp

        self._mtmd: Any = mtmd_cpp
        self._reading: list[Any] = []  # what reads videos: kept alive, as libmtmd holds bare pointers
        self._found: dict[tuple[object, ...], tuple[int, npt.NDArray[np.float32]]] = {}
        mtmd_cpp.mtmd_helper_log_set(_no_log, None)
        params = mtmd_cpp.mtmd_context_params_default()
        params.use_gpu = params.print_timings = params.warmup = False
        params.n_threads = 1
        self._clearing = params.cb_eval = clearing(mtmd_cpp._libmtmd)  # kept alive as well
        if max_tokens:
            params.image_min_tokens, params.image_max_tokens = 8, max_tokens
        self._encoder = mtmd_cpp.mtmd_init_from_file(bytes(projector), self._model, params)
        assert self._encoder, f"{projector} does not load"

    def logits_along(
        self, rendered: str, files: Sequence[bytes], tokens: Sequence[int]
    ) -> tuple[int, npt.NDArray[np.float32]]:
        """Read a rendered chat whose images and audio are markers, then tokens.

        Returns how many rows the chat has, and the logits before each token: f32 [len(tokens), n_vocab]. It reads
        nothing twice: answers of one model are the same again and again.
        """
        key = (rendered, *files, tuple(tokens))
        if key not in self._found:
            self._found[key] = self._read(rendered, files, tokens)
        return self._found[key]

    def _read(
        self, rendered: str, files: Sequence[bytes], tokens: Sequence[int]
    ) -> tuple[int, npt.NDArray[np.float32]]:
        mtmd = self._mtmd
        self.drop_from(0, 0)
        raw = rendered.encode()
        text = mtmd.mtmd_input_text(raw, len(raw), True, True)
        options = mtmd.mtmd_helper_init_opt_default()
        made = [
            self._lazy(file)
            if is_video(file)
            else mtmd.mtmd_helper_bitmap_init_from_buf(
                self._encoder, (ctypes.c_uint8 * len(file)).from_buffer_copy(file), len(file), False, options
            )
            for file in files
        ]
        bitmaps = [getattr(each, "bitmap", each) for each in made]
        chunks = mtmd.mtmd_input_chunks_init()
        code = mtmd.mtmd_tokenize(
            self._encoder, chunks, ctypes.byref(text), (ctypes.c_void_p * len(files))(*bitmaps), len(files)
        )
        assert code == 0, f"mtmd_tokenize gave {code}"
        end = llama.llama_pos()
        code = mtmd.mtmd_helper_eval_chunks(self._encoder, self._context, chunks, 0, 0, 32, True, ctypes.byref(end))
        assert code == 0, f"mtmd_helper_eval_chunks gave {code}"
        rows = [np.ctypeslib.as_array(llama.llama_get_logits_ith(self._context, -1), (self.n_vocab,)).copy()]
        n_rows = int(mtmd.mtmd_helper_get_n_tokens(chunks))
        mtmd.mtmd_input_chunks_free(chunks)
        for bitmap in bitmaps:
            mtmd.mtmd_bitmap_free(bitmap)
        for at, token in enumerate(tokens[:-1]):
            rows.append(self.decode([token], [end.value + at], [0], [True])[0])
        return n_rows, np.stack(rows)

    def _lazy(self, file: bytes) -> Any:
        """Return a bitmap that libmtmd takes apart itself, as its helper makes one of a video."""
        mtmd, parts, copied = self._mtmd, as_helper(file), ctypes.CDLL(None).strdup
        copied.argtypes, copied.restype = [ctypes.c_char_p], ctypes.c_void_p

        def read_next(_number: int, _data: int, bitmap: Any, text: Any) -> int:
            part = next(parts, None)
            if isinstance(part, str):
                ctypes.cast(text, ctypes.POINTER(ctypes.c_void_p))[0] = copied(part.encode())
            elif part is not None:
                pixels = np.ascontiguousarray(part).ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
                bitmap[0] = mtmd.mtmd_bitmap_init(part.shape[1], part.shape[0], pixels)
                mtmd.mtmd_bitmap_set_mergeable(bitmap[0], True)
            return -1 if part is None else 0

        self._reading.append(mtmd.mtmd_bitmap_lazy_callback(read_next))
        return mtmd.mtmd_bitmap_init_lazy(self._encoder, None, None, self._reading[-1])

    def close(self) -> None:
        if self._encoder:
            self._mtmd.mtmd_free(self._encoder)
            self._encoder = None
        super().close()
