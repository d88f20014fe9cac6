"""POST /v1/rerank over real stages: the scores are those of the whole model by llama.cpp, alone and in company."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from relayline.coordinator.http.app import make_app
from relayline.coordinator.http.edge.server import start_http
from relayline.coordinator.http.replies.service import ServedModel
from relayline.coordinator.model.split import split_model
from relayline.coordinator.text.chat import ChatTemplate
from relayline.coordinator.text.tokenizer import Tokenizer
from tests.support.fleet import Fleet, fleet, request, tokens_of
from tests.support.http_support import CREATED, MODEL
from tests.support.tiny_models import make_tiny
from tests.support.whole_scores import CTX, whole_chances

TEMPLATE = "<|user|>Judge the document.\n<Query>: {query}\n<Document>: {document}<|end|>\n<|assistant|>"
QUERY = "the inner thing"
DOCUMENTS = ["the in an er", "xyz " * 40, "hello the", "in the", "", "hello the"]
ERROR_MAX = 1e-4  # rows of other streams share the steps


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    more = {"tokenizer.chat_template.rerank": TEMPLATE}
    path = tmp_path_factory.mktemp("reranker") / "model.gguf"
    return make_tiny("qwen3:reranker", path, tokenizer=True, extra_values=more)


@pytest.fixture(scope="module")
def expected(model: Path) -> dict[str, float]:
    """The chance of yes for each document, by llama-server's way to the prompt."""
    tokenizer, found = Tokenizer.load(model), {}
    for document in DOCUMENTS:
        prompt = TEMPLATE.replace("{query}", QUERY).replace("{document}", document)
        found[document] = float(whole_chances(model, tokenizer.encode(prompt, add_special=False))[0])
    assert len({round(score, 2) for score in found.values()}) > 3, "scores that are all alike prove nothing"
    return found


@contextlib.asynccontextmanager
async def served(running: Fleet, tokenizer: Tokenizer) -> AsyncIterator[str]:
    app = make_app(running.pipeline, ServedModel(MODEL, CREATED, tokenizer, ChatTemplate(None)))
    runner, port = await start_http(app, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        await runner.cleanup()


@pytest.mark.parametrize("n_stages", [1, 2, 3])
async def test_scores_are_those_of_the_whole_model(
    n_stages: int, model: Path, expected: dict[str, float], tmp_path: Path
) -> None:
    file = split_model(model, tmp_path / "out", n_stages=n_stages)
    tokenizer = Tokenizer.load(tmp_path / "out" / file.tokenizer.file)
    paths = [tmp_path / "out" / stage.file for stage in file.stages]
    async with (
        fleet(paths, file=file, ctx_tokens=CTX, prefix_lanes=2) as running,
        served(running, tokenizer) as url,
        aiohttp.ClientSession(url) as session,
    ):

        async def ranked(documents: list[str]) -> dict[str, Any]:
            async with session.post("/v1/rerank", json={"query": QUERY, "documents": documents}) as reply:
                assert reply.status == 200, await reply.text()
                found: dict[str, Any] = await reply.json()
                return found

        alone = [await ranked([document]) for document in DOCUMENTS]
        company = asyncio.create_task(tokens_of(running.pipeline.open(request((1, 2, 3), 60))))
        together = await ranked(DOCUMENTS)
        assert len(await company) == 60
    scores = {each["index"]: each["relevance_score"] for each in together["results"]}
    assert len(scores) == len(DOCUMENTS)
    for index, document in enumerate(DOCUMENTS):
        assert scores[index] == pytest.approx(expected[document], abs=ERROR_MAX)
        assert alone[index]["results"][0]["relevance_score"] == pytest.approx(expected[document], abs=ERROR_MAX)
    order = [each["relevance_score"] for each in together["results"]]
    assert order == sorted(order, reverse=True)
    assert together["usage"]["prompt_tokens"] == sum(each["usage"]["prompt_tokens"] for each in alone)
