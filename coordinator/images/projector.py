"""llama.cpp's own image encoder, libmtmd: a file of an image becomes tokens of a prompt and rows of the model.

It runs in a child process (`encoding.py`). One thread uses it.
"""

from __future__ import annotations

import ctypes
import io
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from llama_cpp import llama_cpp as llama
from PIL import Image, ImageOps, UnidentifiedImageError

from relayline.coordinator.images.cleared_rows import clearing
from relayline.coordinator.images.segments import Grid, Segment, n_rows_in
from relayline.wire.common.bounds import IMAGE_PIXELS_MAX
from relayline.wire.common.errors import InternalError, InvalidRequestError, UsageError
from relayline.wire.common.usable_cores import usable_cores

_FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
_ERROR, _CONTINUED = 4, 5  # levels of ggml's log
_MARK = b"<__media__>"
_USUAL_MIN_TOKENS, _LEAST_TOKENS = 256, 8  # of images in llama.cpp: the largest least number, and the smallest
NO_LIBRARY = (
    "--mmproj: this llama.cpp was built without its image encoder, libmtmd; run `make rebuild`, or install a wheel of "
    "llama-cpp-python that has it"
)


class Projector:
    """A loaded projector, with the vocabulary of the model that it belongs to."""

    def __init__(self, path: Path, vocabulary: Path, n_embd: int, max_tokens: int = 0) -> None:
        """Load them. `n_embd`: values of each row, as the projector's own tensor has them.

        `max_tokens`: most rows of an image, where its size can be chosen; 0: as the projector says.

        Raises UsageError where it cannot be used.
        """
        try:
            from llama_cpp import mtmd_cpp
        except (ImportError, OSError, AttributeError, RuntimeError):
            raise UsageError(NO_LIBRARY) from None
        self._mtmd: Any = mtmd_cpp
        self._errors: list[str] = []
        self._log = llama.llama_log_callback(self._on_line)  # kept alive: llama.cpp holds a bare pointer
        llama.llama_log_set(self._log, None)
        self._mtmd.mtmd_helper_log_set(self._log, None)
        self.n_embd = n_embd
        params = llama.llama_model_default_params()
        params.vocab_only = True
        self._model = llama.llama_model_load_from_file(bytes(vocabulary), params)
        if not self._model:
            raise UsageError(f"{vocabulary}: {self._reason()}")
        settings = self._mtmd.mtmd_context_params_default()
        settings.use_gpu = True  # where this llama.cpp has one
        settings.print_timings = False
        settings.warmup = False
        settings.n_threads = len(usable_cores())
        settings.media_marker = _MARK
        self._clearing = settings.cb_eval = clearing(mtmd_cpp._libmtmd)  # kept alive as well
        if max_tokens:
            settings.image_max_tokens = max_tokens
            if max_tokens < _USUAL_MIN_TOKENS:  # else small images would have more
                settings.image_min_tokens = min(max_tokens, _LEAST_TOKENS)
        self._context = self._mtmd.mtmd_init_from_file(bytes(path), self._model, settings)
        if not self._context:
            raise UsageError(f"--mmproj {path}: llama.cpp cannot load it: {self._reason()}")
        if not self._mtmd.mtmd_support_vision(self._context):
            raise UsageError(f"--mmproj {path}: it has no encoder for images")
        self.are_mutual = bool(self._mtmd.mtmd_decode_use_non_causal(self._context, None))  # rows see each other
        self._has_axes = bool(self._mtmd.mtmd_decode_use_mrope(self._context))
        try:
            segments = self._segments_of(np.full((64, 64, 3), 255, np.uint8))
        except InternalError as error:
            raise UsageError(f"--mmproj {path}: {error.message}") from None
        if any(isinstance(each, list) and min(each) < 0 for each in segments):
            raise UsageError(f"--mmproj {path}: it needs tokens that the model's vocabulary does not have")

    def encode(self, data: bytes, rows_max: int) -> tuple[list[Segment], npt.NDArray[np.float32]]:
        """Return the segments that an image becomes, and its rows: f32 [n, n_embd].

        There are no rows where they would be more than `rows_max`. Raises InvalidRequestError for a file that is no
        image, InternalError where llama.cpp fails.
        """
        pixels = pixels_of(data)
        with self._tokenized(pixels) as chunks:
            found = self._chunks_in(chunks)
            segments = [self._segment(chunk) for chunk in found]
            sizes = [n_rows_in(segment) for segment in segments]
            n_rows = sum(sizes)
            rows = np.empty((n_rows if n_rows <= rows_max else 0, self.n_embd), np.float32)
            if len(rows):
                at = 0
                for chunk, size in zip(found, sizes, strict=True):
                    if size:
                        self._encode(chunk, rows[at : at + size])
                        at += size
        return segments, rows

    def _segments_of(self, pixels: npt.NDArray[np.uint8]) -> list[Segment]:
        with self._tokenized(pixels) as chunks:
            return [self._segment(chunk) for chunk in self._chunks_in(chunks)]

    def _chunks_in(self, chunks: Any) -> list[Any]:
        return [self._mtmd.mtmd_input_chunks_get(chunks, at) for at in range(self._mtmd.mtmd_input_chunks_size(chunks))]

    @contextmanager
    def _tokenized(self, pixels: npt.NDArray[np.uint8]) -> Iterator[Any]:
        mtmd, (height, width, _) = self._mtmd, pixels.shape
        bitmap = mtmd.mtmd_bitmap_init(width, height, pixels.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8)))
        chunks = mtmd.mtmd_input_chunks_init()
        try:
            text = mtmd.mtmd_input_text(_MARK, len(_MARK), False, True)
            bitmaps = (mtmd.mtmd_bitmap_p_ctypes * 1)(bitmap)
            if mtmd.mtmd_tokenize(self._context, chunks, ctypes.byref(text), bitmaps, 1):
                raise InternalError(f"llama.cpp cannot cut an image of {width} x {height} pixels: {self._reason()}")
            yield chunks
        finally:
            mtmd.mtmd_input_chunks_free(chunks)
            mtmd.mtmd_bitmap_free(bitmap)

    def _segment(self, chunk: Any) -> Segment:
        if self._mtmd.mtmd_input_chunk_get_type(chunk) != self._mtmd.MTMD_INPUT_CHUNK_TYPE_TEXT:
            n_rows = int(self._mtmd.mtmd_input_chunk_get_n_tokens(chunk))
            return self._grid(chunk, n_rows) if self._has_axes else n_rows
        count = ctypes.c_size_t()
        tokens = self._mtmd.mtmd_input_chunk_get_tokens_text(chunk, ctypes.byref(count))
        return [int(tokens[at]) for at in range(count.value)]

    def _grid(self, chunk: Any, n_rows: int) -> Grid:
        """Return the grid of an image's rows. Raises InternalError where llama.cpp gives them other places."""
        mtmd = self._mtmd
        image = mtmd.mtmd_input_chunk_get_tokens_image(chunk)
        corner = mtmd.mtmd_image_tokens_get_decoder_pos(image, 0, n_rows - 1)
        width, height = int(corner.x) + 1, int(corner.y) + 1
        is_grid = width * height == n_rows and (corner.t, corner.z) == (0, 0)
        if not is_grid or mtmd.mtmd_image_tokens_get_n_pos(image) != max(width, height):
            raise InternalError("the rows of its images have places that stages do not know")
        return Grid(width, height)

    def _encode(self, chunk: Any, out: npt.NDArray[np.float32]) -> None:
        if self._mtmd.mtmd_encode_chunk(self._context, chunk):
            raise InternalError(f"llama.cpp cannot encode an image: {self._reason()}")
        found = self._mtmd.mtmd_get_output_embd(self._context)
        np.copyto(out, np.ctypeslib.as_array(found, out.shape))
        if not np.isfinite(out).all():
            raise InternalError("encoding an image gave values that are not finite")

    def _on_line(self, level: int, text: bytes, _user_data: object) -> None:
        if level == _ERROR and len(self._errors) < 8:
            self._errors.append(text.decode("utf-8", errors="replace").strip())

    def _reason(self) -> str:
        reason = self._errors[0] if self._errors else "it gave no reason"
        self._errors.clear()
        return reason[:500]


def pixels_of(data: bytes) -> npt.NDArray[np.uint8]:
    """Return the pixels of a file as they are looked at: u8 [height, width, 3]; of a moving image the first.

    Transparent pixels are white. Raises InvalidRequestError for a file that is no image, or too large a one.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of odd metadata, and of sizes, which are bounded here
            with Image.open(io.BytesIO(data), formats=_FORMATS) as image:
                width, height = image.size
                if width * height > IMAGE_PIXELS_MAX:
                    text = f"an image of {width} x {height} pixels; at most {IMAGE_PIXELS_MAX} are taken"
                    raise InvalidRequestError(text)
                upright = ImageOps.exif_transpose(image)
                if upright.has_transparency_data:
                    clear = upright.convert("RGBA")
                    upright = Image.new("RGBA", clear.size, "white")
                    upright.alpha_composite(clear)
                return np.array(upright.convert("RGB"), np.uint8)
    except UnidentifiedImageError:
        raise InvalidRequestError("it is no image that can be read") from None
    except (OSError, ValueError, SyntaxError, EOFError, Image.DecompressionBombError) as error:
        raise InvalidRequestError(f"the image cannot be read: {str(error)[:200]}") from None
