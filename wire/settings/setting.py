"""One setting, and what follows from a table of them: checks, flags of child processes, the form on the wire.

A table is a frozen dataclass below `Settings` whose fields are made by `setting`. Everything else about a setting is
derived from its entry: the flags (deploy.cli.setting_flags), the manifest's keys and JSON Schema
(deploy.manifest.settings), the reference page (deploy.manifest.pages) and the engine of a stage's order.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import inspect
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar

from relayline.wire.common.errors import UsageError
from relayline.wire.common.texts import printable
from relayline.wire.settings.sizes import FORMS, read_size, size_text

MARK = "setting"  # key of a field's metadata
STAGES = "stages[]"  # the place of a stage's own settings in a manifest
VARIABLE_PREFIX = "RELAYLINE"


class Reader(enum.Flag):
    """The processes that a setting is for."""

    STAGE = enum.auto()
    COORDINATOR = enum.auto()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Everything about one setting."""

    name: str = ""
    """The field of the table that holds it."""
    kind: type = str
    """bool, int, float or str."""
    is_optional: bool = False
    """Whether None is a value, which means: not given."""
    default: Any
    doc: str
    """One paragraph, for the manifest's schema, the reference page and `--help`."""
    flag: str
    """Its flag on the command line. For a bool that is true by default, the flag that makes it false."""
    flag_doc: str = ""
    """What `--help` says instead, for example if the flag means the opposite."""
    place: str = ""
    """Its path in a manifest below `spec`; empty: none."""
    reader: Reader
    low: float | None = None
    high: float | None = None
    """Bounds of a number, both included."""
    choices: tuple[str, ...] = ()
    """All values of a text that has no others."""
    words: Mapping[str, int] = dataclasses.field(default_factory=dict, hash=False)
    """Named values of a number, in addition to the numbers from low to high."""
    if_unknown: Any = None
    """The meaning of an order from a coordinator that does not know the setting; None: the default."""
    form: Callable[[str], Any] | None = None
    """Parses a text that is not empty. Raises ValueError, which says what to write instead."""
    host_wins: bool = False
    """Whether a stage's own flag overrides the order that it gets when it joins."""

    @property
    def parameter(self) -> str:
        """The flag as a name: ctx, no_calibrate."""
        return self.flag.lstrip("-").replace("-", "_")

    @property
    def variable(self) -> str:
        """The environment variable of `relayline serve` and `up`."""
        return f"{VARIABLE_PREFIX}_{self.parameter.upper()}"

    @property
    def is_switch(self) -> bool:
        """Whether the flag takes no value."""
        return self.kind is bool

    @property
    def is_size(self) -> bool:
        """Whether it is a number of bytes, which people may write with a unit."""
        return self.kind is int and self.name.endswith("_bytes")

    @property
    def is_negated(self) -> bool:
        """Whether the flag means that the setting is false."""
        return self.is_switch and bool(self.default)

    @property
    def key(self) -> str:
        """The manifest's key, without its path."""
        return self.place.rpartition(".")[2]

    @property
    def part(self) -> str:
        """The path above the manifest's key."""
        return self.place.rpartition(".")[0]

    @property
    def help(self) -> str:
        """The text of `--help`, in one line."""
        return " ".join((self.flag_doc or self.doc).split())

    @property
    def allowed(self) -> str:
        """The allowed values, as text for people; empty: any."""
        numbers = "" if self.low is None else f"{self.low:.10g}..{self.high:.10g}"
        if self.kind is int:
            numbers = "" if self.low is None else f"{self._number(self.low)}..{self._number(self.high)}"
        return ", ".join([*self.choices, *self.words, *([numbers] if numbers else [])])

    def check(self, value: Any) -> Any:
        """Return the value. Raises UsageError, one line, if it is not allowed."""
        if value is None and self.is_optional:
            return value
        accepted: Any = (int, float) if self.kind is float else self.kind
        if not isinstance(value, accepted) or isinstance(value, bool) != self.is_switch:
            raise UsageError(f"{self.flag} {value!r} is not {self._expected}")
        if self.choices and value not in self.choices:
            raise UsageError(f"{self.flag} {value} is unknown; choose one of {self.allowed}")
        if self.form is not None and value:
            try:
                self.form(value)
            except ValueError as error:
                raise UsageError(f"{self.flag} {value!r}: {error}") from None
        if self.low is None or self.high is None or value in self.words.values() or self.low <= value <= self.high:
            return value
        if self.words or self.is_size:
            raise UsageError(f"{self.flag} {value!r} is not {self._expected}")
        raise UsageError(f"{self.flag} {value} is outside {self.allowed}")

    def _number(self, number: float | None) -> str:
        assert number is not None
        return size_text(int(number)) if self.is_size else f"{number:.0f}"

    @property
    def _expected(self) -> str:
        if self.is_size:
            return ", ".join([*self.words, FORMS, f"at most {self._number(self.high)}"])
        kind_text = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}[self.kind]
        return (
            f"{', '.join(self.words)} or a number from {self.low:.0f} to {self.high:.0f}" if self.words else kind_text
        )

    def read(self, value: Any) -> Any:
        """Return the value of a text, or of a manifest's entry. Raises UsageError."""
        if not isinstance(value, str) or self.kind is str:
            return self.check(value)
        if value in self.words:
            return self.words[value]
        try:
            if self.is_size:
                return self.check(read_size(value))
            if self.kind is bool:
                return {"true": True, "false": False}[value]
            number = self.kind(value)
            if self.words and (number < 0 or str(number) != value):  # below 0 are stand-ins for words
                raise ValueError(value)
            return self.check(number)
        except (ValueError, KeyError, UsageError) as error:
            if isinstance(error, UsageError) and not (self.words or self.is_size):
                raise
            raise UsageError(f"{self.flag} {value!r} is not {self._expected}") from None

    def manifest_value(self, value: Any) -> Any:
        """Return the value as it is written in a manifest: a word where it has one."""
        return next((word for word, meant in self.words.items() if meant == value), value)

    def text(self, value: Any) -> str:
        """Return the value as text; `read` is the way back."""
        return str(value).lower() if self.is_switch else str(self.manifest_value(value))

    def arguments(self, value: Any) -> tuple[str, ...]:
        """Return the value as arguments of a command line; none if the setting was not given."""
        if self.is_switch:
            return (self.flag,) if value != self.default else ()
        return () if value is None or value == "" else (self.flag, self.text(value))

    def of_parameter(self, value: Any) -> Any:
        """Return the value that the command line's parameter means; it is its own way back."""
        return not value if self.is_negated else value


def setting(default: Any, doc: str, **what: Any) -> Any:
    """Return the field of a table that holds one setting. `what` as the fields of `Setting`."""
    entry = Setting(default=default, doc=inspect.cleandoc(doc), **what)
    return dataclasses.field(default=default, metadata={MARK: entry})


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Values of a table's settings, all of them allowed."""

    def __post_init__(self) -> None:
        """Raise UsageError for the first value that is not allowed."""
        for entry in entries(type(self)):
            entry.check(getattr(self, entry.name))


Table = TypeVar("Table", bound=Settings)


def entries(table: type[Settings]) -> tuple[Setting, ...]:
    """Return a table's settings in their order."""
    return _entries(table)  # type: ignore[arg-type]  # mypy takes the class for an instance of it


@functools.cache
def _entries(table: Any) -> tuple[Setting, ...]:
    hints, found = typing.get_type_hints(table), []
    for field in dataclasses.fields(table):
        alternatives = _alternatives(hints[field.name])
        kinds = [kind for kind in alternatives if kind is not type(None)]
        is_optional = len(kinds) < len(alternatives)
        found.append(dataclasses.replace(field.metadata[MARK], name=field.name, kind=kinds[0], is_optional=is_optional))
    return tuple(found)


def _alternatives(hint: Any) -> tuple[Any, ...]:
    return typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)


def from_parameters(table: type[Table], given: Mapping[str, Any]) -> Table:
    """Return a command's parameters as settings; missing ones have their defaults.

    Raises UsageError.
    """
    values = {each.name: each.of_parameter(given[each.parameter]) for each in entries(table) if each.parameter in given}
    return table(**values)


def arguments(settings: Settings, wanted: Callable[[Setting], bool]) -> tuple[str, ...]:
    """Return settings as arguments for a child process. `wanted` names the settings to pass on."""
    return tuple(
        argument
        for entry in entries(type(settings))
        if wanted(entry)
        for argument in entry.arguments(getattr(settings, entry.name))
    )


def entry_of(table: type[Settings], name: str) -> Setting:
    """Return one setting of a table. Raises StopIteration for an unknown name."""
    return next(entry for entry in entries(table) if entry.name == name)


def argument(table: type[Settings], name: str, value: Any) -> tuple[str, ...]:
    """Return one setting as arguments for a child process."""
    return entry_of(table, name).arguments(value)


class Message(Protocol):
    """A protobuf message that carries a table: a field for each of the first settings, and a map for the others."""

    @property
    def more(self) -> Any:
        """Text by name, for settings without a field."""


def write_message(settings: Settings, message: Message) -> None:
    """Write settings into a message: those that have no field there by their names, unless they are the default."""
    fields = _field_names(message)
    for entry in entries(type(settings)):
        value = getattr(settings, entry.name)
        if entry.name in fields:
            setattr(message, entry.name, value)
        elif value != entry.default:
            message.more[entry.name] = entry.text(value)


def read_message(table: type[Table], message: Message) -> Table:
    """Return the settings of a message. Raises UsageError for forbidden values, and for a setting not known here."""
    known, fields = {entry.name: entry for entry in entries(table)}, _field_names(message)
    for name in message.more:
        if name not in known or name in fields:
            raise UsageError(
                f"the coordinator's order has a setting {printable(name, 64)!r} that this stage does not know; "
                "run the same relayline version on both"
            )
    values = {}
    for name, entry in known.items():
        if name in fields:
            value = getattr(message, name)
            values[name] = entry.if_unknown if entry.if_unknown is not None and not value else value
        elif name in message.more:
            values[name] = entry.read(message.more[name])
    return table(**values)


def _field_names(message: Any) -> set[str]:
    return {field.name for field in message.DESCRIPTOR.fields} - {"more"}
