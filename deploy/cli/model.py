"""`relayline inspect` and `relayline split`: show what a model file holds, and cut it into stage artifacts."""

from __future__ import annotations

import collections
import json
from collections.abc import Callable
from pathlib import Path

import click
import msgspec
from rich.console import Console
from rich.table import Table

from relayline.coordinator.model.family import ATTENDS, BOTH, NEITHER, RECURRENT
from relayline.coordinator.model.gguf_file import open_model
from relayline.coordinator.model.inspection import ModelFacts, inspect_model
from relayline.coordinator.model.pipeline_file import PipelineFile
from relayline.coordinator.model.split import split_model
from relayline.coordinator.planner.memory import usual_lanes
from relayline.deploy.cli.options import OUTPUT, IntRange, Line, parse_cuts
from relayline.deploy.cli.paths import Directory, NamedPath
from relayline.deploy.models.hub_headers import model_or_headers
from relayline.deploy.models.model_source import check_here, is_on_hub, local_model
from relayline.deploy.models.progress import progress_bar
from relayline.deploy.models.trial import probe_artifact, try_artifacts
from relayline.deploy.planning.offload import expert_bytes_of
from relayline.deploy.tables import Trimmed, console_of_stdout
from relayline.wire.common.errors import UsageError
from relayline.wire.common.texts import counted, layer_range
from relayline.wire.common.units import bytes_text
from relayline.wire.model_files.recommended import Recommended, read_recommended
from relayline.wire.settings.table import EngineSettings

KIND_WORDS = {ATTENDS: "attention", RECURRENT: "recurrent", BOTH: "both", NEITHER: "neither"}


def _model_here(_: click.Context, __: click.Parameter, named: str) -> Path:
    """Return the only or first file of a model on this machine. Raises UsageError."""
    if is_on_hub(named):
        raise UsageError(f"{named}: no such file; `relayline pull {named}` loads it from the hub")
    return local_model(named)


def _model_anywhere(_: click.Context, __: click.Parameter, named: str) -> str:
    """Return the name of a model on this machine or on the hub. Raises UsageError."""
    check_here(named)
    return named


MODEL = click.argument("model", type=NamedPath(as_text=True), callback=_model_here)


@click.command("inspect", short_help="Show a model's layers, sizes and legal cuts.")
@click.argument("model", type=NamedPath(as_text=True), callback=_model_anywhere)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of tables.")
def inspect_command(model: str, as_json: bool) -> None:
    """Show the layers and sizes of MODEL, and where it can be cut.

    MODEL is a GGUF file, any of its shards, their directory, or a model on the hub as for `up`. Of that only the header
    is downloaded, some MB.
    """
    with model_or_headers(model) as shown:
        facts = inspect_model(shown.path)
        if as_json:
            named = {} if not shown.download_bytes else {"path": model}
            click.echo(json.dumps(facts_as_json(facts) | named, indent=2))
            return
        _print_facts(facts, console_of_stdout())
        if shown.note:
            click.echo(shown.note)


def facts_as_json(facts: ModelFacts) -> dict[str, object]:
    """Return the facts as `inspect --json` prints them. Sizes in bytes; per-layer lists have one item per layer."""
    return {
        "path": str(facts.path),
        "files": facts.n_files,
        "file_bytes": facts.file_bytes,
        "architecture": facts.architecture,
        "model_name": facts.model_name,
        "layers": facts.n_layers,
        "prediction_layers": facts.n_prediction_layers,
        "prediction_bytes": facts.prediction.size_bytes if facts.prediction else 0,
        "width": facts.n_embd,
        "row_widths": list(facts.row_widths),
        "layer_inputs": facts.sidebands.layer_inputs,
        "hash_layers": facts.sidebands.hash_layers,
        "deepstack_layers": facts.sidebands.deepstack_layers,
        "block_layers": facts.sidebands.block_layers,
        "placeholder_bytes": _placeholder_bytes(facts),
        "heads": list(facts.n_heads),
        "kv_heads": list(facts.n_kv_heads),
        "experts": facts.n_experts,
        "vocabulary": facts.n_vocab,
        "context": facts.ctx_train,
        "recommended_sampling": dict(_recommended(facts).options),
        "quantization": [
            {"type": share.type_name, "tensors": share.n_tensors, "bytes": share.size_bytes}
            for share in facts.quantization
        ],
        "layer_bytes": list(facts.layer_bytes),
        "expert_bytes": list(_experts(facts)),
        "embedding_bytes": facts.embedding_bytes,
        "head_bytes": facts.head_bytes,
        "tied_embeddings": facts.tied_embeddings,
        "rank_labels": facts.n_labels,
        "kv_bytes_per_token": list(facts.kv_bytes_per_token),
        "kv_bytes_per_token_total": sum(facts.kv_bytes_per_token),
        "state_bytes_per_lane": list(facts.state_bytes_per_lane),
        "state_bytes_per_lane_total": sum(facts.state_bytes_per_lane),
        "rewinds_states": facts.rewinds_states,
        "windows": list(facts.windows),
        "window_tokens": facts.window_tokens,
        "usual_lanes": usual_lanes(facts.state_bytes_per_lane, EngineSettings().n_lanes),
        "layer_kinds": [KIND_WORDS[kind] for kind in facts.kinds or ATTENDS * facts.n_layers],
        "supported": facts.supported,
        "refusal": facts.refusal,
        "may_be_tried": facts.may_be_tried,
        "legal_cuts": list(facts.legal_cuts) if facts.supported else [],
    }


def _experts(facts: ModelFacts) -> tuple[int, ...]:
    return expert_bytes_of(open_model(facts.path).tensors.values(), facts.n_layers)


def _recommended(facts: ModelFacts) -> Recommended:
    return read_recommended(open_model(facts.path).entries)


def _devices_of(facts: ModelFacts) -> str:
    """Return where the weights lie when a GPU has all layers."""
    experts = _experts(facts)
    weights = sum(facts.layer_bytes) + facts.head_bytes
    embedding = bytes_text(facts.embedding_bytes)
    text = f"{bytes_text(weights)} and KV in the GPU's memory, the embedding's {embedding} in the host's"
    if not experts:
        return text
    return f"{text}; --n-cpu-moe {facts.n_layers} leaves {bytes_text(sum(experts))} of experts there too"


def _states_of(facts: ModelFacts) -> dict[str, str]:
    """Return the lines that tell of recurrent states; none where no layer has one."""
    if not any(facts.state_bytes_per_lane):
        return {}
    counts = collections.Counter(facts.kinds or ATTENDS * facts.n_layers)
    kinds = ", ".join(f"{count} {KIND_WORDS[kind]}" for kind, count in counts.items())
    each = max(facts.state_bytes_per_lane)
    total = bytes_text(sum(facts.state_bytes_per_lane))
    n_lanes = usual_lanes(facts.state_bytes_per_lane, EngineSettings().n_lanes)
    drafts = "--rewind-rows N, each as much again" if facts.rewinds_states else "none: its states cannot be rewound"
    return {
        "layer kinds": kinds,
        "state per lane": f"{total} (f32); {bytes_text(each)} in each layer that has one; {n_lanes} lanes by default",
        "drafts": drafts,
    }


def _windows_of(facts: ModelFacts) -> dict[str, str]:
    """Return the line that tells of sliding windows; none where no layer has one."""
    n_windowed = sum(facts.windows)
    if not facts.window_tokens:
        return {}
    kept = sum(
        n_bytes for n_bytes, is_windowed in zip(facts.kv_bytes_per_token, facts.windows, strict=True) if is_windowed
    )
    text = f"{n_windowed} of {facts.n_layers} layers read the last {facts.window_tokens} tokens alone"
    return {"windows": f"{text}; {bytes_text(kept)} of the KV per token is theirs"}


def _width_of(facts: ModelFacts) -> str:
    between = set(facts.row_widths[1:]) or {facts.n_embd}
    if between == {facts.n_embd}:
        return str(facts.n_embd)
    return f"{facts.n_embd}, {'up to ' if len(between) > 1 else ''}{max(between)} in rows between stages"


def _embedding_of(facts: ModelFacts) -> str:
    text = bytes_text(facts.embedding_bytes)
    if not facts.tied_embeddings:
        return text
    return (
        text
        + (f", {bytes_text(facts.head_bytes)} of it" if facts.embedding_bytes != facts.head_bytes else ",")
        + " also the head"
    )


def _sidebands_of(facts: ModelFacts) -> dict[str, str]:
    """Return the lines about further values that travel with rows; none for most models."""
    width, n_hashed = facts.sidebands.layer_inputs, facts.sidebands.hash_layers
    lines = {}
    if width:
        lines["beside rows"] = f"{width} values for each later layer, made on stage 0"
    if n_hashed:
        lines["by token id"] = f"the experts of the first {n_hashed} layers, which are all on stage 0"
    if n_deepstack := facts.sidebands.deepstack_layers:
        lines["beside rows"] = f"{facts.n_embd} values for each of the first {n_deepstack} layers: features of images"
    if facts.placeholders is not None:
        n_layers, last = facts.sidebands.block_layers, max(_placeholder_bytes(facts))
        state = bytes_text(max(facts.state_bytes_per_lane))
        lines["beside rows"] = f"the input of every block of {n_layers} layers, {facts.n_embd} values each"
        lines["placeholders"] = (
            f"one for each earlier layer, with weights of {bytes_text(last // (facts.n_layers - 1))} and a state of "
            f"{state} per lane, which are not computed"
        )
    return lines


def _placeholder_bytes(facts: ModelFacts) -> list[int]:
    """Return the weights of the placeholders of a stage that begins with each layer, and has that one alone."""
    made = facts.placeholders
    return [made.size_bytes(layer, layer + 1) if made else 0 for layer in range(facts.n_layers)]


def _predictions_of(facts: ModelFacts) -> str:
    """Return what the line about layers says of those that predict further tokens."""
    if not facts.n_prediction_layers:
        return ""
    text = f" and {facts.n_prediction_layers} for multi-token prediction"
    if facts.prediction is None:
        return f"{text}, left out"
    return f"{text}: the last stage drafts by them with --mtp-drafts N ({bytes_text(facts.prediction.size_bytes)})"


def _print_facts(facts: ModelFacts, console: Console) -> None:
    recommended = _recommended(facts)
    rows = {
        "model": facts.model_name,
        "architecture": facts.architecture + ("" if facts.supported else " (not supported)"),
        "layers": str(facts.n_layers) + _predictions_of(facts),
        "width": _width_of(facts),
        **_sidebands_of(facts),
        "heads": f"{_runs(facts.n_heads)}, key/value heads {_runs(facts.n_kv_heads)}",
        "experts": str(facts.n_experts) if facts.n_experts else "none",
        "vocabulary": str(facts.n_vocab),
        "context": f"{facts.ctx_train} tokens",
        **({"recommended sampling": recommended.text} if recommended.options else {}),
        "size": f"{bytes_text(facts.file_bytes)} in {counted(facts.n_files, 'file')}",
        "types": ", ".join(f"{share.type_name} {bytes_text(share.size_bytes)}" for share in facts.quantization),
        "each layer": _runs(facts.layer_bytes, bytes_text),
        "embedding": _embedding_of(facts),
        "head": bytes_text(facts.head_bytes),
        **({"ranks": f"yes: a head of {facts.n_labels} labels scores documents"} if facts.n_labels else {}),
        "KV per token": f"{bytes_text(sum(facts.kv_bytes_per_token))} (f16); each layer "
        + _runs(facts.kv_bytes_per_token, bytes_text),
        **_windows_of(facts),
        **_states_of(facts),
        "on a GPU": _devices_of(facts),
        "legal cuts": _runs_of_cuts(facts.legal_cuts) if facts.supported else "none",
    }
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in rows.items():
        table.add_row(name, _plain(text))
    console.print(Trimmed(table))
    for line in recommended.ignored:
        console.print(_plain(line), soft_wrap=True)
    if facts.refusal is not None:
        advice = "; `relayline split --experimental` tries it anyway" if facts.may_be_tried else ""
        console.print(_plain(f"cannot be split: {facts.refusal}{advice}"), soft_wrap=True)


def _plain(text: str) -> str:
    """Protect text that came out of a file from being read as markup."""
    return text.replace("[", "\\[")


def _runs(values: tuple[int, ...], form: Callable[[int], str] = str) -> str:
    """Write per-layer values shortly: one value, or `layers 0-2: 7, 3-31: 9`."""
    if len(set(values)) <= 1:
        return str(form(values[0])) if values else "unknown"
    parts, start = [], 0
    for index in range(1, len(values) + 1):
        if index == len(values) or values[index] != values[start]:
            span = f"{start}-{index - 1}" if index - 1 > start else str(start)
            parts.append(f"{span}: {form(values[start])}")
            start = index
    if len(parts) > 8:
        return f"{form(min(values))} to {form(max(values))}"
    return "layers " + ", ".join(parts)


def _runs_of_cuts(cuts: tuple[int, ...]) -> str:
    if len(cuts) > 2 and cuts[-1] - cuts[0] == len(cuts) - 1:
        return f"{cuts[0]} to {cuts[-1]}"
    return ", ".join(map(str, cuts)) or "none"


@click.command("split", short_help="Cut a model into one artifact per stage.")
@MODEL
@click.option("--stages", type=IntRange(1), help="Number of stages; the cuts are chosen to balance them.")
@click.option("--cuts", type=Line("layers"), callback=parse_cuts, help="First layer of each later stage, e.g. 8,16.")
@click.option(*OUTPUT, "out_dir", type=Directory(), required=True, help="Directory for the artifacts.")
@click.option("--experimental", is_flag=True, help="Accept a model family that nobody has certified.")
@click.option("--json", "as_json", is_flag=True, help="Print pipeline.json instead of a table.")
def split_command(
    model: Path, stages: int | None, cuts: tuple[int, ...] | None, out_dir: Path, experimental: bool, as_json: bool
) -> None:
    """Cut MODEL (a GGUF file, any of its shards, or their directory) into one artifact per stage."""
    if (stages is None) == (cuts is None):
        raise click.UsageError("give either --stages N or --cuts A,B,...")
    with progress_bar("splitting") as (progress, was_used):
        pipeline = split_model(
            model,
            out_dir,
            n_stages=stages,
            cuts=cuts,
            experimental=experimental,
            progress=progress,
            probe=probe_artifact,
            trial=try_artifacts,
        )
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(pipeline), indent=2))
    else:
        _print_pipeline(pipeline, out_dir, unchanged=not was_used)
    if experimental and not inspect_model(model).supported:
        cut_list = ",".join(map(str, pipeline.cuts))
        click.echo(
            f"this {pipeline.architecture} model is not certified: every stage runs, but nobody has "
            "checked that they compute the same as the whole model. Check with: relayline certify "
            f"{model} --cuts {cut_list}",
            err=True,
        )


def _print_pipeline(pipeline: PipelineFile, out_dir: Path, *, unchanged: bool) -> None:
    table = Table(box=None, pad_edge=False)
    for heading in ("stage", "layers", "size", "file"):
        table.add_column(heading, justify="left" if heading == "file" else "right", no_wrap=True)
    for stage in pipeline.stages:
        layers = layer_range(stage.layer_start, stage.layer_end)
        table.add_row(str(stage.index), layers, bytes_text(stage.size_bytes), stage.file)
    console = console_of_stdout()
    console.print(Trimmed(table))
    state = "already there; nothing written" if unchanged else "written"
    console.print(_plain(f"{out_dir}: {counted(len(pipeline.stages), 'stage')} {state}"), soft_wrap=True)
