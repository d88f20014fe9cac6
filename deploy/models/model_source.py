"""The source of a model: a path on this machine, or a repository of the Hugging Face hub.

On this machine it is a file, any shard of a set, a directory with one model, or a pattern that matches one model.
On the hub it is `hf://ORG/REPO/FILE.gguf[@REVISION]`, or ORG/REPO[:QUANT][@REVISION], with or without `hf://`: then the
file is chosen by its quantisation (deploy.models.hub_choice).

Files of the hub are loaded by huggingface_hub into its own cache, so HF_HOME, HF_TOKEN, HF_HUB_OFFLINE and HF_ENDPOINT
have their usual meaning, and an interrupted download is resumed. Of a sharded set any shard may be named; all are
loaded.
"""

from __future__ import annotations

import glob
import os
import re
from pathlib import Path

from relayline.coordinator.model.pipeline_file import PIPELINE_NAME
from relayline.deploy.manifest.model import AUTO_PROJECTOR, HUB_SCHEME
from relayline.deploy.models.hub_choice import SHARD, models_among, projector_among
from relayline.deploy.models.hub_files import load_file, names_on_hub, with_file
from relayline.deploy.models.hub_reference import HubFile, is_hub_name, parse_reference
from relayline.wire.common.errors import ModelFileError, UsageError
from relayline.wire.common.file_hash import sha256_of
from relayline.wire.common.places import expanded

MODELS_SHOWN = 8  # of a directory that holds several
_SHA256 = re.compile(r"[0-9a-f]{64}")


def is_on_hub(reference: str) -> bool:
    """Return whether a reference means a model of the hub, and nothing on this machine."""
    return reference.startswith(HUB_SCHEME) or (not os.path.lexists(reference) and is_hub_name(reference))


def check_here(reference: str) -> None:
    """Raise UsageError where a reference means a model on this machine, and there is none."""
    if not is_on_hub(reference):
        local_model(reference)


def is_pattern(text: str) -> bool:
    """Return whether a text is a pattern of files, as *.gguf."""
    return glob.has_magic(text)


def resolve_model(reference: str, sha256: str = "") -> Path:
    """Return the path of a model's only or first file, loaded from the hub if that is where it is.

    sha256: of that file, in hex, checked if given; a file once checked is not read again while it looks the same. Of a
    sharded set it would cover one shard only, so there it is refused.

    Raises UsageError (a reference that is none, nothing there, a checksum that cannot be one), ModelFileError (no
    access, no network, another content).
    """
    check_sha256(sha256)
    path = _from_hub(parse_reference(reference)) if is_on_hub(reference) else local_model(reference)
    if sha256:
        _check(path, sha256.lower())
    return path


def resolve_projector(reference: str, model: Path) -> Path:
    """Return the projector (mmproj*.gguf) of a model: from its repository, or for a local model from its directory.

    `model` is the path that `resolve_model` returned for the reference. Raises ModelFileError if there is none.
    """
    if is_on_hub(reference):
        source = parse_reference(reference)
        if not (name := projector_among(names_on_hub(source))):
            raise ModelFileError(f"{HUB_SCHEME}{source.repo}: it holds no projector (mmproj*.gguf); name one as a file")
        return load_file(source, name, source.revision)
    folders = [model.parent]
    if "snapshots" in model.parts[:-2]:  # of the hub's cache: a repository may keep models in folders
        folders.append(Path(*model.parts[: model.parts.index("snapshots") + 2]))
    for folder in folders:
        if name := projector_among(path.name for path in folder.glob("*.gguf")):
            return folder / name
    raise ModelFileError(f"{model.parent}: no projector (mmproj*.gguf) next to the model; name one with --mmproj")


def projector_here(named: str, model: Path | None) -> Path | None:
    """Return the projector that a setting names: a file, or `auto` for the one next to the model.

    None where it is not on this machine; nothing is downloaded.
    """
    if named != AUTO_PROJECTOR:
        path = expanded(named)
        return path if path.is_file() else None
    if model is None or not model.exists():
        return None
    try:
        return resolve_projector(str(model), model)
    except ModelFileError:
        return None


def projector_of(reference: str) -> str:
    """Return the name of the projector in a model's repository on the hub; empty without one, and for a path."""
    if not is_on_hub(reference):
        return ""
    return projector_among(names_on_hub(parse_reference(reference)))


def local_model(named: str) -> Path:
    """Return the only or first file of a model here: of a file, a shard, a directory or a pattern.

    Raises UsageError if there is none, or more than one.
    """
    path = Path(named)
    if path.is_dir():
        if (path / PIPELINE_NAME).is_file():
            raise UsageError(f"{path}: holds a split of a model; give the whole model, `up` keeps splits by itself")
        return _only_model(sorted(path.glob("*.gguf")), f"{path}", sorted(path.glob("*.safetensors")))
    if not path.exists() and is_pattern(named):
        return _only_model(sorted(map(Path, glob.glob(named))), named, [])
    if not path.exists():
        if named.startswith(("http://", "https://")):
            raise UsageError(f"{named}: URLs are not loaded; download the file, or name hf://ORG/REPO/FILE.gguf")
        hint = "" if path.suffix == ".gguf" else "; give a .gguf file, a directory of shards or ORG/NAME[:QUANT]"
        raise UsageError(f"{named}: no such file{hint}")
    if not path.is_file():
        raise UsageError(f"{path}: is not a file")
    shard = SHARD.fullmatch(path.name)
    if shard is None or int(shard[2]) == 1:
        return path
    return path.with_name(f"{shard[1]}-00001-of-{shard[3]}.gguf")


def _only_model(files: list[Path], where: str, others: list[Path]) -> Path:
    """Return the first file of the only model among files. Raises UsageError."""
    found = models_among([str(file) for file in files])
    if len(found) == 1:
        return Path(found[0])
    if found:
        names = ", ".join(Path(file).name for file in found[:MODELS_SHOWN])
        more = f" and {len(found) - MODELS_SHOWN} more" if len(found) > MODELS_SHOWN else ""
        raise UsageError(f"{where}: holds {len(found)} models; name one of {names}{more}")
    if others:
        raise UsageError(
            f"{where}: holds safetensors files; take a GGUF of the model, or make one with llama.cpp's "
            f"convert_hf_to_gguf.py"
        )
    raise UsageError(f"{where}: has no .gguf file of a model")


def check_sha256(sha256: str) -> None:
    """Raise UsageError for a checksum that cannot be one; an empty text is none."""
    if sha256 and not _SHA256.fullmatch(sha256.lower()):
        raise UsageError(f"sha256 {sha256!r} is not 64 hexadecimal digits")


def _check(path: Path, sha256: str) -> None:
    named = SHARD.fullmatch(path.name)
    if named is not None and int(named[3]) > 1:
        raise UsageError(f"{path.name} is one of {int(named[3])} shards; a sha256 can be given for a single file only")
    try:
        found = sha256_of(path)
    except OSError as error:
        raise ModelFileError(f"{path}: cannot be read: {error.strerror}") from error
    if found != sha256:
        raise ModelFileError(f"{path}: its sha256 is {found}, not {sha256}; it is another file, or damaged")


def _from_hub(model: HubFile) -> Path:
    model = with_file(model)
    files = model.shards()
    first = load_file(model, files[0], model.revision)
    # A branch may move while a large set loads; the rest comes from the commit that the first shard came from.
    commit = _commit_of(first) or model.revision
    for file in files[1:]:
        load_file(model, file, commit)
    return first


def _commit_of(path: Path) -> str:
    """Return the commit in a path of the hub's cache (.../snapshots/COMMIT/FILE); empty if there is none."""
    parts = path.parts
    return parts[parts.index("snapshots") + 1] if "snapshots" in parts[:-2] else ""
