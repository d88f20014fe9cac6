"""Decides whether a split computes the same as its model: plans the cuts, runs both sides, judges every cut.

For each plan the model is split, the stages run as real processes behind a real pipeline, and the unsplit model then
gets the pipeline's own tokens. Stages and unsplit model are never loaded at the same time.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from relayline.coordinator.model.cuts import balanced_cuts, check_cuts
from relayline.coordinator.model.gguf_file import open_model
from relayline.coordinator.model.inspection import ModelFacts, check_support, inspect_whole
from relayline.coordinator.model.origin import check_has_bytes
from relayline.coordinator.model.split import split_model
from relayline.deploy.certify.compare import Comparison, Noise, Tolerance, compare, tolerance_for, verdict
from relayline.deploy.certify.pipeline import OnLine, SplitConfig, SplitRuns, run_split
from relayline.deploy.certify.reference import Reference
from relayline.deploy.certify.whole_model import WholeConfig, plain_tokens
from relayline.deploy.certify.workload import N_LANES, context_needed, draw_batches
from relayline.deploy.launch.local import threads_per_stage
from relayline.wire.common.errors import CutError, RelaylineError, UsageError
from relayline.wire.common.kv_layout import layout_refusal
from relayline.wire.common.scratch import scratch_directory
from relayline.wire.common.texts import counted
from relayline.wire.envelopes.dtypes import DTYPE_BY_NAME
from relayline.wire.settings.setting import arguments
from relayline.wire.settings.table import EngineSettings

MAX_ROWS = 512  # of a native step on both sides; the stage's default

Progress = Callable[[float, str], None]  # (share done, present activity)
Result = TypeVar("Result")


@dataclasses.dataclass(frozen=True, slots=True)
class CertifyConfig:
    """The model, the cuts and the workload to certify."""

    model: Path
    """GGUF file, or the first of its shards."""
    cuts: tuple[int, ...] | None = None
    """One pipeline with these cuts; None with n_stages None: every legal cut, one after another."""
    n_stages: int | None = None
    """One pipeline with balanced cuts."""
    wire: str = "f32"
    """Rows between stages: a key of wire.envelopes.dtypes.DTYPE_BY_NAME."""
    seeds: tuple[int, ...] = (1,)
    """Each adds one session alone and one mixed batch."""
    n_steps: int = 24
    """Decode steps of every session, after its prefill."""
    engine: EngineSettings = dataclasses.field(default_factory=EngineSettings)
    """Context, GPU layers and KV cache of both sides, and threads per stage (0 divides this machine's cores). Of the
    context follows how a stage holds its KV cells."""
    experimental: bool = False
    """Try an architecture outside the table of families."""
    keep: Path | None = None
    """Directory for the artifacts; None puts them into a temporary one and removes them."""
    verbose: bool = False
    """Stages log more."""

    @property
    def stage_engine(self) -> EngineSettings:
        """The engine of every stage, resolved but for its threads."""
        # No padding and no splitting by measured curves: a session alone then comes in batches known beforehand.
        return dataclasses.replace(
            self.engine, n_lanes=N_LANES, max_rows=MAX_ROWS, kv_layout=self.engine.layout_used, policy="drain",
            calibrate=False,
        )  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True)
class CutResult:
    """How one pipeline did."""

    cuts: tuple[int, ...]
    problem: str | None
    """Why it is not to be trusted, in one line; None when it is."""
    every: Comparison | None
    """Of all sessions; None when the pipeline could not be run to its end."""
    alone: Comparison | None
    """Of the sessions that ran alone."""
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

    For all cuts that is one two-stage pipeline per legal cut. Some cuts are only legal together with another one, since
    a family may forbid stages of certain lengths. Such a cut comes with the first that makes it legal.
    """
    if cuts is not None and n_stages is not None:
        raise UsageError("give either --stages or --cuts, not both")
    if n_stages is not None:
        cuts = balanced_cuts(facts, n_stages)
    if cuts is not None:
        check_cuts(facts, cuts)
        return (cuts,)
    if not facts.legal_cuts:
        raise CutError(f"{facts.path}: a model of {counted(facts.n_layers, 'layer')} has no legal cut to certify")
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
    facts = inspect_whole(path)
    check_has_bytes(open_model(path))
    check_support(facts, experimental=experimental)
    return facts


def disk_needed(config: CertifyConfig, facts: ModelFacts) -> str:
    """Print in one line how much space the artifacts take: per pipeline the model, and a tied embedding table a second
    time."""
    size_mib = (facts.file_bytes + (facts.head_bytes if facts.tied_embeddings else 0)) / (1 << 20)
    n_plans = len(plan_cuts(facts, config.cuts, config.n_stages))
    if config.keep is not None:
        return f"artifacts take about {n_plans * size_mib:,.0f} MiB in {config.keep}, and stay there"
    return f"artifacts take about {size_mib:,.0f} MiB at a time in {tempfile.gettempdir()}, and are removed"


async def certify(config: CertifyConfig, facts: ModelFacts, progress: Progress, on_line: OnLine) -> Report:
    """Run everything. May be cancelled at any time: processes and temporary files are gone when it has ended.

    Raises UsageError, CutError, ModelFileError, NativeError or ArtifactError when there is nothing to judge; what goes
    wrong with a single pipeline is that pipeline's problem in the report.
    """
    plans = plan_cuts(facts, config.cuts, config.n_stages)
    config = dataclasses.replace(config, engine=config.engine.of_architecture(facts.architecture))
    if refusal := layout_refusal(config.engine.layout_used, facts.architecture):
        raise UsageError(refusal)
    _make_kept(config.keep)
    work = _Certification(config, facts, plans, progress, on_line)
    noise = await work.measure()
    tolerance = tolerance_for(noise, same_kernels=config.engine.gpu_layers == 0 and not facts.reorders_rows)
    with _artifacts_directory(config.keep) as base:
        results = [await work.try_plan(index, plan, base, tolerance) for index, plan in enumerate(plans)]
    return Report(facts, config, noise, tolerance, tuple(results))


class _Certification:
    """The shared state of the phases of one `certify` run."""

    def __init__(
        self,
        config: CertifyConfig,
        facts: ModelFacts,
        plans: tuple[tuple[int, ...], ...],
        progress: Progress,
        on_line: OnLine,
    ) -> None:
        self.config, self._progress, self._on_line = config, progress, on_line
        self._stage_arguments = _stage_arguments(config)
        needed = context_needed(config.n_steps)
        if config.engine.ctx_tokens < needed:
            raise UsageError(
                f"--ctx {config.engine.ctx_tokens} is too small: the longest session takes {needed} tokens"
            )
        self._batches = draw_batches(plain_tokens(config.model, facts.n_vocab), config.seeds)
        self._n_tokens = config.n_steps + 1
        # Both sides get the same number: attention on many threads adds up in another order.
        self._n_threads = config.engine.n_threads or threads_per_stage(1 + max(map(len, plans)))
        self._n_parts = 1 + len(plans)
        self._stop_asked = threading.Event()
        self._reference = Reference(
            WholeConfig(
                path=config.model,
                settings=dataclasses.replace(config.stage_engine, n_threads=self._n_threads),
                max_wanted=max(self._n_tokens, N_LANES),
                long_rope=facts.long_rope,
            ),
            self._check_stop,
        )

    async def measure(self) -> Noise:
        """Run the unsplit model in every batch shape."""

        def tell(n_done: int) -> None:
            self._progress(n_done / len(self._batches) / self._n_parts, "the unsplit model")

        tell(0)
        return await self._in_thread(lambda: self._reference.measure(self._batches, self._n_tokens, tell))

    async def try_plan(self, index: int, plan: tuple[int, ...], base: Path, tolerance: Tolerance) -> CutResult:
        """Split at one plan's cuts, run that pipeline and judge it. Its artifacts are removed unless they are kept."""
        directory = base / f"cuts-{'-'.join(map(str, plan))}"

        def tell(share: float, what: str) -> None:
            self._check_stop()
            self._progress((1 + index + share) / self._n_parts, f"cut {_listed(plan)}: {what}")

        try:
            await self._in_thread(lambda: self._split(plan, directory, lambda share: tell(0.4 * share, "splitting")))
            try:
                found = await self._run(directory, tell)
            except RelaylineError as error:
                return CutResult(plan, error.message, None, None, 0)
            tell(0.9, "comparing")
            every, alone = await self._in_thread(lambda: self._compare(found))
        finally:
            if self.config.keep is None:
                await asyncio.to_thread(shutil.rmtree, directory, ignore_errors=True)
        problem = verdict(every, alone, tolerance, is_exact=self.config.wire == "f32")
        return CutResult(plan, problem, every, alone, found.sessions_per_step_max)

    def _split(self, plan: tuple[int, ...], directory: Path, tell: Callable[[float], None]) -> None:
        # No probe: a stage that cannot run fails in its own process, and its own error is reported.
        split_model(
            self.config.model,
            directory,
            cuts=plan,
            experimental=self.config.experimental,
            progress=lambda done, total: tell(done / total),
        )

    async def _run(self, directory: Path, tell: Callable[[float, str], None]) -> SplitRuns:
        n_expected = self._n_tokens * sum(map(len, self._batches))
        n_seen = itertools.count(1)
        tell(0.4, "starting")
        config = SplitConfig(directory, DTYPE_BY_NAME[self.config.wire], self._n_threads, self._stage_arguments)
        return await run_split(
            config,
            self._batches,
            self._n_tokens,
            self._on_line,
            lambda: tell(0.5 + 0.4 * next(n_seen) / n_expected, "running"),
        )

    def _compare(self, found: SplitRuns) -> tuple[Comparison, Comparison]:
        """Return how far the pipeline is from the unsplit model: over all sessions, and over those that ran alone."""
        pairs = list(zip(self._reference.logits_for(found.runs), found.runs, strict=True))
        single = {script for batch in self._batches if len(batch) == 1 for script in batch}
        alone = [(reference, run) for reference, run in pairs if run.script in single]
        return compare(pairs), compare(alone)

    def _check_stop(self) -> None:
        """End work in a thread whose caller was cancelled."""
        if self._stop_asked.is_set():
            raise asyncio.CancelledError

    async def _in_thread(self, function: Callable[[], Result]) -> Result:
        """Run blocking work; a cancelled caller continues only after the work has noticed and ended."""
        work = asyncio.ensure_future(asyncio.to_thread(function))
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            self._stop_asked.set()
            await asyncio.gather(work, return_exceptions=True)
            raise


def _listed(plan: tuple[int, ...]) -> str:
    return ",".join(map(str, plan))


def _stage_arguments(config: CertifyConfig) -> tuple[str, ...]:
    """Return the flags of every stage; each gets its threads as well."""
    # Artifacts that this process wrote a moment ago need no second look; kept ones may have been altered since.
    return (
        *arguments(config.stage_engine, lambda entry: entry.name != "n_threads"),
        *(() if config.keep else ("--no-verify",)),
        *(("--verbose",) if config.verbose else ()),
    )


def _make_kept(keep: Path | None) -> None:
    """Make the directory of `--keep`, before a whole model is measured. Raises UsageError where none can be."""
    if keep is None:
        return
    try:
        keep.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--keep {keep}: cannot be used as a directory: {error.strerror}") from error
    if not os.access(keep, os.W_OK | os.X_OK):
        raise UsageError(f"--keep {keep}: cannot be written")


@contextlib.contextmanager
def _artifacts_directory(keep: Path | None) -> Iterator[Path]:
    if keep is not None:
        yield keep
        return
    with scratch_directory("relayline-certify-") as directory:
        yield directory
