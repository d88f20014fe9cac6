"""Compares two sets of logits over the same tokens and judges whether a split may be trusted. Pure.

Differences are in units of the logits' own standard deviation ("deviation" below), since models scale their logits
differently. The verdicts rest on:

* f32 wire, one session alone. Both sides see the same batches, so on a CPU they agree to the last bit; FLOOR allows for
  compilers and kernels that fuse across layers. Required of runs without a GPU only: there, kernels fuse and split work
  differently for a part of a graph.
* f32 wire, sessions together. llama.cpp adds up in another order for another batch shape, a quantised model rounds its
  activations again in every layer, and a router near a tie then picks another expert. The size of that effect is
  measured on the unsplit model itself (`Noise`), and a split may have NOISE_FACTOR times as much. The largest
  difference alone could hide a small error everywhere behind one large flip. So mean KL divergence is bounded too, with
  the factor squared: it grows with the square of the error.
* f16 wire. Rounding to 11 bits moves logits by design, so only a difference that a user would notice counts: another
  top token. A flip between two near-equal tokens means nothing; one across a margin needs two logits wrong by half of
  it each. Allowed is MARGIN (rounding alone moves logits by 0.002 to 0.004 deviations) or NOISE_FACTOR times the noise,
  twice the need of two logits. It never exceeds MARGIN_MAX, for any model.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from relayline.deploy.certify.workload import Run

FLOOR = 1e-3  # deviations
NOISE_FACTOR = 4.0  # the noise was measured on a few shapes only, and a maximum over few rows falls short
MARGIN, MARGIN_MAX = 0.05, 0.5  # deviations

Logits = npt.NDArray[np.float32]


@dataclasses.dataclass(frozen=True, slots=True)
class Disagreement:
    """One row at which the two sides prefer different tokens."""

    session: str
    position: int  # of the predicted token in its session
    reference_token: int
    found_token: int
    margin: float  # reference logit of its own token minus that of the other
    relative_margin: float  # the same in deviations


@dataclasses.dataclass(frozen=True, slots=True)
class Comparison:
    """How far one side is from the other over all rows."""

    n_rows: int
    deviation: float  # of the reference logits: root of the mean variance of a row
    max_abs: float  # largest difference of any logit; infinite if any logit is not a number on one side only
    mean_kl: float  # nats, of the whole vocabulary's softmax, reference against the other
    n_agree: int  # rows with the same top token
    first: Disagreement | None
    widest: Disagreement | None  # the one with the largest margin

    @property
    def max_relative(self) -> float:
        """Return the largest difference in deviations."""
        return self.max_abs / self.deviation if self.deviation > 0 else math.inf if self.max_abs else 0.0

    @property
    def agreement(self) -> float:
        """Return the share of rows with the same top token."""
        return self.n_agree / self.n_rows


@dataclasses.dataclass(frozen=True, slots=True)
class Noise:
    """How far the unsplit model is from itself: run again, and when the same tokens come in other batch shapes."""

    again: Comparison
    by_shape: Mapping[str, Comparison]

    @property
    def max_relative(self) -> float:
        """Return the largest difference in deviations over all shapes."""
        return max(shape.max_relative for shape in self.by_shape.values())

    @property
    def mean_kl(self) -> float:
        """Return the largest mean KL divergence over all shapes, nats."""
        return max(shape.mean_kl for shape in self.by_shape.values())

    @property
    def deviation(self) -> float:
        """Return the logits' deviation."""
        return self.again.deviation


@dataclasses.dataclass(frozen=True, slots=True)
class Tolerance:
    """The differences that a split may have."""

    alone_relative: float | None  # f32: largest difference of sessions alone, deviations; None: as max_relative
    max_relative: float  # f32: largest difference, deviations
    mean_kl: float  # f32: nats
    margin: float  # f16: margin of a top-1 disagreement, deviations


def tolerance_for(noise: Noise, *, same_kernels: bool) -> Tolerance:
    """Return what to grant a split of a model with this noise.

    `same_kernels`: both sides run on a CPU only, and add the same values up in the same order.
    """
    # For a small error e in every logit the divergence is at most e squared over two.
    kl_floor = (FLOOR * noise.deviation) ** 2 / 2
    return Tolerance(
        alone_relative=max(FLOOR, NOISE_FACTOR * noise.again.max_relative) if same_kernels else None,
        max_relative=max(FLOOR, NOISE_FACTOR * noise.max_relative),
        mean_kl=max(kl_floor, NOISE_FACTOR**2 * noise.mean_kl),
        margin=min(MARGIN_MAX, max(MARGIN, NOISE_FACTOR * noise.max_relative)),
    )


def verdict(every: Comparison, alone: Comparison, tolerance: Tolerance, *, is_exact: bool) -> str | None:
    """Return why a split is not to be trusted, in one line, or None when it may be.

    `every` compares all sessions, `alone` those that ran alone. `is_exact` means an f32 wire.
    """
    if not math.isfinite(every.max_relative) or not math.isfinite(every.mean_kl):
        return "logits are not finite"
    if not is_exact:
        return _flip_beyond(every.widest, tolerance.margin)
    granted = tolerance.alone_relative
    if granted is not None and alone.max_relative > granted:
        return (
            f"a session alone differs by {alone.max_relative:.2g} deviations, beyond float noise ({granted:.2g} "
            "for the same batches)"
        )
    if every.max_relative > tolerance.max_relative:
        return f"differs by {every.max_relative:.2g} deviations, beyond float noise ({tolerance.max_relative:.2g})"
    if every.mean_kl > tolerance.mean_kl:
        return f"mean KL divergence is {every.mean_kl:.2g}, beyond float noise ({tolerance.mean_kl:.2g})"
    return None


def _flip_beyond(widest: Disagreement | None, margin: float) -> str | None:
    if widest is None or widest.relative_margin <= margin:
        return None
    return (
        f"another top token across a margin of {widest.relative_margin:.2g} deviations, beyond {margin:.2g} "
        f"({widest.session}, position {widest.position})"
    )


def kl_divergence(reference: Logits, found: Logits) -> npt.NDArray[np.float64]:
    """Return KL(softmax(reference) || softmax(found)) of each row in nats: f64 [n] from two f32 [n, n_vocab]."""
    log_p, log_q = _log_softmax(reference), _log_softmax(found)
    terms = np.exp(log_p) * _difference(log_p, log_q)
    return np.asarray(np.maximum(terms.sum(axis=1), 0.0))  # rounding can make a divergence of nothing negative


def compare(pairs: Sequence[tuple[Logits, Run]]) -> Comparison:
    """Hold each run's logits against the reference's for the same rows, both f32 [n_tokens, n_vocab]; at least one."""
    n_rows = n_agree = 0
    variance = max_abs = kl = 0.0
    found_at: list[Disagreement] = []
    with np.errstate(invalid="ignore", over="ignore"):  # a value that is not finite gives an infinite difference
        for reference, run in pairs:
            n_rows += len(reference)
            variance += float(reference.astype(np.float64).var(axis=1).sum())
            difference = float(np.abs(_difference(reference, run.logits)).max())
            max_abs = max(max_abs, difference if math.isfinite(difference) else math.inf)
            kl += float(kl_divergence(reference, run.logits).sum())
            ours, theirs = reference.argmax(axis=1), run.logits.argmax(axis=1)
            n_agree += int((ours == theirs).sum())
            found_at += [
                _disagreement(reference, run, int(row), int(theirs[row])) for row in np.nonzero(ours != theirs)[0]
            ]
    deviation = math.sqrt(variance / n_rows)
    found_at = [dataclasses.replace(each, relative_margin=each.margin / deviation) for each in found_at]
    return Comparison(
        n_rows=n_rows,
        deviation=deviation,
        max_abs=max_abs,
        mean_kl=kl / n_rows,
        n_agree=n_agree,
        first=found_at[0] if found_at else None,
        widest=max(found_at, key=lambda each: each.margin, default=None),
    )


def _disagreement(reference: Logits, run: Run, row: int, found: int) -> Disagreement:
    own = int(reference[row].argmax())
    margin = float(reference[row, own]) - float(reference[row, found])
    return Disagreement(run.script.label, len(run.script.prompt) + row, own, found, margin, math.nan)


def _difference(left: npt.NDArray[np.floating], right: npt.NDArray[np.floating]) -> npt.NDArray[np.float64]:
    """Subtract in f64; equal infinities (tokens that a model masks) differ by nothing."""
    return np.where(left == right, 0.0, left.astype(np.float64) - right.astype(np.float64))


def _log_softmax(logits: Logits) -> npt.NDArray[np.float64]:
    shifted = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True)))
