"""Tiny random projectors, as llama.cpp's image encoder loads them: a few hundred KiB each, always the same."""

from __future__ import annotations

import io
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from PIL import Image

from tests.support import tiny_conformers, tiny_gemma_media
from tests.support.tiny_models import add_value
from tests.support.tiny_plain_projectors import PLAIN
from tests.support.tiny_shapes import N_EMBD
from tests.support.tiny_wide_projectors import WIDE_KINDS, Other

WIDTH, N_FF, N_HEADS, N_LAYERS = 32, 64, 2, 2  # of the encoder
PATCH, IMAGE = 7, 28
_OTHERS: dict[str, Other] = {**WIDE_KINDS, **PLAIN}
# That the vocabulary of a model must have, by the kind.
MEDIA_TOKENS = {kind: other.tokens for kind, other in _OTHERS.items()} | {
    "idefics3": ("\n\n", "<fake_token_around_image>", "<global-img>")
}
# Of one square image; pixtral ends lines by a row.
N_ROWS = {"mlp": 16, "pixtral": 20, "idefics3": 4, "internvl": 4, "gemma3": 16}
_GRIDS = ("qwen2vl_merger", "qwen2.5vl_merger", "qwen3vl_merger")  # whose rows have places on several axes

_ENCODERS: dict[str, Other | tiny_gemma_media.GemmaEncoder | tiny_conformers.Conformer] = {
    **_OTHERS,
    **tiny_gemma_media.IMAGES,
    **tiny_conformers.IMAGES,
}
_POSITIVE = ("mel_filters", "window", "_var")  # else logarithms and roots of them would be no numbers


def make_projector(path: Path, kind: str = "mlp", *, n_embd: int = N_EMBD, seed: int = 1, n_deepstack: int = 0) -> Path:
    """Write a projector of a kind, and return its path. Its rows have `n_embd` values.

    `n_deepstack`: layers of the model for which it makes features.
    """
    writer = gguf.GGUFWriter(None, "clip")
    writer.add_string("clip.projector_type", kind)
    add_images(writer, kind, n_embd)
    writer.add_array("clip.vision.is_deepstack_layers", [layer < n_deepstack for layer in range(N_LAYERS)])
    return write_projector(writer, path, {**image_shapes(kind, n_embd), **_deepstack(n_deepstack, n_embd)}, seed)


def _deepstack(n_layers: int, n_embd: int) -> dict[str, tuple[int, ...]]:
    """Return the tensors that make features of the first blocks' outputs."""
    shapes: dict[str, tuple[int, ...]] = {}
    for layer in range(n_layers):
        block = f"v.deepstack.{layer}"
        shapes |= {f"{block}.norm.weight": (4 * WIDTH,), f"{block}.norm.bias": (4 * WIDTH,)}
        shapes |= {f"{block}.fc1.weight": (4 * WIDTH, 4 * WIDTH), f"{block}.fc1.bias": (4 * WIDTH,)}
        shapes |= {f"{block}.fc2.weight": (n_embd, 4 * WIDTH), f"{block}.fc2.bias": (n_embd,)}
    return shapes


def add_images(writer: gguf.GGUFWriter, kind: str, n_embd: int) -> None:
    """Say an encoder of images."""
    writer.add_bool("clip.has_vision_encoder", True)
    other = _OTHERS.get(kind)
    writer.add_bool(f"clip.use_{other.activation if other else 'gelu'}", True)
    if other and other.minicpmv:
        writer.add_int32("clip.minicpmv_version", other.minicpmv[0])
        writer.add_uint32("clip.minicpmv_query_num", other.minicpmv[1])
    numbers = {"embedding_length": WIDTH, "feed_forward_length": N_FF, "block_count": N_LAYERS,
               "projection_dim": n_embd, "attention.head_count": N_HEADS, "image_size": IMAGE,
               "patch_size": PATCH}  # fmt: skip
    encoder = _ENCODERS.get(kind)
    add_numbers(writer, "vision", {**numbers, **(encoder.numbers if encoder else {})})
    writer.add_float32("clip.vision.attention.layer_norm_epsilon", 1e-5)
    writer.add_array("clip.vision.image_mean", [0.5, 0.5, 0.5])
    writer.add_array("clip.vision.image_std", [0.5, 0.5, 0.5])
    if kind in ("gemma3", "gemma4v"):
        writer.add_uint32("clip.vision.projector.scale_factor", 1)
    if kind in ("idefics3", "internvl"):
        writer.add_uint32("clip.vision.projector.scale_factor", 2)
    if kind == "idefics3":
        writer.add_uint32("clip.vision.preproc_image_size", IMAGE)
    if kind in _GRIDS:
        writer.add_uint32("clip.vision.spatial_merge_size", 2)
    if kind == "qwen2.5vl_merger":
        writer.add_uint32("clip.vision.n_wa_pattern", 2)


def add_numbers(writer: gguf.GGUFWriter, encoder: str, numbers: Mapping[str, Any]) -> None:
    """Say numbers of an encoder, vision or audio."""
    for key, value in numbers.items():
        add_value(writer, f"clip.{encoder}.{key}", value)


def write_projector(writer: gguf.GGUFWriter, path: Path, shapes: dict[str, tuple[int, ...]], seed: int) -> Path:
    """Write random tensors, and return the path."""
    for name, shape in shapes.items():
        values = np.random.default_rng((seed, zlib.crc32(name.encode()))).standard_normal(shape).astype(np.float32)
        is_norm = ("ln" in name.split(".")[-2] or "norm" in name) and name.endswith("weight")
        scale = 1.0 if len(shape) == 1 else 1.0 / np.sqrt(np.prod(shape[1:]))
        values = 1 + 0.1 * values if is_norm else (values * scale).astype(np.float32)
        values = np.abs(values) if name.endswith(_POSITIVE) else values
        # ggml's convolutions over time take such kernels alone.
        is_kernel = "conv1d" in name and len(shape) == 3 and name.endswith("weight")
        writer.add_tensor(name, values.astype(np.float16) if is_kernel else values)
    path.parent.mkdir(parents=True, exist_ok=True)
    writer.write_header_to_file(path)
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def image_shapes(kind: str, n_embd: int) -> dict[str, tuple[int, ...]]:
    """Return the tensors of an encoder of images."""
    if kind in _ENCODERS:
        return _ENCODERS[kind].shapes(n_embd)
    n_patches = (IMAGE // PATCH) ** 2
    shapes: dict[str, tuple[int, ...]] = {"v.patch_embd.weight": (WIDTH, 3, PATCH, PATCH)}
    if kind in _GRIDS:
        shapes["v.patch_embd.weight.1"] = (WIDTH, 3, PATCH, PATCH)
    if kind == "qwen3vl_merger":
        shapes["v.patch_embd.bias"] = (WIDTH,)
    if kind == "gemma4v":
        shapes["v.position_embd.weight"] = (2, IMAGE, WIDTH)
    elif kind not in ("pixtral", "qwen2vl_merger", "qwen2.5vl_merger"):
        has_class = kind in ("mlp", "internvl")
        shapes["v.position_embd.weight"] = (n_patches + has_class, WIDTH)
        if has_class:
            shapes["v.class_embd"] = (WIDTH,)
    for layer in range(N_LAYERS):
        block = f"v.blk.{layer}"
        qkv = {"attn_q": 1, "attn_k": 1, "attn_v": 1} if kind != "qwen3vl_merger" else {"attn_qkv": 3}
        for part, n_parts in {**qkv, "attn_out": 1}.items():
            width = n_parts * WIDTH
            shapes |= {f"{block}.{part}.weight": (width, WIDTH), f"{block}.{part}.bias": (width,)}
        for part in ("ln1", "ln2"):
            shapes |= {f"{block}.{part}.weight": (WIDTH,), f"{block}.{part}.bias": (WIDTH,)}
        shapes |= {f"{block}.ffn_up.weight": (N_FF, WIDTH), f"{block}.ffn_up.bias": (N_FF,)}
        shapes |= {f"{block}.ffn_down.weight": (WIDTH, N_FF), f"{block}.ffn_down.bias": (WIDTH,)}
    if kind not in _GRIDS:
        shapes |= {"v.pre_ln.weight": (WIDTH,), "v.pre_ln.bias": (WIDTH,)}
    if kind == "mlp":
        shapes |= {"mm.0.weight": (n_embd, WIDTH), "mm.0.bias": (n_embd,)}
        shapes |= {"mm.2.weight": (n_embd, n_embd), "mm.2.bias": (n_embd,)}
    elif kind == "pixtral":
        shapes |= {"mm.1.weight": (n_embd, WIDTH), "mm.1.bias": (n_embd,), "mm.2.weight": (n_embd, n_embd)}
        shapes |= {"mm.2.bias": (n_embd,), "v.token_embd.img_break": (n_embd,)}
    elif kind == "gemma3":
        shapes |= {"mm.input_projection.weight": (WIDTH, n_embd), "mm.soft_emb_norm.weight": (WIDTH,)}
        shapes |= {"v.post_ln.weight": (WIDTH,), "v.post_ln.bias": (WIDTH,)}
    elif kind == "gemma4v":
        shapes["mm.input_projection.weight"] = (n_embd, WIDTH)
    elif kind in _GRIDS:
        shapes |= {"mm.0.weight": (N_FF, 4 * WIDTH), "mm.0.bias": (N_FF,)}
        shapes |= {"mm.2.weight": (n_embd, N_FF), "mm.2.bias": (n_embd,)}
        shapes |= {"v.post_ln.weight": (WIDTH,), "v.post_ln.bias": (WIDTH,)}
    elif kind == "idefics3":
        shapes |= {"mm.model.fc.weight": (n_embd, 4 * WIDTH)}
        shapes |= {"v.post_ln.weight": (WIDTH,), "v.post_ln.bias": (WIDTH,)}
    else:
        shapes |= {"mm.model.mlp.0.weight": (4 * WIDTH,), "mm.model.mlp.0.bias": (4 * WIDTH,)}
        shapes |= {"mm.model.mlp.1.weight": (n_embd, 4 * WIDTH), "mm.model.mlp.1.bias": (n_embd,)}
        shapes |= {"mm.model.mlp.3.weight": (n_embd, n_embd), "mm.model.mlp.3.bias": (n_embd,)}
    return shapes


def picture(seed: int = 1, *, size: tuple[int, int] = (40, 30), kind: str = "PNG") -> bytes:
    """Return a file of an image of random blocks."""
    blocks = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), np.uint8)
    found = io.BytesIO()
    Image.fromarray(blocks).resize(size, Image.Resampling.NEAREST).save(found, kind)
    return found.getvalue()
