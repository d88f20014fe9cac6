"""Tiny random projectors of audio, as llama.cpp's encoder loads them, and files of audio."""

from __future__ import annotations

import io
import wave
from pathlib import Path

import gguf
import numpy as np

from tests.support import tiny_gemma_media
from tests.support.tiny_conformers import CONFORMERS
from tests.support.tiny_projectors import (
    N_FF,
    N_HEADS,
    N_LAYERS,
    WIDTH,
    add_images,
    add_numbers,
    image_shapes,
    write_projector,
)
from tests.support.tiny_shapes import N_EMBD

N_MEL = 16
STACK = 60  # places of whisper's encoder that become one row: 25 rows for up to 30 seconds
CHANNELS = 8  # of qwen3a's convolutions
N_PLACES = 1_500  # of whisper's encoder, for up to 30 seconds
# Of a file of up to 30 seconds, and of up to one second:
N_AUDIO_ROWS = {"ultravox": 25, "voxtral": 12, "glma": 27, "qwen2a": 750, "musicflamingo": 750, "qwen2.5o": 750}
N_SECOND_ROWS = {"qwen3a": 13}
_STACKED = ("ultravox", "voxtral", "glma", "meralion")


def make_audio_projector(path: Path, kind: str = "ultravox", *, n_embd: int = N_EMBD, seed: int = 1) -> Path:
    """Write a projector of a kind, and return its path. Its rows have `n_embd` values; qwen2.5o takes images too.

    Of a kind such as "gemma4v+gemma4a", the first part is the encoder of images.
    """
    writer = gguf.GGUFWriter(None, "clip")
    images, _, kind = kind.rpartition("+")
    writer.add_string("clip.audio.projector_type" if images else "clip.projector_type", kind)
    writer.add_bool("clip.has_audio_encoder", True)
    other = tiny_gemma_media.AUDIO.get(kind) or CONFORMERS.get(kind)
    numbers = {"embedding_length": WIDTH, "feed_forward_length": N_FF, "block_count": N_LAYERS,
               "projection_dim": n_embd, "attention.head_count": N_HEADS, "num_mel_bins": N_MEL}  # fmt: skip
    add_numbers(writer, "audio", {**numbers, **(other.numbers if other else {})})
    if kind in _STACKED:
        writer.add_uint32("clip.audio.projector.stack_factor", STACK)
    writer.add_float32("clip.audio.attention.layer_norm_epsilon", 1e-5)
    shapes = other.shapes(n_embd) if other else _shapes("qwen2a" if kind == "qwen2.5o" else kind, n_embd)
    if images:
        writer.add_string("clip.vision.projector_type", images)
    elif kind == "qwen2.5o":
        images = "qwen2.5vl_merger"
    if images:
        add_images(writer, images, n_embd)
        shapes |= image_shapes(images, n_embd)
    return write_projector(writer, path, shapes, seed)


def _shapes(kind: str, n_embd: int) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"a.position_embd.weight": (N_PLACES, WIDTH)}
    if kind == "qwen3a":
        for number, n_in in ((1, 1), (2, CHANNELS), (3, CHANNELS)):
            shapes |= {f"a.conv2d.{number}.weight": (CHANNELS, n_in, 3, 3), f"a.conv2d.{number}.bias": (CHANNELS,)}
        shapes["a.conv_out.weight"] = (WIDTH, CHANNELS * N_MEL // 8)
    else:
        for number, n_in in ((1, N_MEL), (2, WIDTH)):
            shapes |= {f"a.conv1d.{number}.weight": (WIDTH, n_in, 3), f"a.conv1d.{number}.bias": (WIDTH, 1)}
    for layer in range(N_LAYERS):
        block = f"a.blk.{layer}"
        for part in ("attn_q", "attn_k", "attn_v", "attn_out"):
            shapes[f"{block}.{part}.weight"] = (WIDTH, WIDTH)
            if part != "attn_k":
                shapes[f"{block}.{part}.bias"] = (WIDTH,)
        for part in ("ln1", "ln2"):
            shapes |= {f"{block}.{part}.weight": (WIDTH,), f"{block}.{part}.bias": (WIDTH,)}
        shapes |= {f"{block}.ffn_up.weight": (N_FF, WIDTH), f"{block}.ffn_up.bias": (N_FF,)}
        shapes |= {f"{block}.ffn_down.weight": (WIDTH, N_FF), f"{block}.ffn_down.bias": (WIDTH,)}
    shapes |= {"a.post_ln.weight": (WIDTH,), "a.post_ln.bias": (WIDTH,)}
    return shapes | _projection(kind, n_embd)


def _projection(kind: str, n_embd: int) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]]
    n_in = WIDTH * STACK if kind in _STACKED else WIDTH
    if kind == "qwen2a":
        return {"mm.a.fc.weight": (n_embd, n_in), "mm.a.fc.bias": (n_embd,)}
    if kind == "meralion":
        shapes = {"mm.a.norm_pre.weight": (n_in,), "mm.a.norm_pre.bias": (n_in,)}
        for number, (n_out, width) in enumerate(((N_FF, n_in), (N_FF, N_FF), (N_FF, N_FF), (n_embd, N_FF))):
            shapes |= {f"mm.a.mlp.{number}.weight": (n_out, width), f"mm.a.mlp.{number}.bias": (n_out,)}
        return shapes
    n_first = 2 * N_FF if kind == "ultravox" else N_FF  # half of it opens the other half
    shapes = {"mm.a.mlp.1.weight": (n_first, n_in), "mm.a.mlp.2.weight": (n_embd, N_FF)}
    if kind in ("glma", "musicflamingo", "qwen3a"):
        shapes |= {"mm.a.mlp.1.bias": (n_first,), "mm.a.mlp.2.bias": (n_embd,)}
    if kind == "ultravox":
        shapes |= {"mm.a.norm_pre.weight": (n_in,), "mm.a.norm_mid.weight": (N_FF,)}
    if kind == "glma":
        shapes |= {"mm.a.norm_pre.weight": (WIDTH,), "mm.a.norm_pre.bias": (WIDTH,)}
        shapes |= {"v.boi": (1, n_embd), "v.eoi": (1, n_embd)}
    return shapes


def sound(seed: int = 1, *, seconds: float = 0.5, rate: int = 8_000, channels: int = 1) -> bytes:
    """Return a WAV file of a few tones."""
    rng = np.random.default_rng(seed)
    times = np.arange(int(seconds * rate)) / rate
    tones = sum(np.sin(2 * np.pi * pitch * times) for pitch in rng.uniform(100, 3_000, 4)) / 5
    samples = (tones * 32_000).astype("<i2")
    found = io.BytesIO()
    with wave.open(found, "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(np.repeat(samples, channels).tobytes())
    return found.getvalue()
