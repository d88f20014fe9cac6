"""The help of commands with many options: in sections, by what the options are about."""

from __future__ import annotations

import click

from relayline.wire.settings.setting import entries, entry_of
from relayline.wire.settings.table import EngineSettings, ServingSettings, TelemetrySettings

OWN, ENGINE, SERVING, ACCESS, TRACES = "Options", "Engine", "Serving", "Access", "Traces and logs"
TITLES = (OWN, ENGINE, SERVING, ACCESS, TRACES)  # in the order of the help
OF_CLIENTS = ("connections_per_address", "protect_metrics", "cors")  # settings of serving; a gateway has them too
_ACCESS = frozenset({"--http-cert", "--http-key", "--api-keys", "--allow-host", "--tls", "--insecure", "--token-file"})
_TRACES = frozenset({"--log-json", "--verbose"})
_TABLES = ((ENGINE, EngineSettings), (SERVING, ServingSettings), (TRACES, TelemetrySettings))
_TITLE_OF = {
    **{entry.flag: title for title, table in _TABLES for entry in entries(table)},
    **{entry_of(ServingSettings, name).flag: ACCESS for name in OF_CLIENTS},
    entry_of(ServingSettings, "jaeger_url").flag: TRACES,
    **dict.fromkeys(_ACCESS, ACCESS),
    **dict.fromkeys(_TRACES, TRACES),
}


def title_of(flag: str) -> str:
    """Return the section of an option by its first flag."""
    return _TITLE_OF.get(flag, OWN)


class Sectioned(click.Command):
    """A command whose help lists its options in sections; those of no table come first."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options."""
        found: dict[str, list[tuple[str, str]]] = {title: [] for title in TITLES}
        for parameter in self.get_params(ctx):
            if isinstance(parameter, click.Option) and (record := parameter.get_help_record(ctx)) is not None:
                found[title_of(parameter.opts[0])].append(record)
        for title, records in found.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)
