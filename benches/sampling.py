"""The cost of picking a token, by options and by distribution: `python -m benches.sampling [--quick] [--out FILE]`.

`--together` measures the rows of a step instead: sampler by sampler, together, and with their noise computed before.
`--on-device` measures what they cost the host if their logits stay on a device; memory stands for that here.

One thread picks from rows of 128,256 logits. The clock is the thread's processor time, which other work on the host
moves less than it moves the wall clock. The bench also counts picks that differ from a plain reference: sort the row,
cut it, and time every token that is left. `--out` writes benches/results/sampling.json, sampling_together.json or
sampling_on_device.json.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.table import Table

from benches.origin import origin
from relayline.deploy.cli.load import percentile
from relayline.stage.sampling.draws import BLOCKS_FROM, Draws, noise_keys
from relayline.stage.sampling.rows import Ask, DeviceRow, prepare_noise, sample_on_device, sample_rows
from relayline.stage.sampling.sampler import SamplingOptions, SessionSampler

N_VOCAB, N_VOCAB_QUICK = 128_256, 2_048
PICKS, PICKS_QUICK = 400, 8
N_ROWS = 16
CASES, CASES_QUICK = 400, 24
EDGE = 1e-5  # a row whose cumulative sum comes so near to top-p has more than one right cut
SEED = 5
STEPS, STEPS_QUICK = 24, 2
LOW = 0.2  # the percentile that is shown: the host is busy with other work, which only adds
TOGETHER = (1, 8, 32, 64)  # rows of a step
N_LIKELY = 300  # tokens of a row that are far above the rest, as a model's are

Logits = npt.NDArray[np.float32]

DISTRIBUTIONS = {"flat": (0.01, 0.0), "normal": (2.0, 0.0), "wide": (8.0, 0.0), "peaked": (3.0, 14.0)}
OPTIONS: dict[str, SamplingOptions] = {
    "greedy": SamplingOptions(temperature=0),
    "temperature": SamplingOptions(seed=SEED),
    "top-k 40": SamplingOptions(seed=SEED, top_k=40),
    "min-p .05": SamplingOptions(seed=SEED, min_p=0.05),
    "top-p .9": SamplingOptions(seed=SEED, top_p=0.9),
    "top-p .5": SamplingOptions(seed=SEED, top_p=0.5),
    "top-k 1,000, top-p .95, min-p .05": SamplingOptions(seed=SEED, top_k=1_000, top_p=0.95, min_p=0.05),
    "temperature, penalties, bias": SamplingOptions(seed=SEED, frequency_penalty=0.2, logit_bias=((7, 1.0),)),
    "temperature, logprobs 5": SamplingOptions(seed=SEED, n_logprobs=5),
}

STEP_OPTIONS: dict[str, SamplingOptions] = {
    "temperature": SamplingOptions(),
    "temperature .7, top-p .9": SamplingOptions(temperature=0.7, top_p=0.9),
    "top-k 40": SamplingOptions(top_k=40),
    "min-p .05": SamplingOptions(min_p=0.05),
    "temperature, penalties, bias": SamplingOptions(frequency_penalty=0.2, logit_bias=((7, 1.0),)),
}


def likely_rows(n_vocab: int, n_rows: int) -> Logits:
    """Return rows as a language model gives them: some hundred likely tokens above a wide floor."""
    rng = np.random.default_rng(4)
    rows = (rng.standard_normal((n_rows, n_vocab)) * 2.0 - 2.0).astype(np.float32)
    for row in rows:
        ranks = np.log1p(np.arange(N_LIKELY) * rng.uniform(0.3, 3))
        row[rng.permutation(n_vocab)[:N_LIKELY]] = 16 - 2.2 * ranks + rng.standard_normal(N_LIKELY) * 0.5
    return rows


def rows_of(name: str, n_vocab: int, n_rows: int = N_ROWS) -> Logits:
    """Return rows of logits: normal ones, with possibly one token far above the rest."""
    spread, lead = DISTRIBUTIONS[name]
    rows = (np.random.default_rng(2).standard_normal((n_rows, n_vocab)) * spread).astype(np.float32)
    rows[:, 77] += np.float32(lead)
    return rows


def picks_us(options: SamplingOptions, rows: Logits, n_picks: int) -> list[float]:
    """Return the thread's processor time of each of so many picks."""
    sampler, taken_us = SessionSampler(options, rows.shape[1]), list[float]()
    for position in range(n_picks):
        row = rows[position % len(rows)]
        started_ns = time.thread_time_ns()
        sampler.sample(row, position)
        taken_us.append((time.thread_time_ns() - started_ns) / 1e3)
    return taken_us


def plain_pick(logits: Logits, options: SamplingOptions, position: int, draws: Draws) -> int | None:
    """Return the pick of a plain implementation; None if top-p's cut depends on rounding."""
    wide = logits.astype(np.float64)
    order = np.lexsort((np.arange(logits.size), -wide))
    order = order[: options.top_k or None]
    weights = np.exp(wide[order] - wide.max())
    if options.top_p < 1:
        before = (np.cumsum(weights) - weights) / weights.sum()
        if np.abs(before[1:] - options.top_p).min(initial=1.0) < EDGE * np.sqrt(weights.max() / weights.sum()):
            return None
        order = order[: max(1, int((before < options.top_p).sum()))]
    if options.min_p > 0:
        order = order[logits[order] >= np.float32(float(logits.max()) + math.log(options.min_p))]
    kept = np.sort(order)
    arrivals = np.log(draws.noise(kept, noise_keys(options.seed, position))) - wide[kept] / options.temperature
    return int(kept[arrivals.argmin()])


def exactness(n_vocab: int, n_cases: int) -> tuple[int, int]:
    """Return how many random rows and options were compared with the plain reference, and how many picks differed."""
    rng, draws, n_compared, n_wrong = np.random.default_rng(9), Draws(n_vocab), 0, 0
    for position in range(n_cases):
        logits = (rng.standard_normal(n_vocab) * rng.choice([0.01, 1.0, 2.0, 8.0])).astype(np.float32)
        options = SamplingOptions(
            temperature=float(rng.choice([0.3, 0.8, 1.0, 2.0])),
            top_k=int(rng.choice([0, 0, 1, 40, 1_000])),
            top_p=float(rng.choice([1.0, 0.95, 0.5, 0.05])),
            min_p=float(rng.choice([0.0, 0.0, 0.02, 0.5])),
            seed=int(rng.integers(1 << 62)),
        )
        wanted = plain_pick(logits, options, position, draws)
        if wanted is not None:
            n_compared += 1
            n_wrong += SessionSampler(options, n_vocab).sample(logits, position).token != wanted
    return n_compared, n_wrong


def step_us(options: SamplingOptions, rows: Logits, n_steps: int) -> tuple[list[float], list[float], list[float]]:
    """Return the processor time a row of so many steps: one by one, together, and together with noise made before.

    All in turns. Raises RuntimeError if their tokens differ.
    """
    n_vocab, found = rows.shape[1], (list[float](), list[float](), list[float]())
    samplers = [SessionSampler(dataclasses.replace(options, seed=SEED + row), n_vocab) for row in range(len(rows))]
    for position in range(n_steps):
        asks = [Ask(sampler, row, position) for sampler, row in zip(samplers, rows, strict=True)]

        def alone(asks: list[Ask] = asks) -> list[object]:
            return [sampler.sample(row, at) for sampler, row, at in asks]

        def together(asks: list[Ask] = asks) -> list[object]:
            return list(sample_rows(asks))

        results: list[list[object]] = []
        for way, taken_us in zip((alone, together, together), found, strict=True):
            if taken_us is found[2]:
                prepare_noise(n_vocab, [(sampler, at) for sampler, _, at in asks])
            started_ns = time.thread_time_ns()
            results.append(way())
            taken_us.append((time.thread_time_ns() - started_ns) / 1e3 / len(rows))
        if results[0] != results[1] or results[0] != results[2]:
            raise RuntimeError(f"rows that were drawn together said something else at position {position}: {options}")
    return found


def measure_together(n_vocab: int, n_steps: int) -> dict[str, object]:
    """Return the measurement of steps, as `measure` does."""
    found = []
    for kind in ("like a model's", "normal"):
        rows = likely_rows(n_vocab, max(TOGETHER)) if kind != "normal" else rows_of(kind, n_vocab, max(TOGETHER))
        for label, options in STEP_OPTIONS.items():
            times = [step_us(options, rows[:n_rows], n_steps) for n_rows in TOGETHER]
            chosen = [times[-1][0], *(each[1] for each in times), times[-1][2]]
            values = [round(percentile(taken_us, LOW)) for taken_us in chosen]
            found.append({"label": f"{label}; rows {kind}", "values": values})
    last = f"{max(TOGETHER)} rows"
    return {
        "corner": "us of processor time a row",
        "columns": [f"{last}, one by one", *(f"{n} together" for n in TOGETHER), f"{last}, noise before"],
        "rows": found,
    }


class RowsInMemory:
    """Stands for a device with rows of logits; counts what would travel, and the time that is not the host's."""

    gives_parts = True

    def __init__(self, rows: Logits, draws: Draws) -> None:
        self._rows, self._maxima = rows, np.stack([draws.maxima(row).copy() for row in rows])
        self._best = rows.argmax(1).tolist()
        self.n_bytes = self.n_questions = self.busy_ns = 0

    def token(self, row: int) -> int | None:
        """Return the token of a row's largest logit."""
        best: int = self._best[row]
        return best

    def maxima(self, rows: Sequence[int]) -> Logits:
        """Return the largest logit of each block of some rows."""
        found: Logits = self._maxima[[*rows]]
        return self._timed(found, time.thread_time_ns())

    def gathered(self, rows: Sequence[int], at: npt.NDArray[np.int64], tokens: npt.NDArray[np.int64]) -> Logits:
        """Return the logits of some tokens of some rows."""
        began_ns = time.thread_time_ns()
        return self._timed(self._rows[np.array(rows)[at], tokens], began_ns)

    def _timed(self, answer: Logits, began_ns: int) -> Logits:
        self.n_bytes += answer.nbytes
        self.n_questions += 1
        self.busy_ns += time.thread_time_ns() - began_ns
        return answer


def measure_on_device(n_vocab: int, n_steps: int) -> dict[str, object]:
    """Return what draws from rows on a device cost the host, as `measure` does. Raises RuntimeError as `step_us`."""
    found, n_rows, draws = [], max(TOGETHER), Draws(n_vocab)
    for kind in ("like a model's", "wide", "normal", "flat"):
        rows = likely_rows(n_vocab, n_rows) if kind not in DISTRIBUTIONS else rows_of(kind, n_vocab, n_rows)
        for label in ("temperature", "temperature .7, top-p .9", "min-p .05"):
            options, device = STEP_OPTIONS[label], RowsInMemory(rows, draws)
            samplers = [SessionSampler(dataclasses.replace(options, seed=SEED + row), n_vocab) for row in range(n_rows)]
            taken_us, n_whole = list[float](), 0
            for position in range(n_steps):
                prepare_noise(n_vocab, [(sampler, position) for sampler in samplers])
                device.busy_ns, started_ns = 0, time.thread_time_ns()
                answers = sample_on_device(
                    device, [DeviceRow(each, row, position) for row, each in enumerate(samplers)]
                )
                taken_us.append((time.thread_time_ns() - started_ns - device.busy_ns) / 1e3 / n_rows)
                n_whole += answers.count(None)
                wanted = sample_rows([Ask(each, row, position) for each, row in zip(samplers, rows, strict=True)])
                if any(one is not None and one != other for one, other in zip(answers, wanted, strict=True)):
                    raise RuntimeError(f"a row on the device said something else at position {position}: {options}")
            n_asked = n_steps * n_rows
            values = [percentile(taken_us, LOW), device.n_bytes / n_asked / 1e3, 100 * n_whole / n_asked]
            found.append({"label": f"{label}; rows {kind}", "values": [round(each) for each in values]})
            found[-1]["values"].append(round(device.n_questions / n_steps))  # type: ignore[attr-defined]
    columns = ["us of processor time a row", "kB of a row that travel", "% that need the whole row", "questions a step"]
    return {"corner": f"{n_rows} rows on a device", "columns": columns, "rows": found}


def measure(n_vocab: int, n_picks: int, n_cases: int) -> dict[str, object]:
    """Return the measurement in the form of benches/results, but for machine, date and commit."""
    rows = []
    for label, options in OPTIONS.items():
        values: list[float] = []
        for name in DISTRIBUTIONS:
            logits = rows_of(name, n_vocab)
            picks_us(options, logits, 4)
            taken_us = picks_us(options, logits, n_picks)
            values += [round(percentile(taken_us, share)) for share in (0.5, 0.99)]
        rows.append({"label": label, "values": values})
    n_compared, n_wrong = exactness(n_vocab, n_cases)
    return {
        "corner": "us of processor time a pick",
        "columns": [f"{name}, {share}" for name in DISTRIBUTIONS for share in ("p50", "p99")],
        "exactness": {"cases": n_compared, "different": n_wrong},
        "rows": rows,
    }


def main() -> None:
    """Measure, print, and write the results if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a small vocabulary and few picks")
    parser.add_argument("--together", action="store_true", help="rows of a step, one by one and together")
    parser.add_argument("--on-device", action="store_true", help="rows of a step whose logits stay on a device")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the measurement to this file")
    parser.add_argument("--machine", default="busy", help="its name in benches/results/machines.json")
    arguments = parser.parse_args()
    sizes = (N_VOCAB_QUICK, PICKS_QUICK, CASES_QUICK) if arguments.quick else (N_VOCAB, PICKS, CASES)
    if arguments.on_device:
        found = measure_on_device(
            sizes[0] if not arguments.quick else BLOCKS_FROM, STEPS_QUICK if arguments.quick else STEPS
        )
    elif arguments.together:
        found = measure_together(sizes[0], STEPS_QUICK if arguments.quick else STEPS)
    else:
        found = measure(*sizes)
    table = Table(str(found["corner"]), *found["columns"])  # type: ignore[misc]
    for row in found["rows"]:  # type: ignore[attr-defined]
        table.add_row(row["label"], *map(str, row["values"]))
    Console().print(table, found.get("exactness", ""))
    if arguments.out:
        arguments.out.write_text(json.dumps(origin("benches.sampling", arguments.machine) | found, indent=2) + "\n")


if __name__ == "__main__":
    main()
