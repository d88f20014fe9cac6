"""Finds the wrong answers of a run with faults: failed, cut short, or different from the unsplit model's."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benches.reference import Answer, Prompt, expected_answers, judge, near_tie, score
from relayline.deploy.cli.load import Request

CANCELLED = "cancelled"  # error of a request whose client left in the middle of its answer
N_THREADS = 2  # of the unsplit model


async def wrong_answers(
    model: Path, mix: str, prompts: Sequence[Prompt], requests: Sequence[Request], adapter: Path | None = None
) -> list[str]:
    """Return one line for each request that failed or whose tokens, as far as they were read, are not the model's.

    `adapter`: the LoRA file that all these requests chose.
    """
    n_tokens = max((request.n_tokens for request in requests), default=0)
    answers = await expected_answers(model, prompts, n_tokens, N_THREADS, adapter=adapter)
    answered = {(request.prompt_index, tuple(request.tokens)) for request in requests}
    doubtful = sorted((at, tokens) for at, tokens in answered if tokens != answers[at][: len(tokens)])
    gaps = await score(model, [(prompts[at], tokens) for at, tokens in doubtful], N_THREADS, adapter=adapter)
    return faulty(requests, answers, dict(zip(doubtful, gaps, strict=True)), near_tie(mix))


def faulty(
    requests: Sequence[Request], answers: Sequence[Answer], gaps: dict[tuple[int, Answer], list[float]], tie: float
) -> list[str]:
    """Return one line for each wrong request, see wrong_answers. Pure.

    gaps: of (prompt index, tokens) that are not exact, each token's distance below the best (see reference.score).
    """
    found: list[str] = []
    for request in requests:
        tokens = tuple(request.tokens)
        expected = answers[request.prompt_index][: len(tokens)]
        verdict = judge(tokens, expected, gaps.get((request.prompt_index, tokens)), tie)
        if request.error not in ("", CANCELLED):
            found.append(f"prompt {request.prompt_index}: {request.error}")
        elif not request.error and not request.is_complete:
            found.append(f"prompt {request.prompt_index}: {len(tokens)} of {request.n_tokens} tokens")
        elif not verdict.agrees:
            where = f"prompt {request.prompt_index} differs from token {verdict.n_exact} on"
            found.append(f"{where}, {verdict.worst_gap:.2f} deviations below the best")
    return found
