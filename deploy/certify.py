"""Decides whether a split computes what its model computes: plans the cuts, runs both sides, judges every cut.

For each plan the model is split, the stages run as real processes behind a real pipeline, and the unsplit model is
then given the very tokens that the pipeline produced. Stages and unsplit model are never loaded at the same time.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from coordinator import families
from coordinator.cuts import balanced_cuts, check_cuts
from coordinator.gguf_file import open_model
from coordinator.inspection import ModelFacts, facts_of
from coordinator.split import split_model
from deploy.certify_compare import Comparison, Noise, Tolerance, compare, tolerance_for, verdict
from deploy.certify_pipeline import OnLine, SplitConfig, SplitRuns, run_split
from deploy.certify_reference import Reference
from deploy.certify_workload import N_LANES, Script, context_needed, draw_batches
from deploy.local import forwarded, threads_per_stage
from deploy.whole_model import WholeConfig, plain_tokens
from stage.config import StageConfig
from wire.envelope import DTYPE_BY_NAME
from wire.errors import CutError, ModelFileError, RelaylineError, UnsupportedArchitectureError, UsageError

MAX_ROWS = 512  # of a native step on both sides; the stage's default

Progress = Callable[[float, str], None]  # (share done, what is going on)
Result = TypeVar("Result")


@dataclasses.dataclass(frozen=True, slots=True)
class CertifyConfig:
    """What to certify."""

    model: Path
    """GGUF file, or the first of its shards."""
    cuts: tuple[int, ...] | None = None
    """One pipeline with these cuts; None with n_stages None: every legal cut, one after another."""
    n_stages: int | None = None
    """One pipeline with balanced cuts."""
    wire: str = "f32"
    """Rows between stages: a key of wire.envelope.DTYPE_BY_NAME."""
    seeds: tuple[int, ...] = (1,)
    """Each adds one session alone and one mixed batch."""
    n_steps: int = 24
    """Decode steps of every session, after its prefill."""
    ctx_tokens: int = 512
    """Tokens per stream."""
    n_threads: int = 0
    """Threads per stage; 0 divides this machine's cores."""
    gpu_layers: int = 0
    """Layers on the GPU, on both sides."""
    kv_type: str = "f16"
    """Element type of the KV cache, on both sides."""
    experimental: bool = False
    """Try an architecture outside the table of families."""
    keep: Path | None = None
    """Directory for the artifacts; None puts them into a temporary one and removes them."""
    verbose: bool = False
    """Stages log more."""


@dataclasses.dataclass(frozen=True, slots=True)
class CutResult:
    """How one pipeline did."""

    cuts: tuple[int, ...]
    problem: str | None
    """Why it is not to be trusted, in one line; None when it is."""
    comparison: Comparison | None
    """None when the pipeline could not be run to its end."""
    sessions_per_step_max: int
    """Most sessions that every stage really had in one native step."""


@dataclasses.dataclass(frozen=True, slots=True)
class Report:
    """Everything that was found."""

    facts: ModelFacts
    config: CertifyConfig
    noise: Noise
    tolerance: Tolerance
    results: tuple[CutResult, ...]

    @property
    def passed(self) -> bool:
        """Return whether every pipeline may be trusted."""
        return all(result.problem is None for result in self.results)


def plan_cuts(facts: ModelFacts, cuts: tuple[int, ...] | None, n_stages: int | None) -> tuple[tuple[int, ...], ...]:
    """Return the pipelines to run, each as its cuts. Raises CutError or UsageError.

    For all cuts that is one two-stage pipeline per legal cut. A cut that is only legal beside another one (a family
    may forbid stages of certain lengths) comes with the first that makes it so.
    """
    if cuts is not None and n_stages is not None:
        raise UsageError("give either --stages or --cuts, not both")
    if n_stages is not None:
        cuts = balanced_cuts(facts, n_stages)
    if cuts is not None:
        check_cuts(facts, cuts)
        return (cuts,)
    if not facts.legal_cuts:
        raise CutError(f"{facts.path}: a model of {facts.n_layers} layers has no legal cut to certify")
    return tuple(_smallest_plan(facts, cut) for cut in facts.legal_cuts)


def _smallest_plan(facts: ModelFacts, cut: int) -> tuple[int, ...]:
    partners = [(cut,), *(tuple(sorted((cut, other))) for other in facts.legal_cuts if other != cut)]
    for plan in partners:
        with contextlib.suppress(CutError):
            check_cuts(facts, plan)
            return plan
    raise CutError(f"{facts.path}: no pipeline of up to three stages has cut {cut}; certify it with --cuts")


def check_model(path: Path, *, experimental: bool) -> ModelFacts:
    """Read a model's facts. Raises ModelFileError or UnsupportedArchitectureError, as `split` does."""
    model = open_model(path)
    facts = facts_of(model)
    if "relayline.stage_index" in model.entries:
        raise ModelFileError(f"{path}: is one stage of a split already; give the model it was cut from")
    families.family_of(facts.architecture, experimental=experimental)
    if facts.refusal is not None and not experimental:
        raise UnsupportedArchitectureError(f"{path}: this {facts.architecture} model cannot be split: {facts.refusal}")
    return facts


def disk_needed_bytes(facts: ModelFacts) -> int:
    """Return about what the artifacts of one pipeline take: the model, and a tied embedding table once more."""
    return facts.file_bytes + (facts.embedding_bytes if facts.tied_embeddings else 0)


async def certify(config: CertifyConfig, facts: ModelFacts, progress: Progress, on_line: OnLine) -> Report:
    """Run everything. May be cancelled at any time: processes and temporary files are gone when it has ended.

    Raises UsageError, CutError, ModelFileError, NativeError or ArtifactError when there is nothing to judge; what goes
    wrong with a single pipeline is that pipeline's problem in the report.
    """
    plans = plan_cuts(facts, config.cuts, config.n_stages)
    stage_arguments = _stage_arguments(config)
    n_tokens = config.n_steps + 1
    needed = context_needed(config.n_steps)
    if config.ctx_tokens < needed:
        raise UsageError(f"--ctx {config.ctx_tokens} is too small: the longest session takes {needed} tokens")
    batches = draw_batches(plain_tokens(config.model, facts.n_vocab), config.seeds)
    n_threads = config.n_threads or threads_per_stage(1 + max(map(len, plans)))
    stop = _Stop()
    reference = Reference(
        WholeConfig(
            path=config.model, n_lanes=N_LANES, ctx_tokens=config.ctx_tokens, max_rows=MAX_ROWS, max_wanted=n_tokens,
            n_threads=n_threads, gpu_layers=config.gpu_layers, kv_type=config.kv_type,
        ),
        stop.check,
    )  # fmt: skip
    share = _Share(progress, 1 + len(plans))
    share.tell(0.0, "measuring the unsplit model")
    noise = await _in_thread(
        lambda: reference.measure(
            batches, n_tokens, lambda n_done: share.tell(n_done / len(batches), "measuring the unsplit model")
        ),
        stop,
    )
    tolerance = tolerance_for(noise)
    results: list[CutResult] = []
    with _artifacts_directory(config.keep) as base:
        for place, plan in enumerate(plans, 1):
            name = ",".join(map(str, plan))
            directory = base / f"cuts-{'-'.join(map(str, plan))}"
            share.begin(place)

            def splitting(done: int, total: int, name: str = name) -> None:
                stop.check()
                share.tell(0.4 * done / total, f"cut {name}: splitting")

            def split(plan: tuple[int, ...] = plan, directory: Path = directory, splitting: Progressed = splitting) -> None:
                split_model(
                    config.model, directory, cuts=plan, experimental=config.experimental, progress=splitting
                )

            await _in_thread(split, stop)
            split_config = SplitConfig(directory, DTYPE_BY_NAME[config.wire], n_threads, stage_arguments)
            counted = _TokenCounter(share, name, n_tokens * sum(map(len, batches)))
            try:
                found = await run_split(split_config, batches, n_tokens, on_line, counted)
            except RelaylineError as error:
                results.append(CutResult(plan, error.message, None, 0))
            else:
                share.tell(0.9, f"cut {name}: comparing")
                ...
    return Report(facts, config, noise, tolerance, tuple(results))
