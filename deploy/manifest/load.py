"""Reading a manifest: every mistake of a file in one go, one line each, with FILE:LINE and the nearest right name."""

from __future__ import annotations

import difflib
import json
from pathlib import Path
from typing import Any, TypeVar

import pydantic
from pydantic_core import ErrorDetails

from relayline.deploy.manifest.fields import child_type, field_names, places_of
from relayline.deploy.manifest.layout import StageError
from relayline.deploy.manifest.model import API_VERSION, AUTO_PROJECTOR, HUB_SCHEME, KIND, Manifest
from relayline.deploy.manifest.scalars import Part
from relayline.deploy.manifest.text import TEXT_BYTES_MAX, Complaint, Document, TextError, read_document
from relayline.wire.common.errors import UsageError
from relayline.wire.common.texts import counted
from relayline.wire.model_files.adapter_texts import placed
from relayline.wire.model_files.gguf_header import MAGIC
from relayline.wire.settings.table import KEPT_DIRECTORIES

Root = TypeVar("Root", bound=Part)

KINDS = (KIND, "Gateway")
COMPLAINTS_MAX = 20  # of one file that are shown; the rest is counted
VALUE_CHARS_MAX = 60  # of a wrong value that is shown


class ManifestError(UsageError):
    """A manifest that cannot be used. `lines` holds one complaint each, as FILE:LINE: problem."""

    def __init__(self, lines: list[str]) -> None:
        super().__init__("\n".join(lines))
        self.lines = lines


def manifest_bytes(path: Path) -> bytes:
    """Return what a manifest's file holds, and no more than tells that it is too long.

    Raises UsageError for what is no file, OSError for one that cannot be read.
    """
    if not path.exists():
        raise UsageError(f"{path}: no such file")
    if not path.is_file():  # a pipe would keep us waiting for ever
        raise UsageError(f"{path}: is not a file; a manifest is a .yaml file")
    with path.open("rb") as file:
        return file.read(TEXT_BYTES_MAX + 1)


def load_manifest(path: Path) -> Manifest:
    """Read a manifest; its relative paths resolve against the file's directory.

    Raises UsageError: where there is no such file, and ManifestError with every mistake of one; OSError if it cannot be
    read.
    """
    data = manifest_bytes(path)
    if data.startswith(MAGIC):
        raise ManifestError([f"{path}: is a model, not a manifest; `relayline init --model {path}` writes a manifest"])
    return _with_full_paths(parse_manifest(data, str(path)).with_directory(path.absolute().parent))


def _with_full_paths(manifest: Manifest) -> Manifest:
    """Return the manifest with files of its settings in full. Raises UsageError for one that no setting can name."""
    serving, found = manifest.serving, dict[str, str]()
    if serving.lora:
        try:
            found["lora"] = placed(serving.lora, manifest.resolve)
        except ValueError as error:
            raise UsageError(f"coordinator.lora: {error}") from None
    if serving.mmproj not in ("", AUTO_PROJECTOR):
        found["mmproj"] = str(manifest.resolve(serving.mmproj))
    if serving.draft_model and not serving.draft_model.startswith(HUB_SCHEME):
        found["draft_model"] = str(manifest.resolve(serving.draft_model))
    for name in KEPT_DIRECTORIES:
        if directory := getattr(serving, name):
            found[name] = str(manifest.resolve(directory))
    if not found:
        return manifest
    coordinator = manifest.spec.coordinator.model_copy(update=found)
    spec = manifest.spec.model_copy(update={"coordinator": coordinator})
    return manifest.model_copy(update={"spec": spec}).with_directory(manifest.directory)


def parse_manifest(data: bytes, name: str) -> Manifest:
    """Read a manifest from the bytes of a file called `name`. Raises ManifestError."""
    return parse_kind(data, name, Manifest, KIND)


def parse_kind(data: bytes, name: str, root: type[Root], kind: str) -> Root:
    """Read a manifest of one kind, whose type is `root`. Raises ManifestError."""
    if (quick := _read_as_json(data, root)) is not None:
        return quick
    try:
        document = read_document(data)
    except TextError as error:
        raise _refusal(list(error.complaints), name) from None
    try:
        # Through JSON, because pydantic's strict mode takes a list for a tuple only there.
        return root.model_validate_json(json.dumps(document.value), strict=True, by_alias=True, by_name=False)
    except pydantic.ValidationError as error:
        complaints = _identity_complaints(document, kind) or [
            _complaint(found, document, root) for found in error.errors() if not _is_echo(found)
        ]
        raise _refusal(complaints, name) from None


def _read_as_json(data: bytes, root: type[Root]) -> Root | None:
    """Return what JSON without a mistake says, such as what `up` hands on; PyYAML takes many times as long for it.

    None for everything else: only `read_document` knows the line of a mistake.
    """
    if not data.startswith(b"{") or len(data) > TEXT_BYTES_MAX:
        return None
    try:
        json.loads(data, object_pairs_hook=_without_twins)
        return root.model_validate_json(data, strict=True, by_alias=True, by_name=False)
    except (ValueError, RecursionError):
        return None


def _without_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key is given twice")
    return found


def _refusal(complaints: list[Complaint], name: str) -> ManifestError:
    shown = sorted(set(complaints))
    lines = [f"{name}:{complaint.line}: {complaint.message}" for complaint in shown[:COMPLAINTS_MAX]]
    if len(shown) > COMPLAINTS_MAX:
        lines.append(f"{name}: {counted(len(shown) - COMPLAINTS_MAX, 'more mistake')}")
    return ManifestError(lines)


def _identity_complaints(document: Document, kind: str) -> list[Complaint]:
    """Return the problem if this is not a relayline manifest at all: then further checks are pointless."""
    value = document.value
    if not isinstance(value, dict):
        return [Complaint(document.line_of(()), "a manifest is a mapping with apiVersion, kind, metadata and spec")]
    complaints = []
    for key, right in (("apiVersion", API_VERSION), ("kind", kind)):
        if key in value and value[key] != right:
            known = " and ".join(KINDS) if key == "kind" else right
            problem = f"{key} is {_shown(value[key])}; this relayline reads {known}"
            if key == "kind" and value[key] in KINDS:
                problem = (
                    f"kind is {value[key]}; this command reads {right}; `up`, `plan`, `doctor` and `render` take both"
                )
            complaints.append(Complaint(document.line_of((key,)), problem))
    return complaints


def _complaint(error: ErrorDetails, document: Document, root: type[Part]) -> Complaint:
    """Turn one of pydantic's findings into a line of ours."""
    path = _real_path(error["loc"], document.value, is_missing=error["type"] == "missing")
    cause = error.get("ctx", {}).get("error")
    if isinstance(cause, StageError):
        given = error["input"].get("stages", 2) if isinstance(error["input"], dict) else ()
        n_stages = given if isinstance(given, int) else len(given)
        is_spare = cause.index >= n_stages  # they are counted behind the stages
        at = ("spares", cause.index - n_stages) if is_spare else ("stages", cause.index)
        path = (*path, *at, cause.field)
    line, where = document.line_of(path), dotted(path)
    match error["type"]:
        case "extra_forbidden":
            return Complaint(line, _unknown_key(path, root))
        case "missing":
            return Complaint(line, f"{where} is missing")
        case "value_error":
            return Complaint(line, f"{where}: {cause}")
        case "string_pattern_mismatch":
            return Complaint(line, f"{where}: {_shown(error['input'])} is not {_expected(path)}")
        case "literal_error":
            if path[-1:] == ("layers",):
                given = _shown(error["input"])
                return Complaint(line, f"{where}: {given} is not auto, nor a range such as [0, 16] (16 not included)")
            return Complaint(line, _wrong_choice(where, error))
        case _:
            return Complaint(line, f"{where}: {_wrong_value(error)}")


# What pydantic's error types say to a person; {0} is the violated limit.
_WRONG_VALUES = {
    "int_type": "must be a whole number",
    "int_from_float": "must be a whole number",
    "int_parsing_size": "must be a smaller whole number",
    "float_type": "must be a number",
    "finite_number": "must be a finite number",
    "bool_type": "must be true or false",
    "string_type": "must be text; put it in quotes",
    "dict_type": "must be a mapping",
    "model_type": "must be a mapping",
    "model_attributes_type": "must be a mapping",
    "tuple_type": "must be a list",
    "greater_than_equal": "must be at least {0}",
    "greater_than": "must be more than {0}",
    "less_than_equal": "must be at most {0}",
    "less_than": "must be less than {0}",
    "too_short": "must have {0} or more entries",
    "too_long": "must have no more than {0} entries",
    "string_too_short": "must have {0} or more characters",
    "string_too_long": "must have no more than {0} characters",
}


def _wrong_value(error: ErrorDetails) -> str:
    if error["input"] is None:
        return "is empty; give it a value or leave the key out"
    limits = error.get("ctx", {})
    limit = next((limits[key] for key in ("ge", "gt", "le", "lt", "min_length", "max_length") if key in limits), "")
    problem = _WRONG_VALUES.get(error["type"], error["msg"]).format(limit)
    example = ", such as {path: model.gguf}" if error["loc"][-1] == "model" and problem.endswith("a mapping") else ""
    return f"{problem}{example}, not {_shown(error['input'])}"


def _is_echo(error: ErrorDetails) -> bool:
    """Return whether this only reports that a list lacks entries, which were refused for their own mistakes."""
    return error["type"] == "too_short" and len(error["input"]) >= error.get("ctx", {}).get("min_length", 0)


def _real_path(loc: tuple[str | int, ...], value: Any, *, is_missing: bool) -> tuple[str | int, ...]:
    """Return pydantic's location without the tags of unions, which do not occur in the text.

    Keys that are missing from the text stay only as the last part.
    """
    path: list[str | int] = []
    for place, part in enumerate(loc):
        children = value if isinstance(value, dict) else dict(enumerate(value)) if isinstance(value, list) else {}
        if part in children:
            path.append(part)
            value = children[part]
        elif is_missing and place == len(loc) - 1:
            path.append(part)
    return tuple(path)


def _unknown_key(path: tuple[str | int, ...], root: type[Part]) -> str:
    key = str(path[-1])
    known = field_names(child_type(path[:-1], root))
    parent = dotted(path[:-1])
    problem = f"unknown key {_shown(key)} in {parent}" if parent else f"unknown key {_shown(key)}"
    near = _nearest(key, known)
    if near is not None:
        return f"{problem}; did you mean {near}?"
    elsewhere = places_of(key, root)
    if elsewhere:
        return f"{problem}; it belongs to {' or '.join(elsewhere)}"
    return f"{problem}; known keys are {', '.join(known)}"


def _nearest(word: str, known: list[str]) -> str | None:
    """Return the known word that was probably meant; snake_case and upper case count as no difference."""
    flat = {name.lower(): name for name in known}
    found = difflib.get_close_matches(word.lower().replace("_", "").replace("-", ""), flat, n=1, cutoff=0.6)
    return flat[found[0]] if found else None


def _wrong_choice(where: str, error: ErrorDetails) -> str:
    expected = error.get("ctx", {}).get("expected", "").replace("'", "")
    message = f"{where}: {_shown(error['input'])} is not {expected}"
    near = _nearest(str(error["input"]), expected.replace(" or ", ", ").split(", "))
    return f"{message}; did you mean {near}?" if near else message


def _expected(path: tuple[str | int, ...]) -> str:
    """Describe a pattern in words."""
    match path[-1] if path else "":
        case "hf":
            return "hf://org/repo/file.gguf, with @revision if not the default branch"
        case "sha256":
            return "64 lower-case hexadecimal digits"
        case "host":
            return "a host name or an IP address without a port"
        case "gpuResource":
            return "a resource name such as nvidia.com/gpu"
        case "name" | "namespace" | "className" | "tls" | "token" | "apiKeys" | "hfToken":
            return "a name of lower-case letters, digits and inner dashes, at most 63 characters"
    if "labels" in path:
        return "a label: letters, digits, and inner dashes, dots and underscores, at most 63 characters"
    return "one line of text"


def dotted(path: tuple[str | int, ...]) -> str:
    """Return a path as people write it: spec.stages[1].name."""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            shown = part if part.isidentifier() else _shown(part)
            text += f".{shown}" if text else shown
    return text


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= VALUE_CHARS_MAX else text[: VALUE_CHARS_MAX - 3] + "..."
