"""llama.cpp's own encoder, libmtmd: an image, audio or video file becomes tokens of a prompt and rows of the model.

It runs in a child process (`encoding.py`). One thread uses it.
"""

from __future__ import annotations

import ctypes
import io
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from llama_cpp import llama_cpp as llama
from PIL import ExifTags, Image, UnidentifiedImageError

from relayline.coordinator.media.audio_headers import check_samples, check_seconds, checked, kind_of_file
from relayline.coordinator.media.cleared_rows import clearing
from relayline.coordinator.media.memory_limit import no_more_memory_than
from relayline.coordinator.media.parts import Takes, is_audio_file
from relayline.coordinator.media.segments import Grid, Segment, joined, n_rows_in
from relayline.coordinator.media.video_frames import video_of
from relayline.coordinator.media.video_script import Sampling, has_library, script
from relayline.coordinator.model.projectors import AUDIO, has_axes, read_projector
from relayline.coordinator.text.llama_errors import LlamaErrors, on_log
from relayline.wire.common.bounds import AUDIO_UNPACKED_BYTES_MAX, IMAGE_PIXELS_MAX
from relayline.wire.common.errors import InternalError, InvalidRequestError, UsageError
from relayline.wire.common.usable_cores import computing_cores
from relayline.wire.model_files.gguf_header import read_header

_FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
# By the orientation in an image's EXIF. Pillow's `exif_transpose` writes the EXIF anew, too: it fails at odd values.
_TURNS: dict[Any, Image.Transpose] = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_MARK = b"<__media__>"
# Positions of such models have several axes (llama_model_rope_type), whatever the rest of their file says.
_WITH_AXES = b"qwen2vl"
_USUAL_MIN_TOKENS, _LEAST_TOKENS = 256, 8  # of images in llama.cpp: the largest least number, and the smallest
NO_LIBRARY = (
    "--mmproj: this llama.cpp was built without its encoder of images and audio, libmtmd; run `make rebuild`, or "
    "install a wheel of llama-cpp-python that has it"
)


class Projector:
    """A loaded projector, with the vocabulary of the model that it belongs to."""

    def __init__(
        self, path: Path, vocabulary: Path, n_embd: int, max_tokens: int = 0, sampling: Sampling | None = None
    ) -> None:
        """Load them. `n_embd`: values of each row, as the projector's own tensor has them.

        `max_tokens`: most rows of an image, where its size can be chosen; 0: as the projector says. `sampling`: of
        videos.

        Raises UsageError where it cannot be used, StartError where memory is missing.
        """
        try:
            from llama_cpp import mtmd_cpp
        except (ImportError, OSError, AttributeError, RuntimeError):
            raise UsageError(NO_LIBRARY) from None
        self._mtmd: Any = mtmd_cpp
        self._errors = LlamaErrors()
        self._mtmd.mtmd_helper_log_set(on_log, None)
        self.n_embd, self._sampling = n_embd, sampling or Sampling()
        self._model = _vocabulary_of(vocabulary)
        if not self._model:
            raise self._errors.error(str(vocabulary))
        settings = self._mtmd.mtmd_context_params_default()
        settings.use_gpu = True  # where this llama.cpp has one
        settings.print_timings = False
        settings.warmup = False
        settings.n_threads = len(computing_cores())
        settings.media_marker = _MARK
        self._clearing = settings.cb_eval = clearing(mtmd_cpp._libmtmd)  # kept alive as well
        if max_tokens:
            settings.image_max_tokens = max_tokens
            if max_tokens < _USUAL_MIN_TOKENS:  # else small images would have more
                settings.image_min_tokens = min(max_tokens, _LEAST_TOKENS)
        self._context = self._mtmd.mtmd_init_from_file(bytes(path), self._model, settings)
        if not self._context:
            raise self._errors.error(f"--mmproj {path}: llama.cpp cannot load it")
        served = read_projector(path)  # a file may have an encoder of audio that is left out
        takes_images = bool(served.images and self._mtmd.mtmd_support_vision(self._context))
        takes_audio = bool(served.audio and self._mtmd.mtmd_support_audio(self._context))
        self.takes = Takes(takes_images, takes_audio, video=takes_images and has_library())
        # Rows of one image see each other:
        are_mutual = self.takes.images and bool(self._mtmd.mtmd_decode_use_non_causal(self._context, None))
        self.are_mutual = are_mutual and not served.are_causal
        self._sounds = AUDIO.get(served.audio)
        self._has_axes = bool(self._mtmd.mtmd_decode_use_mrope(self._context))
        self._try(path)

    def _try(self, path: Path) -> None:
        """Cut an image and a second of silence, as far as they are taken. Raises UsageError where it cannot be used."""
        mtmd = self._mtmd
        if not any(self.takes):
            raise UsageError(f"--mmproj {path}: it has no encoder for images or audio")
        try:
            if self.takes.images:
                self._segments_of(self._bitmap_of(np.full((64, 64, 3), 255, np.uint8)))
            if self.takes.audio:
                silence = np.zeros(mtmd.mtmd_get_audio_sample_rate(self._context), np.float32)
                pointer = silence.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
                self._segments_of(mtmd.mtmd_bitmap_init_from_audio(len(silence), pointer))
        except (InternalError, InvalidRequestError) as error:
            raise UsageError(f"--mmproj {path}: {error.message}") from None

    def encode(
        self, data: bytes, rows_max: int, *, is_video: bool = False
    ) -> tuple[list[Segment], npt.NDArray[np.float32]]:
        """Return the segments that an image, audio or video file becomes, and its rows: f32 [n, n_embd].

        There are no rows where they would be more than `rows_max`. Raises InvalidRequestError for a file that is none
        of these, InternalError where llama.cpp fails.
        """
        if is_video:
            return self._encode_video(data, rows_max)
        bitmap = self._sound_of(data) if is_audio_file(data) else self._bitmap_of(pixels_of(data))
        with self._tokenized(bitmap) as chunks:
            segments = [self._segment(chunk) for chunk in self._chunks_in(chunks)]
            rows = self._room_for(segments, rows_max)
            if len(rows):
                self._fill(chunks, rows)
        return segments, rows

    def _encode_video(self, data: bytes, rows_max: int) -> tuple[list[Segment], npt.NDArray[np.float32]]:
        """Return these of a video. One or two frames at a time are cut: their pixels as numbers take much memory."""
        frames, rate = video_of(data, self._sampling)
        pieces = list(script(len(frames), rate))
        # All frames have one size. So one of each kind says what the others become:
        kinds = {piece if isinstance(piece, str) else len(piece): piece for piece in reversed(pieces)}
        become: dict[str | int, list[Segment]] = {}
        for kind, piece in kinds.items():
            with self._cut(piece, frames) as chunks:
                become[kind] = [self._segment(chunk) for chunk in self._chunks_in(chunks)]
        segments = joined(part for each in pieces for part in become[each if isinstance(each, str) else len(each)])
        rows, at = self._room_for(segments, rows_max), 0
        for piece in pieces if len(rows) else ():
            if not isinstance(piece, str):
                with self._cut(piece, frames) as chunks:
                    at += self._fill(chunks, rows[at:])
        return segments, rows

    def _cut(self, piece: str | tuple[int, ...], frames: Sequence[npt.NDArray[np.uint8]]) -> Any:
        """Give the chunks that a text of a video becomes, or frames that follow each other."""
        if isinstance(piece, str):
            return self._tokenized(text=piece.encode())
        bitmaps = [self._bitmap_of(frames[at]) for at in piece]
        for bitmap in bitmaps:
            self._mtmd.mtmd_bitmap_set_mergeable(bitmap, True)
        return self._tokenized(*bitmaps)

    def _room_for(self, segments: Sequence[Segment], rows_max: int) -> npt.NDArray[np.float32]:
        n_rows = sum(map(n_rows_in, segments))
        return np.empty((n_rows if n_rows <= rows_max else 0, self.n_embd), np.float32)

    def _fill(self, chunks: Any, rows: npt.NDArray[np.float32]) -> int:
        """Encode chunks into the first of some rows, and return how many they took."""
        at = 0
        for chunk in self._chunks_in(chunks):
            if size := n_rows_in(self._segment(chunk)):
                self._encode(chunk, rows[at : at + size])
                at += size
        return at

    def _bitmap_of(self, pixels: npt.NDArray[np.uint8]) -> Any:
        height, width, _ = pixels.shape
        return self._mtmd.mtmd_bitmap_init(width, height, pixels.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8)))

    def _sound_of(self, data: bytes) -> Any:
        """Return an audio file, unpacked as libmtmd holds it: one channel, at the rate of the encoder."""
        if not self.takes.audio:
            raise InvalidRequestError("this model takes no audio")
        mtmd, file = self._mtmd, checked(data)
        held = (ctypes.c_uint8 * len(file)).from_buffer_copy(file)
        with no_more_memory_than(AUDIO_UNPACKED_BYTES_MAX):
            made = mtmd.mtmd_helper_bitmap_init_from_buf_wrapper(
                self._context, held, len(file), False, mtmd.mtmd_helper_init_opt_default()
            )
        if not made.bitmap:
            # llama.cpp's own reason speaks of WAV, whatever the file is.
            raise InvalidRequestError(f"the audio cannot be read: it is a damaged {kind_of_file(data)} file, or none")
        try:
            n_samples = mtmd.mtmd_bitmap_get_nx(made.bitmap)
            assert self._sounds is not None
            rate, max_seconds = mtmd.mtmd_get_audio_sample_rate(self._context), self._sounds.max_seconds
            check_seconds(n_samples, rate, max_seconds, self._sounds.min_samples)
            samples = ctypes.cast(mtmd.mtmd_bitmap_get_data(made.bitmap), ctypes.POINTER(ctypes.c_float))
            check_samples(np.ctypeslib.as_array(samples, (n_samples,)))
        except InvalidRequestError:
            mtmd.mtmd_bitmap_free(made.bitmap)
            raise
        return made.bitmap

    def _segments_of(self, bitmap: Any) -> list[Segment]:
        with self._tokenized(bitmap) as chunks:
            return [self._segment(chunk) for chunk in self._chunks_in(chunks)]

    def _chunks_in(self, chunks: Any) -> list[Any]:
        return [self._mtmd.mtmd_input_chunks_get(chunks, at) for at in range(self._mtmd.mtmd_input_chunks_size(chunks))]

    @contextmanager
    def _tokenized(self, *bitmaps: Any, text: bytes = b"") -> Iterator[Any]:
        """Give the chunks that bitmaps become, or a text, and free all. Raises InvalidRequestError for an odd size."""
        mtmd = self._mtmd
        chunks = mtmd.mtmd_input_chunks_init()
        try:
            text = text or _MARK * len(bitmaps)
            given = mtmd.mtmd_input_text(text, len(text), False, True)
            held = (mtmd.mtmd_bitmap_p_ctypes * len(bitmaps))(*bitmaps)
            if mtmd.mtmd_tokenize(self._context, chunks, ctypes.byref(given), held, len(bitmaps)):
                if not bitmaps:
                    raise InternalError(f"llama.cpp cannot read a text: {self._errors.reason()}")
                bitmap = bitmaps[0]
                size = f"{mtmd.mtmd_bitmap_get_nx(bitmap)} x {mtmd.mtmd_bitmap_get_ny(bitmap)}"
                what = "audio of {} samples" if mtmd.mtmd_bitmap_is_audio(bitmap) else "an image of {} pixels"
                raise InvalidRequestError(f"llama.cpp cannot cut {what.format(size)}: {self._errors.reason()}")
            yield chunks
        finally:
            mtmd.mtmd_input_chunks_free(chunks)
            for bitmap in bitmaps:
                mtmd.mtmd_bitmap_free(bitmap)

    def _segment(self, chunk: Any) -> Segment:
        """Return what a chunk is. Raises InternalError where stages or the model's vocabulary do not know it."""
        kind = self._mtmd.mtmd_input_chunk_get_type(chunk)
        if kind != self._mtmd.MTMD_INPUT_CHUNK_TYPE_TEXT:
            n_rows = int(self._mtmd.mtmd_input_chunk_get_n_tokens(chunk))
            is_image = kind == self._mtmd.MTMD_INPUT_CHUNK_TYPE_IMAGE  # rows of audio have places like tokens
            return self._places(chunk, n_rows) if self._has_axes and is_image else n_rows
        count = ctypes.c_size_t()
        tokens = self._mtmd.mtmd_input_chunk_get_tokens_text(chunk, ctypes.byref(count))
        found = [int(tokens[at]) for at in range(count.value)]
        if min(found, default=0) < 0:
            raise InternalError("it needs tokens that the model's vocabulary does not have")
        return found

    def _places(self, chunk: Any, n_rows: int) -> Segment:
        """Return the grid of an image's rows, or only their number: then they have places like tokens.

        Raises InternalError where llama.cpp gives them other places.
        """
        mtmd = self._mtmd
        image = mtmd.mtmd_input_chunk_get_tokens_image(chunk)
        corner = mtmd.mtmd_image_tokens_get_decoder_pos(image, 0, n_rows - 1)
        n_places = mtmd.mtmd_image_tokens_get_n_pos(image)
        if (corner.t, corner.x, corner.y, n_places) == (n_rows - 1, n_rows - 1, n_rows - 1, n_rows):
            return n_rows  # mtmd_tokenizer gives them to a tile; of four axes, no model served here uses the last
        width, height = int(corner.x) + 1, int(corner.y) + 1
        is_grid = width * height == n_rows and (corner.t, corner.z) == (0, 0)
        if not is_grid or n_places != max(width, height):
            raise InternalError("the rows of its images have places that stages do not know")
        return Grid(width, height)

    def _encode(self, chunk: Any, out: npt.NDArray[np.float32]) -> None:
        if self._mtmd.mtmd_encode_chunk(self._context, chunk):
            raise InternalError(f"llama.cpp cannot encode it: {self._errors.reason()}")
        found = self._mtmd.mtmd_get_output_embd(self._context)
        np.copyto(out, np.ctypeslib.as_array(found, out.shape))
        if not np.isfinite(out).all():
            raise InternalError("encoding it gave values that are not finite")


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
                image.load()
                turn = _TURNS.get(image.getexif().get(ExifTags.Base.Orientation))
                upright = image if turn is None else image.transpose(turn)
                if upright.mode.startswith("I"):
                    upright = _in_8_bits(upright)
                if upright.has_transparency_data:
                    clear = upright.convert("RGBA")
                    upright = Image.new("RGBA", clear.size, "white")
                    upright.alpha_composite(clear)
                return np.array(upright.convert("RGB"), np.uint8)
    except Image.DecompressionBombError:  # Pillow looks for itself, too
        raise InvalidRequestError(f"the image has far too many pixels; at most {IMAGE_PIXELS_MAX} are taken") from None
    except UnidentifiedImageError:
        raise InvalidRequestError("it is no image that can be read") from None
    except (OSError, ValueError, SyntaxError, EOFError) as error:
        raise InvalidRequestError(f"the image cannot be read: {str(error)[:200]}") from None


def _in_8_bits(image: Image.Image) -> Image.Image:
    """Return a grey image of 16 bits in 8. Pillow's `convert` would make all but the darkest 256th of them white."""
    grey = np.asarray(image)
    seen = Image.fromarray((grey >> 8).astype(np.uint8))
    clear = image.info.get("transparency")
    if clear is not None:
        seen.putalpha(Image.fromarray(np.where(grey == clear, 0, 255).astype(np.uint8)))
    return seen


def _vocabulary_of(path: Path) -> Any:
    """Return llama.cpp's model with the vocabulary of a file and nothing else; None where it cannot be loaded.

    mtmd_context asks the model for the type of its rope, and for some architectures that depends on values that
    llama_model_base::load_hparams does not read with a vocabulary alone. So a model whose file gives positions several
    axes is loaded under an architecture that always has them. Vocabularies do not depend on these architectures.
    """
    params = llama.llama_model_default_params()
    params.vocab_only = True
    overrides = (llama.llama_model_kv_override * 2)()  # the second, empty, ends the list
    if has_axes(read_header(path)):
        overrides[0].tag = llama.LLAMA_KV_OVERRIDE_TYPE_STR
        overrides[0].key = b"general.architecture"
        overrides[0].value.val_str = _WITH_AXES
        params.kv_overrides = overrides
    return llama.llama_model_load_from_file(bytes(path), params)
