"""Audio files before llama.cpp unpacks them: how long they are, and headers that say no more than is there; and what
they hold once they are unpacked. Pure.

llama.cpp takes as much memory as a header says, so one of a few bytes could ask for all that a host has.
"""

from __future__ import annotations

import struct

import numpy as np
import numpy.typing as npt

from relayline.wire.common.bounds import AUDIO_SECONDS_MAX
from relayline.wire.common.errors import InvalidRequestError

_CHUNK = struct.Struct("<4sI")
_FORMAT = struct.Struct("<HHIIHH")  # code, channels, frames a second, bytes a second, bytes a frame, bits a sample
_PCM, _FLOAT, _A_LAW, _MU_LAW, _EXTENSIBLE = 1, 3, 6, 7, 0xFFFE
_CODES = {_PCM: "PCM", _FLOAT: "float", _A_LAW: "A-law", _MU_LAW: "mu-law", _EXTENSIBLE: "extensible"}
_CHUNKS_MAX = 1_000
_TAG_BYTES = 65_536  # of an MP3, behind its ID3 tag, in which its first frame is looked for
_FRAME_SAMPLES = 1_152  # of an MP3, at most in one of its frames
_STREAM_INFO_BYTES = 42  # of a FLAC: its mark, and its first block
_FLAC_RATE_MAX = 192_000  # frames a second; unpacking takes time for each of them
SAMPLE_MAX = 1 << 31  # as in the widest of whole numbers; where samples are floats, sound is between -1 and 1
_FLAC_SAMPLES_MAX = AUDIO_SECONDS_MAX * 48_000 * 2  # of all channels: the longest audio as DVDs have it


def kind_of_file(data: bytes) -> str:
    """Return the name of an audio file's format, as it begins."""
    return {b"RIFF": "WAV", b"fLaC": "FLAC"}.get(data[:4], "MP3")


def checked(data: bytes) -> bytes:
    """Return an audio file whose header can be trusted. Raises InvalidRequestError for one that is broken or too long.

    Of a WAV these are its format and its samples alone, with the sizes that they have.
    """
    kind = kind_of_file(data)
    if kind == "WAV":
        return _wave(data)
    if kind == "FLAC":
        _check_flac(data)
    else:
        _check_mpeg(data)
    return data


def check_seconds(n_frames: int, rate: int, max_seconds: int = AUDIO_SECONDS_MAX, min_frames: int = 2) -> None:
    """Raise InvalidRequestError for audio that is empty or too long."""
    if n_frames < min_frames:
        raise InvalidRequestError("there is no sound in the audio file")
    if n_frames > max_seconds * rate:
        text = f"audio of {n_frames // rate} seconds; at most {max_seconds} are taken"
        raise InvalidRequestError(text)


def check_samples(samples: npt.NDArray[np.float32]) -> None:
    """Raise InvalidRequestError where unpacked audio is no sound: an encoder would make no finite rows of it."""
    if not -SAMPLE_MAX <= samples.min() <= samples.max() <= SAMPLE_MAX:  # nor for NaN
        raise InvalidRequestError(f"the audio file has samples that are no numbers, or beyond {SAMPLE_MAX}")


def _wave(data: bytes) -> bytes:
    form, samples = b"", memoryview(b"")
    at = 12
    for _ in range(_CHUNKS_MAX):
        if at + _CHUNK.size > len(data):
            break
        name, size = _CHUNK.unpack_from(data, at)
        at += _CHUNK.size
        if name == b"fmt ":
            form = data[at : at + size]
        if name == b"data":  # of what is written while it is recorded, the size is not known
            samples = memoryview(data)[at : at + size]
            break
        at += size + size % 2
    if len(form) < _FORMAT.size:
        raise InvalidRequestError("the WAV file has no format")
    code, channels, rate, _, n_frame_bytes, bits = _FORMAT.unpack_from(form)
    if code not in _CODES:
        raise InvalidRequestError(f"a WAV file of the coding {code}; these are read: {', '.join(_CODES.values())}")
    if not (channels and rate and bits and bits % 8 == 0 and n_frame_bytes == channels * bits // 8):
        raise InvalidRequestError("the WAV file's format is not sound")
    check_seconds(len(samples) // n_frame_bytes, rate)
    size = len(samples) - len(samples) % n_frame_bytes
    form = form[:40]  # what follows is no part of a format that is read
    chunks = _CHUNK.pack(b"fmt ", len(form)) + form + _CHUNK.pack(b"data", size)
    return b"".join((_CHUNK.pack(b"RIFF", 4 + len(chunks) + size), b"WAVE", chunks, samples[:size]))


def _check_flac(data: bytes) -> None:
    if len(data) < _STREAM_INFO_BYTES or data[4] & 0x7F != 0:
        raise InvalidRequestError("the FLAC file has no header")
    packed = int.from_bytes(data[18:26], "big")
    rate, n_channels, n_frames = packed >> 44, (packed >> 41 & 7) + 1, packed & ((1 << 36) - 1)
    if not rate:
        raise InvalidRequestError("the FLAC file's header is not sound")
    if rate > _FLAC_RATE_MAX:
        raise InvalidRequestError(f"a FLAC file of {rate} Hz; at most {_FLAC_RATE_MAX} are read")
    check_seconds(n_frames, rate)
    if n_frames * n_channels > _FLAC_SAMPLES_MAX:
        text = f"a FLAC file of {n_frames * n_channels} samples; at most {_FLAC_SAMPLES_MAX} are read, all channels"
        raise InvalidRequestError(text)


def _check_mpeg(data: bytes) -> None:
    """Check what an encoder's tag in the first frame says."""
    at = 0
    if data[:3] == b"ID3":
        sizes = [byte & 0x7F for byte in data[6:10]]
        at = 10 + (sizes[0] << 21 | sizes[1] << 14 | sizes[2] << 7 | sizes[3])
    for mark in (b"Xing", b"Info"):
        found = data.find(mark, at, at + _TAG_BYTES)
        if found < 0 or len(data) < found + 12:
            continue
        flags, n_frames = struct.unpack_from(">II", data, found + 4)
        if flags & 1:
            n_most = AUDIO_SECONDS_MAX * 48_000 // _FRAME_SAMPLES  # none has more frames a second
            if n_frames > n_most:
                raise InvalidRequestError(f"the MP3 file says that it has {n_frames} frames; at most {n_most} are read")
