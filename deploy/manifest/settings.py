"""The manifest's keys that are settings: made from the table of settings, for the models of `model` and `stage`."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, Tag

from relayline.deploy.manifest.scalars import Text
from relayline.wire.settings.setting import STAGES, Setting, Settings, Table, entries, entry_of
from relayline.wire.settings.sizes import CHARS_MAX, SIZE, read_size
from relayline.wire.settings.table import TABLES, EngineSettings

LANES, TOKENS = (entry_of(EngineSettings, name) for name in ("n_lanes", "ctx_tokens"))
_LITERAL: Any = Literal  # of values that only the table knows


def settings_at(part: str) -> tuple[Setting, ...]:
    """Return the settings that a manifest says in one of its mappings, such as `batching` or `stages[]`."""
    return tuple(entry for table in TABLES for entry in entries(table) if entry.place and entry.part == part)


def declare_settings(
    namespace: dict[str, Any], part: str, *, but: Sequence[str] = (), last: Sequence[str] = ()
) -> None:
    """Add a mapping's settings to the body of its class, whose `locals()` are given.

    `but`: keys that the class declares itself, since they mean more there. `last`: keys that come after all others.
    """
    found = sorted(settings_at(part), key=lambda entry: entry.key in last)
    for entry in found:
        if entry.key in but:
            continue
        name = field_name(entry)
        namespace.setdefault("__annotations__", {})[name] = annotation_of(entry)
        namespace[name] = Field(default=entry.manifest_value(entry.default), description=entry.doc)


def field_name(entry: Setting) -> str:
    """Return the key's name in Python: kvType is kv_type."""
    return _snake(entry.key)


def _snake(key: str) -> str:
    return re.sub(r"[A-Z]", lambda letter: f"_{letter[0].lower()}", key)


def annotation_of(entry: Setting) -> Any:
    """Return what pydantic has to know of a setting's values."""
    found: Any = entry.kind
    if entry.choices:
        found = _LITERAL[entry.choices]
    elif entry.form is not None:
        found = Annotated[Text, AfterValidator(_checked(entry.form))]
    elif entry.kind is str:
        found = Text
    elif entry.low is not None:
        found = Annotated[entry.kind, Field(ge=entry.low, le=entry.high)]
    if entry.is_size:
        written: Any = found | Annotated[str, Field(pattern=SIZE)]
        found = Annotated[found, BeforeValidator(_bytes, json_schema_input_type=written)]
    if entry.words:
        word: Any = _LITERAL[tuple(entry.words)]
        tag = _tag_of_size(entry.words) if entry.is_size else _tag
        found = Annotated[Annotated[word, Tag("word")] | Annotated[found, Tag("count")], Discriminator(tag)]
    return found | None if entry.is_optional else found


def _checked(form: Callable[[str], Any]) -> Callable[[str], str]:
    def check(text: str) -> str:
        if text:
            form(text)
        return text

    return check


def _bytes(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return read_size(value)
    except ValueError as error:
        raise ValueError(f"{value[:CHARS_MAX]!r} {error}") from None


def _tag_of_size(words: Mapping[str, int]) -> Callable[[Any], str]:
    return lambda value: "word" if isinstance(value, str) and value in words else "count"


def _tag(value: Any) -> str:
    return "word" if isinstance(value, str) else "count"


def open_context(spec: Any) -> tuple[Setting, ...]:
    """Return those of lanes and tokens that a manifest's `spec` does not set.

    To be asked before stages are put into the manifest, which writes every default down.
    """
    return tuple(entry for entry in (LANES, TOKENS) if entry.key not in spec.context.model_fields_set)


def value_at(spec: Any, entry: Setting) -> Any:
    """Return the value in a manifest's `spec` of a setting of the whole pipeline."""
    found = spec
    for key in entry.place.split("."):
        found = getattr(found, _snake(key))
    return found


def read_settings(table: type[Table], spec: Any) -> Table:
    """Return the values in a manifest's `spec` of a table's settings; settings of single stages keep their default."""
    values = {
        entry.name: entry.read(value_at(spec, entry))
        for entry in entries(table)
        if entry.place and entry.part != STAGES
    }
    return table(**values)


def parameters_of(spec: Any) -> dict[str, Any]:
    """Return the settings of a manifest's `spec` by the names of the command line's parameters."""
    return {
        entry.parameter: entry.of_parameter(value_at(spec, entry))
        for table in TABLES
        for entry in entries(table)
        if entry.place and entry.part != STAGES
    }


def stage_settings(table: type[Settings], stage: Any) -> dict[str, Any]:
    """Return the values in a manifest of a table's settings for one stage, by name."""
    values = {entry: getattr(stage, field_name(entry)) for entry in entries(table) if entry.part == STAGES}
    return {entry.name: entry.read(value) for entry, value in values.items() if value is not None}
