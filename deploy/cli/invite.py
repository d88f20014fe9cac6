"""`relayline invite`: a new line and a new code with which a host joins a pipeline that runs here."""

from __future__ import annotations

from pathlib import Path

import click

from relayline.deploy.cli.options import Line, Name
from relayline.deploy.cli.paths import Directory
from relayline.wire.common.errors import UsageError


@click.command("invite", short_help="Print a new join line for a host of a pipeline that runs here.")
@click.argument("stage", type=Name())
@click.option("--pipeline", type=Line("name"), default=None, help="Name of the pipeline, if several run here.")
@click.option("--host", type=Line("host"), default="", help="Address of a machine that the manifest does not name.")
@click.option("--spare", "is_spare", is_flag=True, help="With --host: the new stage stands by, without layers.")
@click.option("--state-dir", type=Directory(), help="State directory of the pipeline.")
def invite_command(stage: str, pipeline: str | None, host: str, state_dir: Path | None, *, is_spare: bool) -> None:
    """Print a new line with which STAGE joins from its host, and a new code beside it, if the last ones have expired or
    were used, or the host's disk is gone.

    With --host, STAGE may be new: it joins the running pipeline and gets layers, unless --spare lets it stand by. Add
    it to the manifest too, so that the next start knows it. If the manifest fixes `layers`, only a spare can join.

    Line and code printed before no longer work. A certificate from it stays valid until `relayline certs revoke`.
    """
    from relayline.deploy.cli.drain import is_known, let_join
    from relayline.deploy.launch.control import find
    from relayline.deploy.launch.inviting import (
        check_host,
        check_is_pipeline,
        check_shares,
        for_a_while,
        fresh_line,
    )

    if is_spare and not host:
        raise UsageError("--spare is for a new stage; give its address too: --host ADDRESS")
    found = find(pipeline, state_dir)
    if found is None:
        raise UsageError("no pipeline runs here; `relayline up MANIFEST` starts one and prints the line of each host")
    check_is_pipeline(found)
    is_new = bool(host) and check_host(found, stage, host)
    if is_new and not is_spare and not is_known(found, stage):
        check_shares(found, stage)
    line, short = fresh_line(found, stage, host)  # the one before no longer works: nothing may be refused after this
    if is_new:
        let_join(found, stage, is_spare=is_spare)
    click.echo(line)
    click.echo(for_a_while(short), err=True)  # stdout has the one line that works anywhere
