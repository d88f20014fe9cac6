"""Cuts a GGUF model into one artifact per stage, so that a finished-looking result is always a finished one.

Every file is written under a dotted partial name, synced, and renamed only when all are complete; pipeline.json
comes last. Memory does not depend on the model, see `artifact_bytes`.

Of a hollow model, whose weights are on the hub (`origin`), the artifacts are hollow as well: each has its header and
its size, and the coordinator reads the rest from the hub when a stage fetches it.
"""

from __future__ import annotations

import dataclasses
import fcntl
import hashlib
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from relayline.coordinator.model.artifact_bytes import artifact_bytes, local_files, unread_name
from relayline.coordinator.model.cuts import balanced_cuts, check_cuts
from relayline.coordinator.model.gguf_file import GgufModel, open_model
from relayline.coordinator.model.inspection import ModelFacts, check_support, check_whole, facts_of
from relayline.coordinator.model.origin import Origin, check_has_bytes, check_not_empty, origins_of
from relayline.coordinator.model.pipeline_file import (
    PIPELINE_NAME,
    PIPELINE_VERSION,
    ArtifactFile,
    PipelineFile,
    Source,
    SourceFile,
    StageFile,
    load_pipeline,
    store_pipeline,
)
from relayline.coordinator.model.slices import PlannedArtifact, SplitPlan, plan_split
from relayline.wire.common.errors import ArtifactError, ModelFileError, UnsupportedArchitectureError, UsageError
from relayline.wire.common.file_hash import remember_sha256, sha256_of
from relayline.wire.common.places import moving_cache
from relayline.wire.common.texts import named_layers

log = logging.getLogger("relayline.split")

DISK_MARGIN_BYTES = 16 * 1024 * 1024  # directories, pipeline.json, and other uses of the disk in the meantime
PARTIAL = ".partial"
ARTIFACT_NAME = re.compile(r"^(stage-\d+|tokenizer)\.gguf$")

Progress = Callable[[int, int], None]  # (bytes written so far, bytes in all)
Probe = Callable[[Path], str | None]  # a stage artifact -> why llama.cpp cannot run it, or None
Trial = Callable[[Sequence[Path]], str | None]  # all stage artifacts -> why llama.cpp cannot load one, or None


def split_model(
    source: Path,
    out_dir: Path,
    *,
    n_stages: int | None = None,
    cuts: tuple[int, ...] | None = None,
    experimental: bool = False,
    progress: Progress | None = None,
    probe: Probe | None = None,
    trial: Trial | None = None,
) -> PipelineFile:
    """Split a model into `out_dir` and return its description; do nothing if that was done already.

    Give either the number of stages or the cuts. `probe` is asked about every finished artifact of an experimental
    split before anything looks finished, `trial` about those of others. An earlier split in the directory stays
    valid until the new one is complete.

    Raises ModelFileError, UnsupportedArchitectureError, CutError, UsageError or ArtifactError (nothing written).
    """
    if (n_stages is None) == (cuts is None):
        raise UsageError("give either the number of stages or the cuts")
    model = open_model(source)
    facts = facts_of(model)
    check_whole(model)
    check_support(facts, experimental=experimental)
    if cuts is None:
        assert n_stages is not None
        cuts = balanced_cuts(facts, n_stages)
    else:
        check_cuts(facts, cuts)
    with _directory_lock(out_dir):
        done = _finished(out_dir, model, facts, cuts)
        if done is not None:
            return done
        _refuse_foreign(out_dir)
        plan = plan_split(model, facts, cuts)
        asked = (None, trial) if facts.supported else (probe, None)  # a probe does the work of a trial, and more
        if asked[0] is not None:
            check_has_bytes(model)
        elif not origins_of(model):
            check_not_empty(model)
        try:
            return _Writer(model, facts, out_dir, progress, *asked).write(plan)
        except OSError as error:
            raise ArtifactError(
                f"{out_dir}: cannot write the split: {error.strerror or error}{moving_cache(out_dir)}"
            ) from error


def write_stages(source: Path, out_dir: Path, cuts: tuple[int, ...], indexes: Sequence[int]) -> tuple[Path, ...]:
    """Write some stages of a split as separate files, without a pipeline.json: for measuring them.

    Raises ModelFileError, UnsupportedArchitectureError, CutError or ArtifactError.
    """
    model = open_model(source)
    check_has_bytes(model)
    facts = facts_of(model)
    check_cuts(facts, cuts)
    stages = plan_split(model, facts, cuts).artifacts[1:]
    writer = _Writer(model, facts, out_dir, None, None, None)
    paths = []
    try:
        for index in indexes:
            writer.write_artifact(stages[index])
            paths.append(_partial(out_dir / stages[index].file).replace(out_dir / stages[index].file))
    except OSError as error:
        raise ArtifactError(f"{out_dir}: cannot write a stage: {error.strerror or error}") from error
    return tuple(paths)


def planned_stage(model: GgufModel, cuts: tuple[int, ...], index: int) -> PlannedArtifact:
    """Return the plan of one stage's artifact. Raises ModelFileError, UnsupportedArchitectureError or CutError."""
    facts = facts_of(model)
    check_cuts(facts, cuts)
    return plan_split(model, facts, cuts).artifacts[1 + index]


@dataclasses.dataclass(frozen=True, slots=True)
class HollowSlice:
    """One stage of a split without its weights: its file is `header` and then zeros."""

    header: bytes
    size_bytes: int
    """Of the whole file."""
    layer_bytes: int
    head_bytes: int
    """0 where it has no head."""


def hollow_slices(source: Path, wanted: Iterable[tuple[tuple[int, ...], int]]) -> Iterator[HollowSlice]:
    """Yield a hollow slice for each (cuts, stage index): for hosts that measure the model before they have any of it.

    Raises ModelFileError, UnsupportedArchitectureError, CutError.
    """
    model = open_model(source)
    facts = facts_of(model)
    for cuts, index in wanted:
        check_cuts(facts, cuts)
        plan = plan_split(model, facts, cuts, has_words=False)
        artifact = plan.artifacts[1 + index]
        assert artifact.layers is not None
        start, end = artifact.layers
        head_bytes = facts.head_bytes if end == facts.n_layers else 0
        yield HollowSlice(artifact.header, artifact.size_bytes, sum(facts.layer_bytes[start:end]), head_bytes)


@contextmanager
def _directory_lock(out_dir: Path) -> Iterator[None]:
    """Hold the output directory, so that a second split of the same model waits and then finds it done."""
    existed = out_dir.exists()
    try:
        out_dir.mkdir(parents=True, exist_ok=True)
        handle = os.open(out_dir, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        reason = f"cannot be used as output directory: {error.strerror}{moving_cache(out_dir)}"
        raise ArtifactError(f"{out_dir}: {reason}") from error
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    except BaseException:
        if not existed:
            with suppress(OSError):  # not empty: then another process uses it
                out_dir.rmdir()
        raise
    finally:
        os.close(handle)


def _identity(model: GgufModel) -> tuple[SourceFile, ...]:
    return tuple(SourceFile(_as_text(file.path.name), file.size_bytes, file.mtime_ns) for file in model.files)


def _as_text(name: str) -> str:
    r"""Return a file's name as JSON can hold it: bytes that are no UTF-8 as \xNN."""
    return os.fsencode(name).decode("utf-8", "backslashreplace")


def _finished(out_dir: Path, model: GgufModel, facts: ModelFacts, cuts: tuple[int, ...]) -> PipelineFile | None:
    """Return the description of an earlier split of the same files at the same cuts, if it is whole and unaltered.

    An earlier version made the slices of models with deepstack layers for text alone: these are made again.
    """
    try:
        found = load_pipeline(out_dir)
    except ArtifactError:
        return None
    if found.cuts != cuts or found.source.files != _identity(model):
        return None
    if found.deepstack_layers != facts.sidebands.deepstack_layers:
        return None
    for entry in found.artifacts:
        if isinstance(entry, StageFile) and entry.unread:
            continue  # there is nothing in it that could have changed
        try:
            is_whole = sha256_of(out_dir / entry.file) == entry.sha256  # remembered: it is rarely read
        except OSError:
            is_whole = False
        if not is_whole:
            log.warning("%s has changed since the split; splitting the model again", out_dir / entry.file)
            return None
    return found


def _refuse_foreign(out_dir: Path) -> None:
    """Raise UsageError if a file that a split would replace or remove is from no split: perhaps the model itself."""
    try:
        found = load_pipeline(out_dir, stages_here=False)
    except ArtifactError:  # it is missing or was cut off: then the files themselves tell where they come from
        ours = set[str]()
    else:
        ours = {artifact.file for artifact in found.artifacts}
    for path in sorted(out_dir.iterdir()):
        if ARTIFACT_NAME.match(path.name) and path.name not in ours and not _is_artifact(path):
            text = "does not come from a split and would be lost; move it away, or give another directory"
            raise UsageError(f"{path}: {text}")


def _is_artifact(path: Path) -> bool:
    try:
        return "relayline.pipeline_id" in open_model(path).entries
    except ModelFileError:
        return False


@dataclasses.dataclass(slots=True)
class _Writer:
    model: GgufModel
    facts: ModelFacts
    out_dir: Path
    progress: Progress | None
    probe: Probe | None
    trial: Trial | None
    written_bytes: int = 0
    total_bytes: int = 0

    def write(self, plan: SplitPlan) -> PipelineFile:
        """Write every artifact, then publish them together."""
        _remove_partials(self.out_dir)
        origins = origins_of(self.model)
        tokenizer, *stages = plan.artifacts
        self.total_bytes = tokenizer.size_bytes
        if not origins:
            self.total_bytes += sum(stage.size_bytes for stage in stages)
        self._check_space()
        try:
            hashes = [self.write_artifact(tokenizer)]
            for stage in stages:
                hashes.append(self.write_hollow(stage, origins) if origins else self.write_artifact(stage))
            if self.trial is not None:
                self._try(plan, self.trial)
            if self.probe is not None:
                self._probe(plan)
            return self._publish(plan, hashes)
        except BaseException:
            _remove_partials(self.out_dir)
            raise

    def _check_space(self) -> None:
        free_bytes = shutil.disk_usage(self.out_dir).free
        if free_bytes < self.total_bytes + DISK_MARGIN_BYTES:
            raise ArtifactError(
                f"{self.out_dir}: the split needs {self.total_bytes:,} bytes and {DISK_MARGIN_BYTES:,} to spare, but"
                f" only {free_bytes:,} are free there{moving_cache(self.out_dir)}"
            )

    def write_artifact(self, artifact: PlannedArtifact) -> str:
        """Write one file under its partial name and return its sha256."""
        digest = hashlib.sha256()
        path = _partial(self.out_dir / artifact.file)
        with local_files(self.model) as source, path.open("wb", buffering=0) as out:
            for piece in artifact_bytes(artifact, source):
                view = memoryview(piece)
                digest.update(view)
                while view:
                    view = view[out.write(view) :]
                self.written_bytes += len(piece)
                if self.progress is not None:
                    self.progress(self.written_bytes, self.total_bytes)
            os.fsync(out.fileno())
        return digest.hexdigest()

    def write_hollow(self, artifact: PlannedArtifact, origins: Sequence[Origin]) -> str:
        """Write a stage's file without its weights under its partial name and return the name of its content."""
        with _partial(self.out_dir / artifact.file).open("wb") as out:
            out.write(artifact.header)
            out.truncate(artifact.size_bytes)
            out.flush()
            os.fsync(out.fileno())
        return unread_name(artifact, origins)

    def _try(self, plan: SplitPlan, trial: Trial) -> None:
        problem = trial([_partial(self.out_dir / item.file) for item in plan.artifacts if item.layers is not None])
        if problem is not None:
            raise ModelFileError(f"{self.model.path}: llama.cpp cannot load its slices: {problem}")

    def _probe(self, plan: SplitPlan) -> None:
        assert self.probe is not None
        for artifact in plan.artifacts:
            problem = None if artifact.layers is None else self.probe(_partial(self.out_dir / artifact.file))
            if problem is not None and artifact.layers is not None:
                raise UnsupportedArchitectureError(
                    f"architecture {self.facts.architecture!r} cannot be split here: "
                    f"no stage can run {named_layers(*artifact.layers)}: {problem}"
                )

    def _publish(self, plan: SplitPlan, hashes: list[str]) -> PipelineFile:
        for file in self.model.files:
            status = file.path.stat()
            if (status.st_size, status.st_mtime_ns) != (file.size_bytes, file.mtime_ns):
                raise ModelFileError(f"{file.path}: changed while it was being split; run the split again")
        is_unread = bool(origins_of(self.model))
        pipeline = _described(plan, hashes, self.model, self.facts, is_unread=is_unread)
        (self.out_dir / PIPELINE_NAME).unlink(missing_ok=True)
        for artifact, sha256 in zip(plan.artifacts, hashes, strict=True):
            path = _partial(self.out_dir / artifact.file).replace(self.out_dir / artifact.file)
            if artifact.layers is None or not is_unread:
                remember_sha256(path, path.stat(), sha256)
        current = {artifact.file for artifact in plan.artifacts}
        for path in self.out_dir.iterdir():
            if ARTIFACT_NAME.match(path.name) and path.name not in current:
                path.unlink()
        _sync_directory(self.out_dir)
        store_pipeline(self.out_dir, pipeline)
        _sync_directory(self.out_dir)
        return pipeline


def _described(
    plan: SplitPlan, hashes: list[str], model: GgufModel, facts: ModelFacts, *, is_unread: bool
) -> PipelineFile:
    tokenizer, *stages = zip(plan.artifacts, hashes, strict=True)
    return PipelineFile(
        version=PIPELINE_VERSION,
        pipeline_id=plan.pipeline_id,
        source=Source(_identity(model), plan.source_key),
        architecture=facts.architecture,
        model_name=facts.model_name,
        n_layers=facts.n_layers,
        n_embd=facts.n_embd,
        n_vocab=facts.n_vocab,
        ctx_train=facts.ctx_train,
        deepstack_layers=facts.sidebands.deepstack_layers,
        cuts=plan.cuts,
        tokenizer=ArtifactFile(tokenizer[0].file, tokenizer[0].size_bytes, tokenizer[1]),
        stages=tuple(
            StageFile(
                index,
                artifact.file,
                artifact.size_bytes,
                sha256,
                start,
                end,
                facts.row_widths[start],
                facts.sidebands.values_into(start),
                is_unread,
            )
            for index, (artifact, sha256) in enumerate(stages)
            for start, end in [artifact.layers or (0, 0)]
        ),
    )


def _partial(path: Path) -> Path:
    return path.with_name(f".{path.name}{PARTIAL}")


def _remove_partials(directory: Path) -> None:
    for path in directory.glob(f".*{PARTIAL}"):
        path.unlink(missing_ok=True)


def _sync_directory(directory: Path) -> None:
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
