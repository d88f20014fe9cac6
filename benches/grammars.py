"""The cost of a grammar per token: `python -m benches.grammars [--quick]`.

The last stage's sampler picks from random logits, greedy and drawn, without a grammar and with several. The vocabulary
has a real size and words of one to eight letters, so its prefix tree is as wide as a real one. The bench prints the
median and the 95th percentile of one pick in microseconds. It also prints the time to read the vocabulary at start, to
check a grammar at the coordinator, and to start it at the stage.
"""

from __future__ import annotations

import argparse
import functools
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
from rich.console import Console
from rich.table import Table

from benches import models
from relayline.coordinator.http.requests.structure import Shape, grammar_of
from relayline.coordinator.text.tokenizer import Tokenizer
from relayline.deploy.cli.load import percentile
from relayline.stage.sampling.constraint import read_vocabulary
from relayline.stage.sampling.sampler import SamplingOptions, SessionSampler

N_VOCAB, N_VOCAB_QUICK = 128_256, 4_096
PICKS, PICKS_QUICK = 400, 40
REPEATS = 5
LETTERS = np.array(list("etaoinshrdlucmfwypvbgkjxqz0123456789_.,:;\"'(){}[]<>+-*/="))  # often first
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "languages": {"type": "array", "items": {"enum": ["de", "en", "fr"]}},
        "address": {"type": "object", "properties": {"street": {"type": "string"}, "city": {"type": "string"}}},
    },
    "required": ["name", "age", "languages", "address"],
}
SHAPES = {
    "any": None,
    "any JSON": Shape("json", "json", ("{}",)),
    "a person in JSON": Shape("json", "json", (json.dumps(PERSON),)),
    "a regular expression": Shape("regex", "regex", (r"([a-z]+ ){20,}",)),
    "one of 1,000": Shape("choice", "choice", tuple(f"number {number}" for number in range(1_000))),
}


def write_vocabulary(path: Path, n_vocab: int) -> None:
    """Write a byte-level vocabulary of bytes, words and an end: a GGUF without tensors."""
    rng = np.random.default_rng(1)
    n_words = n_vocab - 257
    words: set[str] = set()
    while len(words) < n_words:
        drawn = LETTERS[np.minimum(rng.geometric(0.06, (n_words, 8)) - 1, LETTERS.size - 1)]
        words.update("".join(row[:length]) for row, length in zip(drawn, rng.integers(2, 9, n_words), strict=True))
    bytes_and_end, _, merges = models.vocabulary(257)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([*bytes_and_end[:-1], *sorted(words)[:n_words], bytes_and_end[-1]])
    writer.add_token_types([gguf.TokenType.NORMAL] * (n_vocab - 1) + [gguf.TokenType.CONTROL])
    writer.add_token_merges(merges)
    writer.add_eos_token_id(n_vocab - 1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()


def picks_us(start: Callable[[], SessionSampler], n_picks: int, n_vocab: int) -> list[float]:
    """Return what each of so many picks took; an answer that ends is followed by another."""
    logits = np.random.default_rng(2).standard_normal((16, n_vocab)).astype(np.float32)
    logits[:, -1] -= 5.0  # an end is rare
    sampler, taken_us = start(), list[float]()
    for position in range(n_picks):
        started_ns = time.perf_counter_ns()
        token = sampler.sample(logits[position % 16], position).token
        taken_us.append((time.perf_counter_ns() - started_ns) / 1e3)
        if token == n_vocab - 1:
            sampler = start()
    return taken_us


def ms_of(work: Callable[[], object]) -> float:
    """Return the median of a few runs in milliseconds."""
    taken_ms = []
    for _ in range(REPEATS):
        started_ns = time.perf_counter_ns()
        work()
        taken_ms.append((time.perf_counter_ns() - started_ns) / 1e6)
    return percentile(taken_ms, 0.5)


def measure(n_vocab: int, n_picks: int) -> Table:
    """Return the table of one vocabulary."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "vocabulary.gguf"
        write_vocabulary(path, n_vocab)
        tokenizer = Tokenizer.load(path)
        started_ns = time.perf_counter_ns()
        vocabulary = read_vocabulary(tokenizer._vocab, n_vocab)
        read_ms = (time.perf_counter_ns() - started_ns) / 1e6
        table = Table(title=f"{n_vocab:,} tokens, read at start in {read_ms:.0f} ms")
        for title in ("answers", "check ms", "start ms", "greedy us p50", "p95", "drawn us p50", "p95"):
            table.add_column(title, justify="left" if title == "answers" else "right")
        for name, shape in SHAPES.items():
            grammar = grammar_of(shape) if shape else ""

            def start(temperature: float = 0.0, grammar: str = grammar) -> SessionSampler:
                options = SamplingOptions(temperature=temperature, seed=3, grammar=grammar)
                return SessionSampler(options, n_vocab, (), vocabulary)

            figures = [f"{ms_of(functools.partial(grammar_of, shape) if shape else str):.2f}", f"{ms_of(start):.2f}"]
            for temperature in (0.0, 1.0):
                taken_us = picks_us(functools.partial(start, temperature), n_picks, n_vocab)
                figures += [f"{percentile(taken_us, share):.0f}" for share in (0.5, 0.95)]
            table.add_row(name, *figures)
        tokenizer.close()
        return table


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a small vocabulary and few picks")
    arguments = parser.parse_args()
    Console().print(measure(*((N_VOCAB_QUICK, PICKS_QUICK) if arguments.quick else (N_VOCAB, PICKS))))


if __name__ == "__main__":
    main()
