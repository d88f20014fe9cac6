"""`relayline demo`: the bundled model over three stages, with a summary of its batches."""

from __future__ import annotations

import asyncio

import click


@click.command("demo", short_help="Run the bundled model over three stages, and show its batches.")
@click.option("--keep", is_flag=True, help="Go on serving until Ctrl-C.")
def demo_command(keep: bool) -> None:
    """Run the bundled model (4 MB, Python's documentation) as three stages, and six prompts at once through the API.

    It needs no download. With --keep it goes on serving, and shows in `relayline status`, `top` and `trace`.
    """
    from relayline.deploy.launch.demo_run import demo
    from relayline.deploy.launch.state import StateDir, register, state_root
    from relayline.wire.common import logs

    logs.setup("demo", as_json=False)
    directory = StateDir(state_root() / "demo")
    register(directory.path)
    try:
        asyncio.run(demo(keep=keep, directory=directory))
    except KeyboardInterrupt:
        click.get_current_context().exit(0 if keep else 130)
