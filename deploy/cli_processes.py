"""`relayline stage` and `relayline serve`: one process each."""

from __future__ import annotations

import json
import os
import signal
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from deploy.options import (
    Address,
    AddressList,
    engine_options,
    log_options,
    pipeline_options,
    policy_option,
    supervised_option,
)
from wire import logs
from wire.envelope import DTYPE_BY_NAME

if TYPE_CHECKING:
    from coordinator.scheduler import ScheduleConfig


def announce(event: dict[str, Any], text: str, *, as_json: bool) -> None:
    """Print the ready line on stdout."""
    print(json.dumps(event) if as_json else text, flush=True)


def _watch_stdin() -> None:
    """End this process, gracefully, when the supervisor's end of stdin closes."""

    def wait() -> None:
        # os.read, not sys.stdin: a thread inside a buffered read would hold its lock at interpreter shutdown.
        while os.read(0, 4096):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, name="supervisor", daemon=True).start()


@click.command("stage", short_help="Run one stage process.")
@click.option("--artifact", type=click.Path(path_type=Path), required=True, help="This stage's GGUF from `split`.")
@click.option("--listen", type=Address(), default="127.0.0.1:0", show_default=True, help="Where neighbours connect.")
@click.option("--threads", type=int, default=0, help="Threads of a native step [default: all cores].")
@click.option("--no-verify", is_flag=True, help="Do not check the artifact's sha256.")
@click.option("--json", "as_json", is_flag=True, help="Print the ready line as JSON.")
@policy_option
@engine_options
@log_options
@supervised_option
def stage_command(**given: Any) -> None:
    """Load one stage artifact and serve it to its neighbours until SIGINT or SIGTERM."""
    from stage.config import StageConfig
    from stage.process import run_stage
    from stage.service import StageFacts

    host, port = given["listen"]
    config = StageConfig(
        artifact=given["artifact"],
        host=host,
        port=port,
        ctx_tokens=given["ctx"],
        n_lanes=given["lanes"],
        n_threads=given["threads"],
        gpu_layers=given["gpu_layers"],
        max_rows=given["max_rows"],
        prefill_rows=given["prefill_rows"],
        kv_type=given["kv_type"],
        policy=given["policy"],
        calibrate=not given["no_calibrate"],
        verify=not given["no_verify"],
    )
    logs.setup("stage", as_json=given["log_json"], verbose=given["verbose"])
    if given["exit_with_stdin"]:
        _watch_stdin()

    def on_ready(address: str, facts: StageFacts) -> None:
        artifact = facts.artifact
        announce(
            {
                "event": "ready",
                "role": "stage",
                "address": address,
                "stage": artifact.stage_index,
                "layers": [artifact.layer_start, artifact.layer_end],
            },
            f"stage {artifact.stage_index} of {artifact.stage_count} "
            f"(layers {artifact.layer_start}-{artifact.layer_end - 1}) ready on {address}",
            as_json=given["as_json"],
        )

    run_stage(config, on_ready)


def schedule_config(given: dict[str, Any]) -> ScheduleConfig:
    """Turn flags into the coordinator's side of the batching policy."""
    from coordinator.scheduler import ScheduleConfig

    by_hand = given["groups"] or given["group_rows"]
    mode = "fixed" if by_hand else "auto" if given["policy"] == "auto" else "drain"
    return ScheduleConfig(mode, given["groups"], given["group_rows"], given["prefill_chunk"])


@click.command("serve", short_help="Run the coordinator and its HTTP API.")
@click.option("--pipeline", "directory", type=click.Path(path_type=Path), required=True, help="Directory of `split`.")
@click.option("--stages", type=AddressList(), required=True, help="Stage addresses in layer order.")
@click.option("--http", type=Address(), default="127.0.0.1:8080", show_default=True, help="Where clients connect.")
@click.option("--json", "as_json", is_flag=True, help="Print the ready line as JSON.")
@policy_option
@pipeline_options
@log_options
@supervised_option
def serve_command(**given: Any) -> None:
    """Connect the stages of a pipeline and serve it over HTTP until SIGINT or SIGTERM."""
    from coordinator.pipeline import PipelineConfig
    from coordinator.serve import Ready, ServeConfig, run_coordinator

    host, port = given["http"]
    config = ServeConfig(
        pipeline_dir=given["directory"],
        pipeline=PipelineConfig(
            addresses=given["stages"],
            wire_dtype=DTYPE_BY_NAME[given["wire"]],
            schedule=schedule_config(given),
            share=not given["no_share"],
            waiting_max=given["queue"],
        ),
        host=host,
        port=port,
        model_id=given["model_id"],
    )
    logs.setup("coordinator", as_json=given["log_json"], verbose=given["verbose"])
    if given["exit_with_stdin"]:
        _watch_stdin()

    def on_ready(ready: Ready) -> None:
        announce(
            {
                "event": "ready",
                "role": "coordinator",
                "url": ready.url,
                "model": ready.model_id,
                "stages": ready.n_stages,
                "lanes": ready.n_lanes,
                "ctx": ready.ctx_tokens,
            },
            f"{ready.model_id} on {ready.n_stages} stages: {ready.url}/v1",
            as_json=given["as_json"],
        )

    run_coordinator(config, on_ready)
