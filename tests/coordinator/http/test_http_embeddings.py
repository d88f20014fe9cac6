"""/v1/embeddings and /embedding: inputs of every shape, and vectors in the requested form."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest

from relayline.coordinator.sessions.generation import GenerationRequest, TokenEvent
from relayline.coordinator.text.tokenizer import Tokenizer
from relayline.wire.common.errors import NotServedError, OverloadedError
from tests.support.http_support import MODEL, FakeGenerator, serving
from tests.support.openai_client import openai_client


def pooling(request: GenerationRequest) -> list[TokenEvent]:
    """Its row is [3, 4, first token]."""
    row = np.array([3.0, 4.0, request.prompt_tokens[0]], np.float32)
    return [TokenEvent(0, None, (), "length", embedding=row.tobytes())]


async def asked(
    tokenizer: Tokenizer, path: str, status: int = 200, generator: FakeGenerator | None = None, **body: Any
) -> tuple[Any, FakeGenerator]:
    generator = generator or FakeGenerator(pooling)
    limits = {"pooling": body.pop("pooling")} if "pooling" in body else {}
    async with (
        serving(tokenizer, generator, **limits) as served,
        aiohttp.ClientSession(served.url) as session,
        session.post(path, json=body) as reply,
    ):
        assert reply.status == status, await reply.text()
        return await reply.json(), generator


async def test_inputs_of_every_shape_become_normed_vectors(tokenizer: Tokenizer) -> None:
    for sent, prompts in (
        ("ab", [tokenizer.encode("ab")]),
        ([5, 6], [[5, 6]]),
        (["a", "b"], [tokenizer.encode("a"), tokenizer.encode("b")]),
        ([[5, 6], [7]], [[5, 6], [7]]),
    ):
        found, generator = await asked(tokenizer, "/v1/embeddings", input=sent)
        assert [list(request.prompt_tokens) for request in generator.requests] == prompts
        assert [entry["index"] for entry in found["data"]] == list(range(len(prompts)))
        for entry, prompt in zip(found["data"], prompts, strict=True):
            row = np.array([3.0, 4.0, prompt[0]])
            assert np.allclose(entry["embedding"], row / np.linalg.norm(row), atol=1e-6)
        n_tokens = sum(map(len, prompts))
        assert found["usage"] == {"prompt_tokens": n_tokens, "total_tokens": n_tokens}
        assert (found["object"], found["model"], found["data"][0]["object"]) == ("list", MODEL, "embedding")
        assert all(request.max_tokens == 1 and request.ignore_eos for request in generator.requests)


async def test_vectors_as_they_are_asked_for(tokenizer: Tokenizer) -> None:
    found, _ = await asked(tokenizer, "/v1/embeddings", input=[12], dimensions=2)
    assert np.allclose(found["data"][0]["embedding"], [0.6, 0.8])  # cut first, then normed
    found, _ = await asked(tokenizer, "/v1/embeddings", input=[12], encoding_format="base64")
    raw = np.frombuffer(base64.b64decode(found["data"][0]["embedding"]), "<f4")
    assert np.allclose(raw, np.array([3, 4, 12]) / 13)
    found, _ = await asked(tokenizer, "/embedding", content=[12], embd_normalize=-1)
    assert found == [{"index": 0, "embedding": [[3.0, 4.0, 12.0]]}]
    found, _ = await asked(tokenizer, "/embedding", content=[12], embd_normalize=1)
    assert np.allclose(found[0]["embedding"][0], np.array([3, 4, 12]) / 19)
    found, _ = await asked(tokenizer, "/embedding", content=[12], embd_normalize=0)
    assert np.allclose(found[0]["embedding"][0], np.array([3, 4, 12]) * 32_760 / 12)


async def test_the_official_client_reads_them(tokenizer: Tokenizer) -> None:
    async with (
        serving(tokenizer, FakeGenerator(pooling)) as served,
        openai_client(served.url) as client,
    ):
        found = await client.embeddings.create(model=MODEL, input=["a", "b"])  # asks for base64, and unpacks it
    row = np.array([3.0, 4.0, ord("b")])
    assert np.allclose(found.data[1].embedding, row / np.linalg.norm(row), atol=1e-6)
    assert found.usage.prompt_tokens == 2


@pytest.mark.parametrize(
    ("flag", "number", "may_copy"), [("auto", 3, True), ("mean", 1, False), ("cls", 2, False), ("last", 3, True)]
)
async def test_rows_are_pooled_as_the_flag_says(tokenizer: Tokenizer, flag: str, number: int, may_copy: bool) -> None:
    _, generator = await asked(tokenizer, "/v1/embeddings", input="a", pooling=flag)
    (request,) = generator.requests
    assert request.sampling.number("pooling") == number
    assert request.cache_prompt == may_copy


async def test_the_models_own_pooling_is_read_from_its_file(tmp_path: Path) -> None:
    import gguf

    from relayline.deploy.testing.vocabulary_files import add_vocabulary

    writer = gguf.GGUFWriter(tmp_path / "tokenizer.gguf", "llama")
    add_vocabulary(writer)
    writer.add_uint32("llama.pooling_type", 1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    found = Tokenizer.load(tmp_path / "tokenizer.gguf")
    assert found.pooling == 1
    _, generator = await asked(found, "/v1/embeddings", input=[5])
    assert generator.requests[0].sampling.number("pooling") == 1


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({}, "input: required field is missing"),
        ({"input": []}, "input: a list has 1 to 2048 inputs"),
        ({"input": ""}, "input: the input has no tokens"),
        ({"input": ["a", 5]}, "input[1]: must be text"),
        ({"input": [["a"]]}, "input: must be text"),
        ({"input": [9_999]}, "input: token 9999"),
        ({"input": "a", "dimensions": 4}, "dimensions: at most 3, got 4"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
        ({"input": [5] * 512}, "maximum context length is 511 tokens"),
    ],
)
async def test_bad_bodies_are_refused_in_one_line(tokenizer: Tokenizer, body: dict[str, Any], text: str) -> None:
    found, _ = await asked(tokenizer, "/v1/embeddings", 400, **body)
    assert text in found["error"]["message"]


async def test_stages_that_cannot_are_501(tokenizer: Tokenizer) -> None:
    def refusing(_request: GenerationRequest) -> list[Exception]:
        return [NotServedError("stage 1: embeddings: this model's last stage gives no hidden rows")]

    found, _ = await asked(tokenizer, "/v1/embeddings", 501, FakeGenerator(refusing), input="a")
    assert found["error"]["code"] == "not_implemented"


async def test_a_full_line_holds_up_the_rest_of_a_long_list(tokenizer: Tokenizer) -> None:
    generator = FakeGenerator(pooling)
    full = OverloadedError("full")
    generator.refusals = [None, None, full, None, full, None]
    found, _ = await asked(tokenizer, "/v1/embeddings", generator=generator, input=["a", "b", "c", "d"])
    assert len(found["data"]) == 4
    generator = FakeGenerator(pooling)
    generator.refusals = [full]  # no answer of ours will end
    await asked(tokenizer, "/v1/embeddings", 429, generator, input=["a", "b"])
