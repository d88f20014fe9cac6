"""Projectors, the files that turn images or audio into rows of a model: those that are served, and with which models.

A stage reads a row of these like a looked-up token: at its own position or, for images where a model's positions have
several axes, at its place in the image's grid. It sees the rows before it alone or, where llama.cpp says so of the
projector, all rows of its image. So only projectors whose rows llama.cpp treats in this way are served, with models
whose layers need no token besides, or take the padding's values (coordinator/model/sidebands.py).
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from relayline.coordinator.model.family_rules import ROPE_SECTIONS, is_multi_axis
from relayline.coordinator.model.pipeline_file import PipelineFile
from relayline.wire.common.bounds import AUDIO_SECONDS_MAX
from relayline.wire.common.errors import UsageError
from relayline.wire.model_files.gguf_header import GgufFile, read_header
from relayline.wire.settings.setting import entry_of
from relayline.wire.settings.table import EngineSettings

ARCHITECTURES = (
    "llama", "mistral3", "qwen2", "qwen2moe", "qwen3", "qwen3moe", "phi3", "stablelm", "smollm3", "internlm2",
)  # fmt: skip

_NEMOTRON = ("nemotron_h", "nemotron_h_moe")
_ONE_STEP = entry_of(EngineSettings, "max_rows").default


class Kind(NamedTuple):
    """A kind of projector that is served."""

    tensor: str  # that makes its rows
    axis: int = 1  # which of the tensor's sizes is the width of a row, as a GGUF header has them
    architectures: tuple[str, ...] = ARCHITECTURES  # of the models that it is served with
    max_tokens: int = 0  # of an image that is one step, unless a setting says otherwise; 0: as the projector says
    needs_axes: bool = False  # llama.cpp aborts at its rows where the model's file says nothing of several axes
    causal_widths: tuple[int, ...] = ()  # of rows of models in which those of an image do not see each other
    max_seconds: int = AUDIO_SECONDS_MAX  # of a sound; less where it is encoded in one piece, in much memory
    min_samples: int = 2  # of a sound, at the encoder's rate; of fewer, libmtmd makes nothing, or ends the process


# Of images, by clip.projector_type.
PROJECTORS = {
    "mlp": Kind("mm.2.weight"),  # LLaVA 1.5, 1.6
    "pixtral": Kind("mm.2.weight"),
    "idefics3": Kind("mm.model.fc.weight"),  # SmolVLM
    "internvl": Kind("mm.model.mlp.3.weight"),
    "gemma3": Kind("mm.input_projection.weight", 0, ("gemma3",)),  # rows of one image see each other
    # They do in layers with a window alone, as a stage's llama.cpp knows of the model, and not in E2B and E4B.
    "gemma4v": Kind("mm.input_projection.weight", 1, ("gemma4",), _ONE_STEP, causal_widths=(1_536, 2_560)),
    "gemma4uv": Kind("mm.input_projection.weight", 1, ("gemma4",), _ONE_STEP),  # Gemma 4 Unified
    "nemotron_v2_vl": Kind("mm.model.mlp.3.weight", architectures=_NEMOTRON),
    # Rows have places in a grid:
    "qwen2vl_merger": Kind("mm.2.weight", architectures=("qwen2vl",)),
    "qwen2.5vl_merger": Kind("mm.2.weight", architectures=("qwen2vl",)),
    "qwen3vl_merger": Kind("mm.2.weight", architectures=("qwen3vl", "qwen3vlmoe", "qwen35", "qwen35moe")),
    "glm4v": Kind("mm.down.weight", architectures=("glm4moe", "glm4"), needs_axes=True),
    "ling3vl": Kind("mm.2.weight", architectures=("bailingmoe3",)),
    "paddleocr": Kind("mm.2.weight", architectures=("paddleocr",)),
    "minicpmv4_6": Kind("mm.down.weight", architectures=("qwen35",)),  # in a grid if it is one tile
    # Rows have places like tokens:
    "minimax_m3": Kind("mm.merger.fc2.weight", architectures=("minimax-m3",)),
    "mimovl": Kind("mm.2.weight", architectures=("mimo2",)),  # MiMo-V2.5
    "glm5v": Kind("mm.down.weight", architectures=("glm5-next",)),
    "muse-glimmer": Kind("mm.2.weight", architectures=("muse-glimmer",)),
    "dots_ocr": Kind("mm.2.weight", architectures=("qwen2",)),
    "youtuvl": Kind("mm.2.weight", architectures=("deepseek2",)),
    "kimik25": Kind("mm.2.weight", architectures=("deepseek2", "glm-dsa")),  # Kimi K2.5, K2.6; GLM-5.2-Vision
    "kimivl": Kind("mm.2.weight", architectures=("deepseek2",)),
    "llama4": Kind("mm.model.fc.weight", architectures=("llama4",)),
    "step3vl": Kind("mm.model.fc.weight", architectures=("qwen3", "step35")),  # Step3-VL 10B; Step 3.7 Flash
    "lfm2": Kind("mm.2.weight", architectures=("lfm2", "lfm2moe")),
    "resampler": Kind("resampler.proj.weight", 0, ("llama", "qwen2", "qwen3")),  # MiniCPM-V before 4.6
    "lightonocr": Kind("mm.2.weight", architectures=("qwen3",)),
    "janus_pro": Kind("mm.1.weight", architectures=("llama",)),
    "phi4": Kind("mm.2.weight", architectures=("phi3",)),  # Phi-4-reasoning-vision
}
# Of audio. Where positions have several axes, its rows have the same one on each, as tokens have.
AUDIO = {
    "ultravox": Kind("mm.a.mlp.2.weight", architectures=(*ARCHITECTURES, "gemma3")),
    "voxtral": Kind("mm.a.mlp.2.weight"),
    "musicflamingo": Kind("mm.a.mlp.2.weight"),
    "glma": Kind("mm.a.mlp.2.weight"),  # GLM-ASR
    "qwen2a": Kind("mm.a.fc.weight", architectures=(*ARCHITECTURES, "qwen2vl")),  # Qwen2-Audio
    "gemma4a": Kind("mm.a.input_projection.weight", architectures=("gemma4",)),  # Gemma 4 E2B, E4B
    "gemma4ua": Kind("mm.a.input_projection.weight", architectures=("gemma4",)),  # Gemma 4 Unified
    # LFM2-Audio; at 327 seconds llama.cpp ends the process.
    "lfm2a": Kind("mm.a.mlp.3.weight", architectures=("lfm2",), max_seconds=180, min_samples=320),
    "parakeet": Kind("mm.a.mlp.2.weight", architectures=_NEMOTRON, max_seconds=180, min_samples=480),
    "mimo_audio": Kind("mm.a.mlp.2.weight", architectures=("mimo2",), max_seconds=60),  # MiMo-V2.5
    "granite_speech": Kind("a.proj_linear.weight", architectures=("granite",), min_samples=160),
    "meralion": Kind("mm.a.mlp.3.weight", architectures=("gemma2",)),  # MERaLiON 2
    "qwen3a": Kind("mm.a.mlp.2.weight", architectures=("qwen3vl", "qwen3vlmoe", "qwen3", "qwen2vl")),  # Qwen3-ASR
}
# One name of both encoders of a file, as llama.cpp reads it: that of images, and that of audio.
_PAIRS = {"qwen2.5o": ("qwen2.5vl_merger", "qwen2a")}  # Qwen2.5-Omni
_AUDIO_NOT_TRIED = "no stage was tried with its audio"
_DEEPSTACK = "no stage was tried with layers that take features of its images (deepstack) where it wants them"
REFUSED = {
    "granite4_vision": _DEEPSTACK,
    "deepseek4v": "its model chooses experts otherwise for rows of images, and stages take all rows for tokens'",
    "cogvlm": "its model has other weights for rows of images, and stages take all rows for tokens'",
    "hunyuanvl": "places of its images' rows depend on how many images come before, which stages are not told",
    "exaone4_5": "llama.cpp gives its model's layers sliding windows only in a file of 64 layers",
    "dots3note_v": "its model's architecture, dots3note, is not served",
    "dots3note_a": _AUDIO_NOT_TRIED,
}
_DEEPSTACK_TENSOR = re.compile(r"v\.deepstack\.\d+\.fc1\.weight")  # a block whose features are for a layer of the model
_OLD_SPLIT = ", or an earlier version split this one for text alone; then split it again"
# llama_model_rope_type asks the file of these for its sections.
_AXES_BY_FILE = ("glm4", "glm4moe", "bailingmoe3", "hunyuan_vl")
_OTHER_MLP = "mm.3.weight"  # llama.cpp then takes "mlp" for another projector


class ProjectorFile(NamedTuple):
    """What a projector's file encodes."""

    images: str  # its kind, by PROJECTORS; empty: it has no encoder for images
    audio: str  # its kind, by AUDIO; empty: it has no encoder for audio, or one that is left out
    width: int  # values of a row
    deepstack_layers: int = 0  # of the model that take features of an image, as wide as a row, behind each row
    left_out: str = ""  # why its audio is, for a person; empty: it is not

    @property
    def kinds(self) -> dict[str, Kind]:
        """Its kinds by their names."""
        found = {self.images: PROJECTORS.get(self.images), self.audio: AUDIO.get(self.audio)}
        return {name: kind for name, kind in found.items() if kind is not None}

    @property
    def what(self) -> str:
        """What chats may hold with it, for a person."""
        return " and ".join(name for name, kind in (("images", self.images), ("audio", self.audio)) if kind)

    @property
    def max_tokens(self) -> int:
        """Most tokens of an image, unless a setting says otherwise; 0: as the projector says."""
        return PROJECTORS[self.images].max_tokens if self.images and not self.are_causal else 0

    @property
    def are_causal(self) -> bool:
        """Whether rows of an image do not see each other, though those of its kind do in other models.

        mtmd_decode_use_non_causal says so by the model's width, which a vocabulary alone does not have.
        """
        return bool(self.images) and self.width in PROJECTORS[self.images].causal_widths


def has_axes(header: GgufFile) -> bool:
    """Whether the file of a model, or its tokenizer's, lets llama.cpp give its positions several axes.

    Of other architectures all files do, or none.
    """
    architecture = header.value("general.architecture")
    return architecture in _AXES_BY_FILE and is_multi_axis(header.value(f"{architecture}.{ROPE_SECTIONS}"))


def check_projector(path: Path, pipeline: PipelineFile, *, axes: bool = True) -> ProjectorFile:
    """Return what a projector encodes. Raises UsageError, which says why, for a file that is not served with the
    pipeline; ModelFileError if it is not a GGUF file. `axes`: see `has_axes`.
    """
    width, n_layers = pipeline.n_embd, pipeline.deepstack_layers
    return check_belongs(path, pipeline.architecture, width, n_layers, axes=axes, is_split=True)


def check_belongs(
    path: Path, architecture: str, n_embd: int, deepstack_layers: int, *, axes: bool = True, is_split: bool = False
) -> ProjectorFile:
    """Return what a projector encodes. Raises as `check_projector`.

    `architecture`, `n_embd`, the values of a row, and `deepstack_layers` are the model's, and so are its `axes`.
    `is_split`: they are those of a split, which an earlier version may have made.
    """
    found = read_projector(path)
    for name, kind in found.kinds.items():
        if architecture not in kind.architectures:
            what = "images" if name == found.images else "audio"
            text = f"models of the architecture {architecture} are not served with {what} by a projector of the kind"
            raise _refusal(path, f"{text} {name}; those of {', '.join(kind.architectures)} are")
        if kind.needs_axes and not axes:
            text = "this model's positions have one axis: it is one for text alone"
            raise _refusal(path, f"{text}, and projectors of the kind {name} need several axes")
    if found.width != n_embd:
        text = f"its rows have {found.width} values, but the model's have {n_embd}: it belongs to another model"
        raise _refusal(path, text)
    if found.deepstack_layers != deepstack_layers:
        text = f"it has features of images for {found.deepstack_layers} layers, but the model takes {deepstack_layers}"
        reason = "it belongs to another model" + (_OLD_SPLIT if is_split and not deepstack_layers else "")
        raise _refusal(path, f"{text}: {reason}")
    return found


def read_projector(path: Path) -> ProjectorFile:
    """Return what a projector encodes. Raises as `check_projector`, whatever the model is."""
    if not path.exists():
        raise _refusal(path, "no such file")
    header = read_header(path)
    images, audio = _kinds(path, header)
    is_other = images == "mlp" and _width_of(header, Kind(_OTHER_MLP)) > 0
    left_out = ""
    for kind, served, may_miss in ((images, PROJECTORS, False), (audio, AUDIO, bool(images))):
        if kind and (kind not in served or is_other):
            why = REFUSED.get(kind, f"projectors of the kinds {', '.join(served)} are")
            text = f"projectors of the kind {kind[:40]} are not served: {why}"
            if not may_miss:
                raise _refusal(path, text)
            left_out = text
    n_deepstack = sum(_DEEPSTACK_TENSOR.fullmatch(tensor.name) is not None for tensor in header.tensors)
    found = ProjectorFile(images, "" if left_out else audio, 0, n_deepstack, left_out)
    widths = [_width_of(header, kind) for kind in found.kinds.values()]
    return found._replace(width=widths[0] if len(set(widths)) == 1 else 0)


def _kinds(path: Path, header: GgufFile) -> tuple[str, str]:
    """Return the kinds of a file's encoders of images and of audio; empty for one that it does not have."""
    architecture = header.value("general.architecture")
    if architecture != "clip":
        text = f"holds a model of the architecture {str(architecture)[:40]}, not a projector"
        raise _refusal(path, f"{text}; give the file that the model's maker calls mmproj")
    has_images = header.value("clip.has_vision_encoder") is True
    has_audio = header.value("clip.has_audio_encoder") is True
    if not has_images and not has_audio:
        raise _refusal(path, "it has no encoder for images or audio")
    common = str(header.value("clip.projector_type") or "")
    images, audio = _PAIRS.get(common, (common, common))
    images = images or str(header.value("clip.vision.projector_type") or "mlp")
    audio = audio or str(header.value("clip.audio.projector_type") or "of no name")
    return images if has_images else "", audio if has_audio else ""


def _refusal(path: Path, why: str) -> UsageError:
    return UsageError(f"--mmproj {path}: {why}")


def _width_of(header: GgufFile, kind: Kind) -> int:
    dims = next((tensor.dims for tensor in header.tensors if tensor.name == kind.tensor), ())
    return dims[kind.axis] if len(dims) > 1 else 0
