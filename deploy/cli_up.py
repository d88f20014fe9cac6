"""`relayline up`: a whole pipeline on this machine with one command."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from deploy.cli_model import parse_cuts, progress_bar
from deploy.cli_processes import announce
from deploy.options import Address, engine_options, log_options, pipeline_options, policy_option
from wire import logs
from wire.errors import UsageError

if TYPE_CHECKING:
    from deploy.local import LocalConfig


@click.command("up", short_help="Run a whole pipeline on this machine.")
@click.option("--model", type=click.Path(path_type=Path), required=True, help="GGUF file, or first of its shards.")
@click.option("--stages", "n_stages", type=click.IntRange(1, 64), default=None, help="Number of stages [default: 2].")
@click.option("--cuts", callback=parse_cuts, help="First layer of each later stage, e.g. 8,16, not --stages.")
@click.option("--http", type=Address(), default="127.0.0.1:8080", show_default=True, help="Where clients connect.")
@click.option("--threads", type=click.IntRange(0), default=0, help="Threads per stage [default: cores / stages].")
@click.option(
    "--split-dir", type=click.Path(path_type=Path), default=None, help="Where to keep the split [default: cache]."
)
@click.option("--json", "as_json", is_flag=True, help="Print the ready line as JSON.")
@policy_option
@engine_options
@pipeline_options
@log_options
def up_command(**given: Any) -> None:
    """Split the model if needed, start its stages and the coordinator, and serve until SIGINT or SIGTERM."""
    from deploy.local import LocalConfig, forwarded

    logs.setup("up", as_json=given["log_json"], verbose=given["verbose"])
    config = LocalConfig(
        pipeline_dir=split_for(given["model"], given["n_stages"], given["cuts"], given["split_dir"]),
        http=given["http"],
        n_threads=given["threads"],
        stage_arguments=(
            *forwarded([("--ctx", given["ctx"]), ("--lanes", given["lanes"]), ("--gpu-layers", given["gpu_layers"]),
                        ("--max-rows", given["max_rows"]), ("--prefill-rows", given["prefill_rows"]),
                        ("--kv-type", given["kv_type"]), ("--policy", given["policy"])]),
            *(("--no-calibrate",) if given["no_calibrate"] else ()),
            *_log_flags(given),
        ),
        serve_arguments=(
            *forwarded([("--wire", given["wire"]), ("--prefill-chunk", given["prefill_chunk"]),
                        ("--queue", given["queue"]), ("--policy", given["policy"]),
                        ("--groups", given["groups"]), ("--group-rows", given["group_rows"])]),
            *(("--no-share",) if given["no_share"] else ()),
            *(("--model-id", given["model_id"]) if given["model_id"] else ()),
            *_log_flags(given),
        ),
    )  # fmt: skip
    from wire.process import run

    async def main(stopping: asyncio.Event) -> None:
        await _up(config, stopping, as_json=given["as_json"])

    run(main)


def _log_flags(given: dict[str, Any]) -> tuple[str, ...]:
    return (*(("--log-json",) if given["log_json"] else ()), *(("--verbose",) if given["verbose"] else ()))


def split_for(model: Path, n_stages: int | None, cuts: tuple[int, ...] | None, split_dir: Path | None) -> Path:
    """Split the model beside its content key in the cache (or into split_dir); does nothing when that is done."""
    from coordinator.inspection import content_key
    from coordinator.split import split_model
    from deploy.local import cache_dir

    if cuts is not None and n_stages is not None:
        raise UsageError("give either --stages or --cuts, not both")
    if cuts is None:
        n_stages = n_stages or 2
    if split_dir is None:
        shape = "cuts-" + "-".join(map(str, cuts)) if cuts else f"{n_stages}-stages"
        split_dir = cache_dir() / "splits" / f"{content_key(model)[:24]}-{shape}"
    with progress_bar() as (update, _):
        split_model(model, split_dir, n_stages=n_stages, cuts=cuts, progress=update)
    return split_dir


async def _up(config: LocalConfig, stopping: asyncio.Event, *, as_json: bool) -> None:
    from deploy.local import LocalPipeline, print_prefixed
    from wire.process import first_of

    stop = asyncio.ensure_future(stopping.wait())
    pipeline = LocalPipeline(config, print_prefixed)
    starting = asyncio.ensure_future(pipeline.start())
    try:
        await first_of(starting, stop)
        if not starting.done():
            return
        ready = starting.result()
        announce(ready | {"stages": len(pipeline.stages)}, f"ready: {ready['url']}/v1", as_json=as_json)
        await first_of(stop, pipeline.failed)
        if pipeline.failed.done():
            pipeline.failed.result()
    finally:
        starting.cancel()
        stop.cancel()
        await pipeline.stop()
