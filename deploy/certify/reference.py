"""The unsplit side of `certify`: its own runs, its noise between batch shapes, its logits for the pipeline's tokens.

The model runs in a separate process. It is open only during a question, so that it and a pipeline never hold memory at
the same time. Blocking; the driver calls it in a thread and `check_stop` ends it between two decodes.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from relayline.deploy.certify.compare import Comparison, Logits, Noise, compare
from relayline.deploy.certify.whole_model import Row, WholeConfig
from relayline.deploy.certify.whole_process import WholeProcess
from relayline.deploy.certify.workload import PREFILL_CHUNK_ROWS, Run, Script
from relayline.stage.sampling.sampler import SamplingOptions, SessionSampler


class Piece(NamedTuple):
    """The rows of one session in one decode: positions from start up to, not including, end."""

    session: int
    start: int
    end: int


Step = list[Piece]


@dataclasses.dataclass(frozen=True, slots=True)
class Extent:
    """Of one session: tokens in its prompt and in its whole history."""

    n_prompt: int
    n_total: int


def served(extent: Extent, session: int, chunk_rows: int) -> list[Piece]:
    """Return one session's rows as a pipeline feeds them: prompt chunks, then one row at a time."""
    edges = [*range(0, extent.n_prompt, chunk_rows), *range(extent.n_prompt, extent.n_total + 1)]
    return [Piece(session, start, end) for start, end in itertools.pairwise(edges)]


def one_after_another(extents: Sequence[Extent], chunk_rows: int, max_rows: int) -> list[Step]:
    """Every session as it is served alone: the reference."""
    return [[piece] for session, extent in enumerate(extents) for piece in served(extent, session, chunk_rows)]


def one_prefill(extents: Sequence[Extent], chunk_rows: int, max_rows: int) -> list[Step]:
    """Every session's whole history at once."""
    return [
        [Piece(session, start, min(start + max_rows, extent.n_total))]
        for session, extent in enumerate(extents)
        for start in range(0, extent.n_total, max_rows)
    ]


def row_by_row(extents: Sequence[Extent], chunk_rows: int, max_rows: int) -> list[Step]:
    """Every session one row at a time, prompt too."""
    return [[Piece(session, at, at + 1)] for session, extent in enumerate(extents) for at in range(extent.n_total)]


def mixed(extents: Sequence[Extent], chunk_rows: int, max_rows: int) -> list[Step]:
    """All sessions together, each as served: short prompts already decode while long ones still prefill."""
    queues = [served(extent, session, chunk_rows) for session, extent in enumerate(extents)]
    steps: list[Step] = []
    for together in itertools.zip_longest(*queues):
        step: Step = []
        for piece in (piece for piece in together if piece is not None):
            if sum(each.end - each.start for each in step) + piece.end - piece.start > max_rows:
                steps.append(step)
                step = []
            step.append(piece)
        steps.append(step)
    return steps


Shape = Callable[[Sequence[Extent], int, int], list[Step]]
SHAPES: dict[str, Shape] = {
    "other cells": one_after_another,  # all sessions in one cache, as each finds it after the ones before
    "one prefill": one_prefill,
    "row by row": row_by_row,
    "mixed": mixed,
}


class Reference:
    """Asks the unsplit model. Keeps the logits of its own runs, because a sound split mostly repeats their tokens."""

    def __init__(self, config: WholeConfig, check_stop: Callable[[], None] = lambda: None) -> None:
        self.config, self._check_stop = config, check_stop
        self._known: dict[tuple[tuple[int, ...], int], Logits] = {}

    def measure(
        self, batches: Iterable[Sequence[Script]], n_tokens: int, progress: Callable[[int], None] = lambda _: None
    ) -> Noise:
        """Run every script, then its tokens again in the same and in every other shape; return how far that differs.

        `progress` gets the number of batches done. Raises ModelFileError or NativeError.
        """
        own: list[Run] = []
        again: list[Run] = []
        others: dict[str, list[Run]] = {name: [] for name in SHAPES}
        with WholeProcess(self.config) as model:
            for n_done, batch in enumerate(batches, 1):
                runs = [self._generate(model, script, n_tokens) for script in batch]
                own += runs
                again += [each for run in runs for each in self._forced(model, [run], one_after_another)]
                for name, shape in SHAPES.items():
                    others[name] += self._forced(model, runs, shape)
                progress(n_done)
        for run in own:
            self._known[_key(run)] = run.logits

        def against_own(found: list[Run]) -> Comparison:
            return compare([(run.logits, other) for run, other in zip(own, found, strict=True)])

        return Noise(against_own(again), {name: against_own(found) for name, found in others.items()})

    def logits_for(self, runs: Sequence[Run]) -> list[Logits]:
        """Return the unsplit model's logits for the tokens of each run: f32 [n_tokens, n_vocab] per run."""
        missing = {_key(run): run for run in runs if _key(run) not in self._known}
        found: dict[tuple[tuple[int, ...], int], Logits] = {}
        if missing:
            with WholeProcess(self.config) as model:
                for key, run in missing.items():
                    found[key] = self._forced(model, [run], one_after_another)[0].logits
        return [self._known[_key(run)] if _key(run) in self._known else found[_key(run)] for run in runs]

    def _generate(self, model: WholeProcess, script: Script, n_tokens: int) -> Run:
        """Let the model continue one script with the very sampler that stages have."""
        sampler = SessionSampler(SamplingOptions(temperature=script.temperature, seed=script.seed), model.n_vocab)
        n_prompt, history = len(script.prompt), list(script.prompt)
        logits = np.empty((n_tokens, model.n_vocab), np.float32)
        model.clear()
        for piece in served(Extent(n_prompt, n_prompt + n_tokens - 1), 0, PREFILL_CHUNK_ROWS):
            self._check_stop()
            chooses = piece.end >= n_prompt
            last = piece.end - 1
            found = model.decode(
                [Row(history[at], at, 0, chooses and at == last) for at in range(piece.start, piece.end)]
            )
            if chooses:
                logits[piece.end - n_prompt] = found[0]
                history.append(sampler.sample(found[0], piece.end).token)
        sampler.close()
        return Run(script, tuple(history[n_prompt:]), logits)

    def _forced(self, model: WholeProcess, runs: Sequence[Run], shape: Shape) -> list[Run]:
        """Feed the runs' own tokens in the given shape; return the runs with the logits that come out."""
        extents = [Extent(len(run.script.prompt), len(run.history)) for run in runs]
        found = [np.empty((len(run.tokens), model.n_vocab), np.float32) for run in runs]
        model.clear()
        for step in shape(extents, PREFILL_CHUNK_ROWS, self.config.settings.max_rows):
            self._check_stop()
            rows: list[Row] = []
            targets: list[tuple[int, int]] = []
            for piece in step:
                first_wanted = extents[piece.session].n_prompt - 1
                for at in range(piece.start, piece.end):
                    rows.append(Row(runs[piece.session].history[at], at, piece.session, at >= first_wanted))
                    if at >= first_wanted:
                        targets.append((piece.session, at - first_wanted))
            for (session, row), logits in zip(targets, model.decode(rows), strict=True):
                found[session][row] = logits
        return [dataclasses.replace(run, logits=logits) for run, logits in zip(runs, found, strict=True)]


def _key(run: Run) -> tuple[tuple[int, ...], int]:
    return run.history, len(run.script.prompt)
