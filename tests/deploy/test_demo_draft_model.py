"""The demo's draft model: small, of the demo's vocabulary, and right often enough that true guesses are seen."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import aiohttp
import pytest

from relayline.coordinator.drafting.draft_model import DraftModel, DraftSettings, check_drafts
from relayline.coordinator.drafting.messages import Begin, Took
from relayline.coordinator.drafting.streams import Streams
from relayline.coordinator.model.gguf_file import open_model
from relayline.coordinator.text.tokenizer import Tokenizer
from relayline.deploy.launch.local import running
from relayline.deploy.manifest.smallest import StageFlags, smallest_manifest, with_stages
from relayline.deploy.testing.paths import DEMO, DEMO_DRAFT_MODEL, DEMO_MODEL
from relayline.deploy.testing.reference import ReferenceModel

PROMPTS = ("def wrap(text, width=70, **kwargs):\n", "def dedent(text):\n", "class ExitStack(")
N_TOKENS = 64


@pytest.fixture(scope="module", name="texts")
def texts_fixture() -> list[tuple[list[int], list[int]]]:
    """Prompts, each with what the unsplit demo model says behind it, greedily."""
    tokenizer, whole, found = Tokenizer.load(DEMO_MODEL), ReferenceModel(DEMO_MODEL, 512, len(PROMPTS)), []
    for lane, text in enumerate(PROMPTS):
        prompt, answer = tokenizer.encode(text, add_special=False), []
        rows = whole.decode(prompt, range(len(prompt)), [lane] * len(prompt), [True] * len(prompt))
        while len(answer) < N_TOKENS:
            answer.append(int(rows[-1].argmax()))
            rows = whole.decode([answer[-1]], [len(prompt) + len(answer) - 1], [lane], [True])
        found.append((prompt, answer))
    whole.close()
    return found


def weights(path: Path) -> int:
    return sum(tensor.size_bytes for tensor in open_model(path).tensors.values())


def test_it_is_a_tenth_of_the_demo_model_with_its_vocabulary() -> None:
    check_drafts(DEMO_DRAFT_MODEL, DEMO_MODEL)
    assert DEMO_DRAFT_MODEL.stat().st_size < 1 << 20
    assert 10 * weights(DEMO_DRAFT_MODEL) <= weights(DEMO_MODEL)
    assert DEMO_DRAFT_MODEL.name in (DEMO / "README.md").read_text()
    assert (DEMO / "train_draft.py").is_file()


def guessed(model: DraftModel, prompt: Sequence[int], answer: Sequence[int]) -> list[int]:
    """What the drafting process's own code guesses for each token of an answer, told of one after the other."""
    streams, found = Streams(512, model.n_vocab, model.ends), []
    heard = streams.hear(Begin(1, list(prompt)))
    for at, token in enumerate(answer):
        while (step := streams.next_step()).rows:
            for sequence, position in step.trims:
                model.drop(sequence, position)
            results = model.decode(step.rows)
            assert results is not None
            heard += streams.computed(step.rows, results)
        latest = heard[-1]
        assert latest.position <= len(prompt) + at
        found += latest.tokens[len(prompt) + at - latest.position :][:1] or [-1]
        heard = [latest, *streams.hear(Took(1, len(prompt) + at, [token]))]
    model.drop(0, 0)
    return found


def test_a_quarter_of_its_guesses_or_more_is_right(texts: list[tuple[list[int], list[int]]]) -> None:
    model = DraftModel(DEMO_DRAFT_MODEL, DEMO_MODEL, DraftSettings(1_024, 1, 0))
    right = [
        guess == token
        for prompt, answer in texts
        for guess, token in zip(guessed(model, prompt, answer), answer, strict=True)
    ]
    assert 0.2 < sum(right) / len(right) < 0.9


def test_answers_with_it_are_those_without(texts: list[tuple[list[int], list[int]]]) -> None:
    async def ask() -> tuple[list[list[int]], dict[str, object]]:
        drafting = {"draft": 4, "draft_model": str(DEMO_DRAFT_MODEL), "draft_ctx_tokens": 1_024, "draft_threads": 1}
        manifest = smallest_manifest(DEMO_MODEL, ctx_tokens=256, n_lanes=4, wire="f32", **drafting)
        manifest = with_stages(manifest, StageFlags(2, n_threads=1), 0)
        async with running(manifest, lambda _, __: None) as (_, ready), aiohttp.ClientSession() as session:
            answers = []
            for prompt, _ in texts:
                body = {"model": ready["model"], "prompt": prompt, "max_tokens": N_TOKENS, "temperature": 0,
                        "ignore_eos": True, "return_token_ids": True}  # fmt: skip
                async with session.post(f"{ready['url']}/v1/completions", json=body) as response:
                    answers.append((await response.json())["choices"][0]["token_ids"])
            async with session.get(f"{ready['url']}/v1/pipeline") as response:
                return answers, await response.json()

    answers, pipeline = asyncio.run(ask())
    assert answers == [answer for _, answer in texts]
    figures = pipeline["draft_model"]
    assert isinstance(figures, dict)
    assert figures["guess_ns"] > 0, "it was heard"
    assert figures["right_share"] != 0.6, "it began so, and guesses were compared"
