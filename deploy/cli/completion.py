"""`relayline completion`: the script that makes a shell complete commands, flags, words and names of pipelines."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

SHELLS = ("bash", "zsh", "fish")
WHERE = {
    "bash": "~/.local/share/bash-completion/completions/relayline",
    "zsh": "a directory of $fpath, as _relayline",
    "fish": "~/.config/fish/completions/relayline.fish",
}


@click.command("completion", short_help="Print a script that lets a shell complete commands.")
@click.argument("shell", type=click.Choice(SHELLS))
@click.pass_context
def completion_command(ctx: click.Context, shell: str) -> None:
    """Print the completion script for SHELL.

    For this shell only: eval "$(relayline completion bash)", or in fish: relayline completion fish | source. To keep
    it, write it to the place that the script's last line names.
    """
    kind = get_completion_class(shell)
    assert kind is not None
    root = ctx.find_root()
    click.echo(kind(root.command, {}, "relayline", "_RELAYLINE_COMPLETE").source())
    click.echo(f"# For every new shell, keep this as {WHERE[shell]}")
