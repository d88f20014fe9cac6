"""The `relayline` command. Each subcommand is in the folder of the thing that it starts, and is imported only when it
is called.

Exit codes: 0 success, 1 failure, 2 usage, 130 interrupted. A user's mistake prints one line, never a traceback.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import io
import os
import sys
from pathlib import Path

import click

from relayline.deploy.cli.interrupts import INTERRUPTED
from relayline.deploy.cli.terminal import can_move
from relayline.deploy.cli.variables import variable_of
from relayline.deploy.machine.huge_pages import restart_with_huge_pages
from relayline.wire.common import bounds
from relayline.wire.common.errors import RelaylineError, UsageError
from relayline.wire.common.texts import file_error_text, printable

# name -> (module, attribute)
COMMANDS: dict[str, tuple[str, str]] = {
    "init": ("relayline.deploy.cli.init", "init_command"),
    "plan": ("relayline.deploy.cli.plan", "plan_command"),
    "up": ("relayline.deploy.cli.up", "up_command"),
    "status": ("relayline.deploy.cli.control", "status_command"),
    "move": ("relayline.deploy.cli.move", "move_command"),
    "drain": ("relayline.deploy.cli.drain", "drain_command"),
    "uncordon": ("relayline.deploy.cli.drain", "uncordon_command"),
    "sleep": ("relayline.deploy.cli.sleep", "sleep_command"),
    "wake": ("relayline.deploy.cli.sleep", "wake_command"),
    "cancel": ("relayline.deploy.cli.steer", "cancel_command"),
    "trace-level": ("relayline.deploy.cli.steer", "trace_level_command"),
    "logs": ("relayline.deploy.cli.control", "logs_command"),
    "chat": ("relayline.deploy.cli.chat", "chat_command"),
    "batch": ("relayline.deploy.cli.batch", "batch_command"),
    "down": ("relayline.deploy.cli.control", "down_command"),
    "doctor": ("relayline.deploy.cli.doctor", "doctor_command"),
    "render": ("relayline.deploy.cli.render", "render_command"),
    "certs": ("relayline.deploy.cli.certs", "certs_command"),
    "inspect": ("relayline.deploy.cli.model", "inspect_command"),
    "split": ("relayline.deploy.cli.model", "split_command"),
    "calibrate": ("relayline.deploy.cli.calibrate", "calibrate_command"),
    "certify": ("relayline.deploy.cli.certify", "certify_command"),
    "join": ("relayline.deploy.cli.join", "join_command"),
    "nearby": ("relayline.deploy.cli.nearby", "nearby_command"),
    "invite": ("relayline.deploy.cli.invite", "invite_command"),
    "service": ("relayline.deploy.cli.service", "service_command"),
    "stage": ("relayline.deploy.cli.stage", "stage_command"),
    "serve": ("relayline.deploy.cli.serve", "serve_command"),
    "gateway": ("relayline.deploy.cli.gateway", "gateway_command"),
    "restart": ("relayline.deploy.cli.restart", "restart_command"),
    "cache": ("relayline.deploy.cli.cache", "cache_command"),
    "trace": ("relayline.deploy.cli.trace", "trace_command"),
    "top": ("relayline.deploy.cli.top", "top_command"),
    "report": ("relayline.deploy.cli.report", "report_command"),
    "pull": ("relayline.deploy.cli.pull", "pull_command"),
    "demo": ("relayline.deploy.cli.demo", "demo_command"),
    "completion": ("relayline.deploy.cli.completion", "completion_command"),
    "bench": ("relayline.deploy.cli.bench", "bench_command"),
}
# How --help lists them; a command of no group comes last.
GROUPS: dict[str, tuple[str, ...]] = {
    "Run a pipeline": ("up", "chat", "batch", "demo", "init", "plan", "doctor"),
    "Look after it": (
        "status",
        "move",
        "drain",
        "uncordon",
        "sleep",
        "wake",
        "restart",
        "logs",
        "top",
        "trace",
        "trace-level",
        "cancel",
        "down",
    ),
    "Measure": ("bench", "report", "calibrate", "certify"),
    "Models": ("pull", "inspect", "split", "cache"),
    "Several machines": ("join", "nearby", "invite", "service", "stage", "serve", "gateway", "certs", "render"),
}
OTHERS = "More"


class _LazyGroup(click.Group):
    """Imports a subcommand's module when it is used, so that `relayline --help` loads no llama.cpp."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [name for names in grouped().values() for name in names]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, attribute = COMMANDS[cmd_name]
        command = getattr(importlib.import_module(module), attribute)
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command that is called; for none of that name say which was probably meant."""
        name = args[0]
        if name not in COMMANDS and not name.startswith("-") and (near := nearest(name)):
            raise click.UsageError(f"No such command {name!r}. Did you mean {near}?", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands in groups, by their sources: to import them all takes a second."""
        width = max(map(len, COMMANDS))
        for title, names in grouped().items():
            rows = [(name.ljust(width), _unloaded(name).get_short_help_str(90)) for name in names]
            with formatter.section(title):
                formatter.write_dl(rows)


def grouped() -> dict[str, tuple[str, ...]]:
    """Return all commands by the title above them in `--help`."""
    placed = {name for names in GROUPS.values() for name in names}
    return GROUPS | {OTHERS: tuple(name for name in COMMANDS if name not in placed)}


def nearest(name: str) -> str:
    """Return the command that was probably meant, or a model or manifest's `up`; empty for none."""
    if name.endswith((".gguf", ".yaml", ".yml")):
        return f"`relayline up {name}`"
    from relayline.deploy.cli.other_names import near_command  # it loads the tables of settings

    found = near_command(name, COMMANDS)
    return f"`{found}`" if found else ""


def _unloaded(name: str) -> click.Command:
    """Return a subcommand that can be listed: it has the docstring and the short help of the one in the source."""
    module, function = COMMANDS[name]
    spec = importlib.util.find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    found = _definition(Path(spec.origin).read_text(encoding="utf-8"), function)
    given = [keyword for call in found.decorator_list if isinstance(call, ast.Call) for keyword in call.keywords]
    short = next((ast.literal_eval(keyword.value) for keyword in given if keyword.arg == "short_help"), None)
    return click.Command(name, help=ast.get_docstring(found), short_help=short)


def _definition(source: str, function: str) -> ast.FunctionDef:
    """Parse one function of a module, which two empty lines part from the others: a whole module takes much longer."""
    at = source.index(f"\ndef {function}(")
    begin, end = source.rfind("\n\n\n", 0, at), source.find("\n\n\n", at)
    (found,) = ast.parse(source[max(0, begin) : end if end > 0 else None]).body
    assert isinstance(found, ast.FunctionDef)
    return found


FIRST_STEPS = """\b
First steps:
  relayline demo                            three stages of a bundled model
  relayline up MODEL                        one machine; then `relayline chat`
  relayline init --model MODEL --hosts A,B  several; then `relayline up`
  relayline COMMAND --help                  what a command does, and its options
"""


@click.group(
    cls=_LazyGroup,
    epilog=FIRST_STEPS,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
@click.version_option(package_name="relayline", prog_name="relayline")
def relayline() -> None:
    """Span one large language model over several machines, with batched decode and an OpenAI-compatible API."""


def main() -> None:
    """Entry point of the console script."""
    try:
        restart_with_huge_pages(sys.argv[1:])
        for stream in (sys.stdout, sys.stderr):  # a terminal that has no bars and arrows shows question marks
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="backslashreplace" if stream is sys.stderr else "replace")
        colour = None if can_move() else False  # None: of what is written to a terminal
        code = relayline.main(prog_name="relayline", standalone_mode=False, color=colour)
        sys.exit(code if isinstance(code, int) else 0)  # click hands ctx.exit's code back here
    except (click.exceptions.Abort, KeyboardInterrupt):
        _end(INTERRUPTED, "interrupted")
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message(), err=True)
        sys.exit(2)
    except click.UsageError as error:
        from relayline.deploy.cli.other_names import explained

        is_value = isinstance(error, click.BadParameter) and not isinstance(error, click.MissingParameter)
        if error.ctx is not None and not is_value:  # a wrong value takes one line, as a wrong file does
            click.echo(error.ctx.get_usage(), err=True)
        source = variable_of(error.param, error.ctx) if isinstance(error, click.BadParameter) else ""
        _end(2, f"{explained(error, sys.argv[1:])}{source}")
    except click.ClickException as error:
        _end(error.exit_code, error.format_message())
    except UsageError as error:
        _end(2, *error.message.splitlines())  # a manifest may have several mistakes
    except RelaylineError as error:
        _end(1, error.message)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the reader left; nothing to report
        sys.exit(1)
    except OSError as error:
        _end(1, file_error_text(error))


def _end(code: int, *messages: str) -> None:
    for message in messages:
        line = printable(" ".join(message.split()), bounds.LOG_VALUE_CHARS_MAX)  # files and peers may have a say in it
        click.echo(f"relayline: error: {line}", err=True)
    sys.exit(code)
