"""Projectors, the files that turn images into rows of a model: those that are served, and with which models.

A stage reads a row of an image like a looked-up token: at its own position or, where a model's positions have
several axes, at its place in the image's grid. It sees the rows before it alone or, where llama.cpp says so of the
projector, all rows of its image. So only projectors whose rows llama.cpp treats in this way are served, with models
whose rows depend on nothing else.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from relayline.coordinator.model.pipeline_file import PipelineFile
from relayline.wire.common.errors import UsageError
from relayline.wire.model_files.gguf_header import GgufFile, read_header
from relayline.wire.settings.setting import entry_of
from relayline.wire.settings.table import EngineSettings

ARCHITECTURES = (
    "llama", "mistral3", "qwen2", "qwen2moe", "qwen3", "qwen3moe", "phi3", "stablelm", "smollm3", "internlm2",
)  # fmt: skip


class Kind(NamedTuple):
    """A kind of projector that is served."""

    tensor: str  # that makes its rows
    axis: int = 1  # which of the tensor's sizes is the width of a row, as a GGUF header has them
    architectures: tuple[str, ...] = ARCHITECTURES  # of the models that it is served with
    max_tokens: int = 0  # of an image, unless a setting says otherwise; 0: as the projector says


# By clip.projector_type.
PROJECTORS = {
    "mlp": Kind("mm.2.weight"),  # LLaVA 1.5, 1.6
    "pixtral": Kind("mm.2.weight"),
    "idefics3": Kind("mm.model.fc.weight"),  # SmolVLM
    "internvl": Kind("mm.model.mlp.3.weight"),
    "gemma3": Kind("mm.input_projection.weight", 0, ("gemma3",)),  # rows of one image see each other
    # They do in layers with a window alone, as a stage's llama.cpp knows of the model.
    "gemma4v": Kind("mm.input_projection.weight", 1, ("gemma4",), entry_of(EngineSettings, "max_rows").default),
    # Rows have places in a grid:
    "qwen2vl_merger": Kind("mm.2.weight", architectures=("qwen2vl",)),
    "qwen2.5vl_merger": Kind("mm.2.weight", architectures=("qwen2vl",)),
    "qwen3vl_merger": Kind("mm.2.weight", architectures=("qwen35", "qwen35moe")),  # Qwen3.5, which has no deepstack
}
_OTHER_AXES = "no stage was tried with the places of its images"
_NOT_TRIED = "no stage was tried with its images"
_DEEPSTACK = "its images add to the rows of several layers (deepstack), and stages take one row a position"
REFUSED = {
    "qwen2.5o": _OTHER_AXES,
    "granite4_vision": _DEEPSTACK,
    "glm4v": _OTHER_AXES,
    "gemma4uv": _NOT_TRIED,
}
_DEEPSTACK_TENSORS = "v.deepstack."
_OTHER_MLP = "mm.3.weight"  # llama.cpp then takes "mlp" for another projector


def check_projector(path: Path, pipeline: PipelineFile) -> str:
    """Return a projector's kind. Raises UsageError, which says why, for a file that is not served with the pipeline;
    ModelFileError if it is not a GGUF file.
    """
    kind = check_belongs(path, pipeline.architecture, pipeline.n_embd)
    if pipeline.stages[0].row_width not in (0, pipeline.n_embd):
        text = "each layer of this model takes inputs of its own for each token, which rows of images do not have"
        raise UsageError(f"--mmproj {path}: {text}")
    return kind


def check_belongs(path: Path, architecture: str, n_embd: int) -> str:
    """Return a projector's kind. Raises as `check_projector`, but for models with inputs of each layer.

    `architecture` and `n_embd`, the values of a row, are the model's.
    """
    kind, width = read_projector(path)
    served = PROJECTORS[kind].architectures
    if architecture not in served:
        text = f"models of the architecture {architecture} are not served with images by a projector of the kind"
        raise UsageError(f"--mmproj {path}: {text} {kind}; those of {', '.join(served)} are")
    if width != n_embd:
        text = f"its rows have {width} values, but the model's have {n_embd}: it belongs to another model"
        raise UsageError(f"--mmproj {path}: {text}")
    return kind


def read_projector(path: Path) -> tuple[str, int]:
    """Return a projector's kind, and the width of its rows. Raises as `check_projector`, whatever the model is."""
    if not path.is_file():
        raise UsageError(f"--mmproj {path}: no such file")
    header = read_header(path)
    kind = _kind(path, header)
    if any(tensor.name.startswith(_DEEPSTACK_TENSORS) for tensor in header.tensors):
        raise UsageError(
            f"--mmproj {path}: projectors of the kind {kind[:40]} with deepstack are not served: {_DEEPSTACK}"
        )
    if kind not in PROJECTORS or (kind == "mlp" and _width_of(header, Kind(_OTHER_MLP))):
        why = REFUSED.get(kind, f"projectors of the kinds {', '.join(PROJECTORS)} are")
        raise UsageError(f"--mmproj {path}: projectors of the kind {kind[:40]} are not served: {why}")
    return kind, _width_of(header, PROJECTORS[kind])


def _kind(path: Path, header: GgufFile) -> str:
    architecture = header.value("general.architecture")
    if architecture != "clip":
        text = f"holds a model of the architecture {str(architecture)[:40]}, not a projector"
        raise UsageError(f"--mmproj {path}: {text}; give the file that the model's maker calls mmproj")
    if header.value("clip.has_vision_encoder") is not True:
        raise UsageError(f"--mmproj {path}: it has no encoder for images")
    return str(header.value("clip.projector_type") or header.value("clip.vision.projector_type") or "mlp")


def _width_of(header: GgufFile, kind: Kind) -> int:
    dims = next((tensor.dims for tensor in header.tensors if tensor.name == kind.tensor), ())
    return dims[kind.axis] if len(dims) > 1 else 0
