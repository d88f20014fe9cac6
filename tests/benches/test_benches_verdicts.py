"""Each compared system is judged by the unsplit model of the llama.cpp build that it uses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benches import parts, reference
from benches.compare import Bench
from benches.compared import Run
from benches.peers import LIBRARIES, Kernels, Peers
from benches.reference import Answer, Prompt
from relayline.deploy.cli.load import Request, Summary
from tests.benches.test_benches_report import plan_of_tiny

OURS, THEIRS = (0, 1, 2, 3), (4, 5, 6, 7)


def run_of(system: str, part: str, tokens: Answer) -> Run:
    quantiles = {"p50": 1.0, "p95": 1.0, "p99": 1.0}
    request = Request(0, len(tokens), 0, list(tokens), [1] * len(tokens))
    return Run(part, system, 1, 0, Summary(1, 1, 4, 1.0, 4.0, 4.0, quantiles, quantiles, ""), {}, [request])


async def test_systems_as_they_ship_are_held_against_an_unsplit_model_that_computes_as_they_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shipped = tmp_path / "shipped"
    bench = Bench.__new__(Bench)
    bench.plan, bench.path, bench.answers = plan_of_tiny(), tmp_path, [OURS]
    bench.prompts, bench.more_prompts = [(9,)], {}
    bench.peers = {Kernels.SHIPPED: Peers(shipped, "1"), Kernels.OURS: Peers(tmp_path / "ours", "1")}
    computed = [("auto", OURS), ("unsplit+kernels", OURS), ("rpc", THEIRS), ("unsplit", THEIRS)]
    runs = [run_of(system, "streams", tokens) for system, tokens in computed]
    runs.append(run_of(parts.DELAYED_RPC, "delay", THEIRS))
    strange = [run_of("auto", "streams", THEIRS), run_of("rpc", "streams", OURS)]
    bench.runs = [*runs, *strange]
    weighed: list[tuple[Path | None, list[tuple[Prompt, Answer]]]] = []

    async def answers(*arguments: Any) -> list[Answer]:
        assert arguments[-1] == shipped
        return [THEIRS]

    async def score(_: Path, pairs: list[tuple[Prompt, Answer]], __: int, libraries: Path | None) -> list[list[float]]:
        weighed.append((libraries, pairs))
        return [[5.0] * len(answer) for _, answer in pairs]

    monkeypatch.setattr("benches.compare.expected_answers", answers)
    monkeypatch.setattr("benches.compare.score", score)
    await bench.judge_all()
    assert [(run.fault, run.n_exact) for run in runs] == [("", 1)] * len(runs)
    assert all("5.00 deviations below the best" in run.fault for run in strange)
    assert weighed == [(None, [((9,), THEIRS)]), (shipped, [((9,), OURS)])]


async def test_the_unsplit_model_is_computed_by_the_libraries_named_and_remembered_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "relayline" / "bench-models").mkdir(parents=True)
    found: list[str | None] = []

    def answer(path: Path) -> None:
        path.write_text(f"[[{len(found)}]]")

    async def spawn(*command: str, env: dict[str, str]) -> Any:
        found.append(env.get(LIBRARIES))
        answer(Path(command[-1]))

        class Done:
            returncode = 0

            async def wait(self) -> int:
                return 0

        return Done()

    monkeypatch.delenv(LIBRARIES, raising=False)
    monkeypatch.setattr("asyncio.create_subprocess_exec", spawn)
    model, prompts = tmp_path / "m.gguf", [(1, 2)]
    for libraries, expected in ((None, 1), (tmp_path / "a", 2), (tmp_path / "b", 3), (tmp_path / "a", 2), (None, 1)):
        assert await reference.expected_answers(model, prompts, 1, 1, libraries) == [(expected,)]
    assert await reference.score(model, [((1,), (2,))], 1, tmp_path / "a") == [[4]]
    (adapter := tmp_path / "lora.gguf").write_bytes(b"1")
    for content, expected in ((b"1", 5), (b"2", 6), (b"1", 5)):
        adapter.write_bytes(content)
        assert await reference.expected_answers(model, prompts, 1, 1, adapter=adapter) == [(expected,)]
    assert found.count(None) == 3
    del found[-2:]
    assert found == [None, str(tmp_path / "a"), str(tmp_path / "b"), str(tmp_path / "a")]
