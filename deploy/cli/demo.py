"""`relayline demo`: the bundled model over three stages, with a summary of its batches."""

from __future__ import annotations

import asyncio

import click


@click.command("demo", short_help="Run the bundled model as three stages, and show its batches.")
@click.option("--keep", is_flag=True, help="Keep serving until Ctrl-C.")
def demo_command(keep: bool) -> None:
    """Run the bundled model (4 MB, writes like Python's documentation) as three stages, and send six prompts at once.

    This needs no download. With --keep it keeps serving, so that you can try `relayline status`, `top` and `trace`.
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
