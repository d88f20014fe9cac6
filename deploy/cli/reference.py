"""Writes the pages of docs/reference/ that come from code, or checks that they are up to date (--check).

`cli.md` holds the help of every command, `errors.md` the table of errors. `make reference` writes them.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import click

from relayline.deploy.cli.main import relayline
from relayline.wire.common.errors import STATUS, Fault, leaves

PAGES = Path(__file__).resolve().parents[2] / "docs" / "reference"
WIDTH = 100
MADE = "<!-- Made by `make reference`; edit the code instead. -->\n"
FAULTS = {Fault.CLIENT: "the client", Fault.OPERATOR: "the operator", Fault.PEER: "a peer", Fault.SERVER: "the server"}


def commands(group: click.Group, parent: click.Context) -> Iterator[tuple[click.Command, click.Context]]:
    """Yield every command below `group` in the order of its help, subcommands behind their group."""
    for name in group.list_commands(parent):
        command = group.get_command(parent, name)
        assert command is not None
        context = click.Context(command, info_name=name, parent=parent, terminal_width=WIDTH, max_content_width=WIDTH)
        yield command, context
        if isinstance(command, click.Group):
            yield from commands(command, context)


def cli_page() -> str:
    """Return the page of commands: one section each, with the text that `--help` prints."""
    names = relayline.context_settings["help_option_names"]
    root = click.Context(
        relayline, info_name="relayline", terminal_width=WIDTH, max_content_width=WIDTH, help_option_names=names
    )
    parts = [
        f"# Commands\n\n{MADE}\n"
        "Exit codes: 0 success, 1 failure, 2 wrong usage, 130 ended by Ctrl-C. An error is one line on stderr.\n"
        "Flags override `RELAYLINE_*` environment variables, and these override the manifest.\n\n"
        f"```text\n{root.get_help()}\n```\n"
    ]
    for command, context in commands(relayline, root):
        parts.append(f"\n## {context.command_path}\n\n```text\n{command.get_help(context)}\n```\n")
    return "".join(parts)


def errors_page() -> str:
    """Return the table of errors: label, meaning, whose fault, whether to retry, status codes."""
    rows = []
    for label, (grpc_name, http_code) in STATUS.items():
        leaf = leaves()[label]
        meaning = " ".join((inspect.getdoc(leaf) or "").split("\n\n")[0].split()).replace("|", "\\|")
        again = "yes" if leaf.retryable else "no"
        rows.append(f"| `{label}` | {meaning} | {FAULTS[leaf.fault]} | {again} | {http_code} | {grpc_name} |\n")
    return (
        f"# Errors\n\n{MADE}\n"
        "Every error has a label that never changes. HTTP bodies carry it as `error.code`, unless OpenAI has a code\n"
        "of its own: `overloaded`, `rate_limited` and `no_lane` are `rate_limit_exceeded`.\n"
        "See [HTTP API](http-api.md#errors).\n\n"
        "| label | meaning | whose fault | retry | HTTP | gRPC |\n|---|---|---|---|--:|---|\n" + "".join(rows)
    )


MAKERS: dict[str, Callable[[], str]] = {"cli.md": cli_page, "errors.md": errors_page}


def main() -> None:
    """Write the pages, or compare them with the committed ones."""
    made = {PAGES / name: make() for name, make in MAKERS.items()}
    if "--check" not in sys.argv:
        for path, text in made.items():
            path.write_text(text)
        return
    stale = [path.name for path, text in made.items() if not path.exists() or path.read_text() != text]
    if stale:
        sys.exit(f"docs/reference differs from the code: {', '.join(stale)}; run `make reference`")
    print(f"{len(made)} generated pages match the code")


if __name__ == "__main__":
    main()
