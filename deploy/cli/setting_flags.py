"""Flags that are settings: made from the table of settings, and turned into arguments of other processes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource
from click.shell_completion import CompletionItem

from relayline.deploy.cli.variables import variable_of
from relayline.wire.common.errors import UsageError
from relayline.wire.links.security import address_of
from relayline.wire.settings.setting import STAGES, Setting, Settings, entries
from relayline.wire.settings.sizes import size_text
from relayline.wire.settings.table import TABLES

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]
_UNCHANGED = object()
BY_USER = (ParameterSource.COMMANDLINE, ParameterSource.ENVIRONMENT)


class SettingType(click.ParamType[Any]):
    """The values of one setting. A forbidden value is refused with the table's line."""

    def __init__(self, entry: Setting) -> None:
        self.entry, self.name = entry, entry.name

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str:
        """Return the help's text behind the flag: all values, or their kind."""
        allowed = "|".join(self.entry.allowed.split(", "))
        return f"[{allowed}]" if self.entry.choices else allowed or "TEXT"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Read a value of the command line, the environment or a manifest. Raises UsageError; click's for words."""
        try:
            return self.entry.read(value)
        except UsageError as error:
            if not self.entry.words:
                raise UsageError(f"{error.message}{variable_of(param, ctx)}") from None
            self.fail(error.message.removeprefix(f"{self.entry.flag} "), param, ctx)

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Offer the values that are words."""
        words = (*self.entry.choices, *self.entry.words)
        return [CompletionItem(word) for word in words if word.startswith(incomplete)]


def setting_option(entry: Setting, default: Any = _UNCHANGED, shown: str = "") -> Decorator:
    """Return the flag of one setting, with a default that may be the command's own.

    `shown`: what the help says of the default where the command chooses it.
    """
    if entry.is_switch:
        return click.option(entry.flag, entry.parameter, is_flag=True, help=entry.help)
    value = entry.manifest_value(entry.default if default is _UNCHANGED else default)
    if entry.is_size and isinstance(value, int):
        value = size_text(value)
    return click.option(
        entry.flag,
        entry.parameter,
        type=SettingType(entry),
        default=value,
        show_default=shown or value not in (None, ""),
        help=entry.help,
    )


def setting_options(
    table: type[Settings],
    only: Collection[str] | None = None,
    but: Collection[str] = (),
    shown: Mapping[str, str] | None = None,
) -> Decorator:
    """Return the flags of a table: of all settings, or of those whose names are given.

    `shown`: what the help says of defaults, by name.
    """
    wanted = [entry for entry in entries(table) if entry.name not in but and (only is None or entry.name in only)]

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        for entry in reversed(wanted):
            function = setting_option(entry, shown=(shown or {}).get(entry.name, ""))(function)
        return function

    return decorate


def of_pipelines() -> tuple[Setting, ...]:
    """Return the settings that a manifest says of a whole pipeline, so that flags can replace them."""
    return tuple(entry for table in TABLES for entry in entries(table) if entry.place and entry.part != STAGES)


def manifest_changes(changed: Mapping[str, Any]) -> dict[str, Any]:
    """Return what parameters, by name, change in a manifest: values by dotted place below `spec`."""
    return {
        entry.place: entry.manifest_value(entry.of_parameter(changed[entry.parameter]))
        for entry in of_pipelines()
        if entry.parameter in changed
    }


# Values that the process in the background gets separately: the pipeline's name, its state directory, its way of
# reporting.
NOT_AGAIN = (
    "target",
    "dry_run",
    "model",
    "name",
    "state_dir",
    "detach",
    "report_fd",
    "as_json",
    "change",
    "beside",
    "exit_with_stdin",
)


def again(ctx: click.Context, but: Collection[str] = ()) -> tuple[str, ...]:
    """Return the user's arguments of the running command, for another process that runs the same command.

    Paths become absolute. `but`: parameters, by name, that the other process gets separately.
    """
    arguments: list[str] = []
    for parameter in ctx.command.params:
        name = str(parameter.name)
        if name in but or not isinstance(parameter, click.Option) or ctx.get_parameter_source(name) not in BY_USER:
            continue
        value = ctx.params[name]
        if parameter.is_flag:
            arguments += parameter.opts[:1] if value else ()
            continue
        for one in value if parameter.multiple else (value,):
            if one is not None:
                arguments += (parameter.opts[0], _text(parameter, one))
    return tuple(arguments)


def _text(parameter: click.Parameter, value: Any) -> str:
    """Return a parameter's value in the form of the command line."""
    if isinstance(parameter.type, SettingType):
        return parameter.type.entry.text(value)
    if isinstance(value, Path):
        return str(value.absolute())
    if parameter.type.name == "host:port":
        return address_of(*value)
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
