"""The unsplit model's greedy tokens, and the distance of a given answer from them. Runs as a separate process. Two
servers that batch differently add the same numbers in another order, and f16 rows between stages are rounded. Now and
then this flips a near-tie, and from there on the histories differ. So an answer that differs from the reference is fed
to the unsplit model. At every position the chosen token must be the best one, or closer to the best than `near_tie`
deviations of the logits at that position. A wrong hidden state misses that by far: a random token lies about six below.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import itertools
import json
import os
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

import numpy as np

from benches.peers import LIBRARIES
from relayline.deploy.build import built_with
from relayline.wire.common.places import cache_dir

# Deviations of the logits. Products with quantised weights round activations to 8 bits, which makes differences in the
# last bit visible. llama.cpp has two kernels for Q4_0: a repacked one for local models, and a plain one for models
# behind its RPC. In an unsplit llama-1b they move the best token's logit by 0.08 deviations on average. The tokens they
# choose lie up to 0.4 apart (0.52 in 14,000 tokens of answers of 200). An f16 cut moves the logit by 0.03, or by 0.002
# with F16 weights.
NEAR_TIE_QUANTISED, NEAR_TIE_F16 = 0.6, 0.05
BATCH_SEQUENCES = 16
Prompt = tuple[int, ...]
Answer = tuple[int, ...]
Adapters = Sequence[tuple[Path, float]]  # LoRA files with their scales


@dataclasses.dataclass(frozen=True, slots=True)
class Verdict:
    """How one answer compares with the unsplit model's."""

    agrees: bool
    n_exact: int  # leading tokens that equal the reference's
    worst_gap: float  # deviations of the logits below the best token; 0.0 for an exact answer


def near_tie(mix: str) -> float:
    """Return how far below the best a token may lie, in deviations of the logits, for a model of this weight mix."""
    return NEAR_TIE_F16 if mix == "f16" else NEAR_TIE_QUANTISED


def judge(answer: Answer, expected: Answer | None, gaps: Sequence[float] | None, tie: float) -> Verdict:
    """Compare an answer with the reference's. If that is unknown, only the distances of its tokens below the best
    count.

    `gaps` holds, for every token of the answer, how far it lay below the best one (see `score`); None is allowed only
    for an answer that is exact. `tie` is the largest gap that still agrees. Pure.
    """
    if expected is None:
        if gaps is None or len(gaps) != len(answer):
            return Verdict(False, 0, float("inf"))
        worst = max(gaps, default=0.0)
        return Verdict(worst <= tie, next((at for at, gap in enumerate(gaps) if gap), len(answer)), worst)
    if len(answer) != len(expected):
        return Verdict(False, 0, float("inf"))
    pairs = enumerate(zip(answer, expected, strict=True))
    n_exact = next((at for at, (ours, theirs) in pairs if ours != theirs), len(answer))
    if n_exact == len(answer):
        return Verdict(True, n_exact, 0.0)
    if gaps is None or len(gaps) != len(answer):
        return Verdict(False, n_exact, float("inf"))
    worst = max(gaps[n_exact:])
    return Verdict(worst <= tie, n_exact, worst)


def prompts_for(n_prompts: int, n_tokens: int, n_vocab: int, seed: int = 7) -> list[Prompt]:
    """Return different random prompts of token ids. None is a prefix of another, and none holds the end token."""
    rng = np.random.default_rng(seed)
    return [tuple(rng.integers(256, n_vocab - 1, n_tokens).tolist()) for _ in range(n_prompts)]


async def expected_answers(
    model: Path,
    prompts: Sequence[Prompt],
    n_tokens: int,
    n_threads: int,
    libraries: Path | None = None,
    adapter: Path | None = None,
) -> list[Answer]:
    """Return the unsplit model's greedy answers; kept in the cache for this build of llama.cpp.

    `libraries`: the directory of the llama.cpp that computes them; None for the installed one. `adapter`: a LoRA file.
    """
    build = str(libraries) if libraries else _installed_build()
    facts = json.dumps([model.name, prompts, n_tokens, build, adapter and digest_of(adapter)]).encode()
    kept = cache_dir() / "bench-models" / f"{model.stem}-answers-{hashlib.sha256(facts).hexdigest()[:12]}.json"
    if not kept.exists():
        asked: dict[str, object] = {"greedy": list(prompts), "n_tokens": n_tokens, "n_threads": n_threads}
        asked |= adapter_field(adapter)
        answers = await _ask(model, asked, libraries)
        kept.parent.mkdir(parents=True, exist_ok=True)
        unfinished = kept.with_suffix(".part")
        unfinished.write_text(json.dumps(answers))
        unfinished.rename(kept)
    return [tuple(answer) for answer in json.loads(kept.read_text())]


def _installed_build() -> str:
    mark = Path(sysconfig.get_path("platlib")) / built_with.MARK
    return metadata.version("llama-cpp-python") + (mark.read_text() if mark.is_file() else "")


async def score(
    model: Path,
    pairs: Sequence[tuple[Prompt, Answer]],
    n_threads: int,
    libraries: Path | None = None,
    adapter: Path | None = None,
) -> list[list[float]]:
    """Return, per (prompt, answer), each answer token's distance below the best, in deviations of the logits."""
    if not pairs:
        return []
    asked: dict[str, object] = {"score": list(pairs), "n_threads": n_threads}
    gaps: list[list[float]] = await _ask(model, asked | adapter_field(adapter), libraries)
    return gaps


def digest_of(path: Path) -> str:
    """Return the SHA-256 of a small file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def adapter_field(adapter: Path | None) -> dict[str, object]:
    """Return the part of a request to the separate process that names the LoRA file."""
    return {} if adapter is None else {"adapter": str(adapter)}


async def _ask(model: Path, request: dict[str, object], libraries: Path | None) -> list[list[float]]:
    environment = os.environ | ({LIBRARIES: str(libraries)} if libraries else {})
    with tempfile.TemporaryDirectory() as scratch:
        asked, answered = Path(scratch) / "asked.json", Path(scratch) / "answered.json"
        asked.write_text(json.dumps(request))
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "benches.reference", str(model), str(asked), str(answered), env=environment
        )
        try:
            code = await process.wait()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        if code != 0:
            raise RuntimeError(f"the unsplit reference run of {model.name} failed")
        answers: list[list[float]] = json.loads(answered.read_text())
        return answers


# --- in the separate process ----------------------------------------------------------------------------------------


def greedy_batch(
    model: Path, prompts: Sequence[Prompt], n_tokens: int, n_threads: int, adapters: Adapters = ()
) -> list[list[int]]:
    """Return greedy answers, BATCH_SEQUENCES prompts at a time."""
    from relayline.deploy.testing.reference import ReferenceModel

    longest = max(map(len, prompts))
    answers: list[list[int]] = []
    n_rows = max(BATCH_SEQUENCES, longest)
    n_ctx = BATCH_SEQUENCES * (longest + n_tokens) + n_rows
    with ReferenceModel(
        model, n_ctx, BATCH_SEQUENCES, max_rows=n_rows, n_threads=n_threads, adapters=adapters
    ) as reference:
        for first in range(0, len(prompts), BATCH_SEQUENCES):
            group = prompts[first : first + BATCH_SEQUENCES]
            tokens: list[list[int]] = []
            for seq, prompt in enumerate(group):
                reference.drop_from(seq, 0)
                wants = [False] * (len(prompt) - 1) + [True]
                logits = reference.decode(prompt, range(len(prompt)), [seq] * len(prompt), wants)
                tokens.append([int(logits[0].argmax())])
            while len(tokens[0]) < n_tokens:
                positions = [len(prompt) + len(tokens[0]) - 1 for prompt in group]
                last, seqs = [answer[-1] for answer in tokens], list(range(len(group)))
                logits = reference.decode(last, positions, seqs, [True] * len(group))
                for answer, row in zip(tokens, logits, strict=True):
                    answer.append(int(row.argmax()))
            answers += tokens
    return answers


def gaps_of(
    model: Path, pairs: Sequence[tuple[Prompt, Answer]], n_threads: int, adapters: Adapters = ()
) -> list[list[float]]:
    """Feed each prompt with its answer and return the answer tokens' distances below the best."""
    from relayline.deploy.testing.reference import UNTILED_ROWS, ReferenceModel

    max_rows = max(UNTILED_ROWS, *(len(prompt) for prompt, _ in pairs))
    n_ctx = max(len(prompt) + len(answer) for prompt, answer in pairs)
    found: list[list[float]] = []
    with ReferenceModel(model, n_ctx, 1, max_rows=max_rows, n_threads=n_threads, adapters=adapters) as reference:
        for prompt, answer in pairs:
            reference.drop_from(0, 0)
            wants = [False] * (len(prompt) - 1) + [True]
            after_prompt = reference.decode(prompt, range(len(prompt)), [0] * len(prompt), wants)
            logits = np.concatenate([after_prompt, reference.read(answer[:-1], len(prompt))])
            chosen = logits[np.arange(len(answer)), np.asarray(answer)]
            found.append(((logits.max(axis=1) - chosen) / logits.std(axis=1)).tolist())
    return found


def describe_model(path: Path, n_prompts: int = 8, n_tokens: int = 32, n_threads: int = 1) -> str:
    """Print properties of a model's answers: different tokens, repeats, and the distance of the second best token."""
    from relayline.deploy.testing.reference import ReferenceModel

    with ReferenceModel(path, 256, 1, n_threads=n_threads) as reference:
        margins: list[float] = []
        answers: list[list[int]] = []
        for prompt in prompts_for(n_prompts, 16, reference.n_vocab):
            reference.drop_from(0, 0)
            wants = [False] * 15 + [True]
            logits = reference.decode(prompt, range(16), [0] * 16, wants)[0]
            answer: list[int] = []
            while True:
                second, best = np.partition(logits, -2)[-2:]
                margins.append(float((best - second) / logits.std()))
                answer.append(int(logits.argmax()))
                if len(answer) == n_tokens:
                    break
                logits = reference.decode([answer[-1]], [15 + len(answer)], [0], [True])[0]
            answers.append(answer)
    different = len({token for answer in answers for token in answer})
    repeats = sum(a == b for answer in answers for a, b in itertools.pairwise(answer))
    quantiles = np.quantile(margins, (0.01, 0.05, 0.5)).round(4).tolist()
    close = sum(margin < NEAR_TIE_F16 for margin in margins) / len(margins)
    return (
        f"{n_prompts} answers of {n_tokens} tokens: {different} different tokens, {repeats} immediate repeats; "
        f"margin of the best token in deviations: p1 {quantiles[0]}, p5 {quantiles[1]}, p50 {quantiles[2]}; "
        f"{100 * close:.1f} % under {NEAR_TIE_F16}"
    )


def main() -> None:
    """Answer the request in argv[2] about the model in argv[1] into argv[3]."""
    model, asked, answered = map(Path, sys.argv[1:4])
    request = json.loads(asked.read_text())
    adapters = [(Path(request["adapter"]), 1.0)] if "adapter" in request else []
    result: list[list[int]] | list[list[float]]
    if "greedy" in request:
        result = greedy_batch(model, request["greedy"], request["n_tokens"], request["n_threads"], adapters)
    else:
        result = gaps_of(model, request["score"], request["n_threads"], adapters)
    answered.write_text(json.dumps(result))


if __name__ == "__main__":
    main()
