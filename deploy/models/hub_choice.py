"""Chooses the file of a repository that ORG/NAME[:QUANT] means. Pure: names in, a name out."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from relayline.wire.common.errors import ModelFileError

SHARD = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
USUAL = "Q4_K_M"  # the choice without a quantisation: half a byte a weight, and good enough to be the field's usual one
_SUFFIX = re.compile(r"(-\d{5}-of-\d{5})?\.gguf$", re.IGNORECASE)
_QUANT = re.compile(
    r"(?:^|[-._/])((?:UD-)?(?:(?:I?Q|TQ)\d(?:_[A-Z0-9]+)*|BF16|F16|F32|FP16|MXFP4(?:_MOE)?))(?=$|[-._/])", re.IGNORECASE
)
_PROJECTOR = re.compile(r"(^|[-._])mmproj([-._].*)?\.gguf$", re.IGNORECASE)
_PROJECTOR_QUANTS = ("F16", "BF16", "F32", "Q8_0")  # of projectors, the first that exists; most come in f16
# Files next to models that end in .gguf too.
_PARTS = re.compile(r"(^|[-._/])(mmproj|imatrix|lora|adapter)([-._/]|$)", re.IGNORECASE)


def models_among(names: Iterable[str]) -> list[str]:
    """Return the models among files: of a sharded set its first file, and no projectors, adapters or matrices."""
    found = []
    for name in sorted(names):
        shard = SHARD.fullmatch(name)
        is_first = shard is None or int(shard[2]) == 1
        if name.lower().endswith(".gguf") and is_first and not _PARTS.search(name.rpartition("/")[2]):
            found.append(name)
    return found


def projector_among(names: Iterable[str]) -> str:
    """Return the projector that images need among files: of several the one in f16, else the first of the best known.

    Empty if there is none.
    """
    found = [name for name in sorted(names) if _PROJECTOR.search(name.rpartition("/")[2])]
    ranks = {quant: rank for rank, quant in enumerate(_PROJECTOR_QUANTS)}
    return min(found, key=lambda name: ranks.get(quant_of(name), len(ranks)), default="")


def quant_of(name: str) -> str:
    """Return the quantisation that a file's name states, in upper case; empty if it states none."""
    stem = _SUFFIX.sub("", name)
    for part in (stem.rpartition("/")[2], stem.rpartition("/")[0]):  # some keep each in a folder of its name
        found = _QUANT.findall(part)
        if found:
            return str(found[-1]).upper()
    return ""


def chosen_file(names: Sequence[str], quant: str, where: str) -> str:
    """Return the file of a repository for a quantisation; without one the usual one, or the only one.

    `where` is the user's name for the repository. Raises ModelFileError with a list of the files.
    """
    models = models_among(names)
    if not models:
        raise ModelFileError(_why_none(names, where))
    by_quant: dict[str, list[str]] = {}
    for name in models:
        by_quant.setdefault(quant_of(name), []).append(name)
    if not quant and len(models) == 1:
        return models[0]
    found = by_quant.get((quant or USUAL).upper(), [])
    if len(found) == 1:
        return found[0]
    if found:
        raise ModelFileError(f"{where}: several files are {quant or USUAL}; name one as {where}/FILE: {_listed(found)}")
    known = ", ".join(sorted(name for name in by_quant if name))
    asked = f"it has no {quant}" if quant else f"it has no {USUAL}, the default"
    if not known:
        raise ModelFileError(f"{where}: {asked}; name a file as {where}/FILE: {_listed(models)}")
    raise ModelFileError(f"{where}: {asked}; name one of {known} after a colon")


def _why_none(names: Sequence[str], where: str) -> str:
    if any(name.endswith(".safetensors") for name in names):
        return (
            f"{where}: it holds safetensors and no GGUF; take a repository with GGUF files (often the same name with "
            f"-GGUF), or convert it with llama.cpp's convert_hf_to_gguf.py"
        )
    if any(name.lower().endswith(".gguf") for name in names):
        return f"{where}: it holds only parts of models (a projector, adapter or matrix); name the model's repository"
    return f"{where}: it holds no .gguf file"


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(names[:8])
    return f"{shown} and {len(names) - 8} more" if len(names) > 8 else shown
