"""/v1/rerank and its other names, /v1/score: bodies of every shape, answers in each form, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import aiohttp
import gguf
import numpy as np
import pytest

from relayline.coordinator.http.edge.record import OPERATIONS
from relayline.coordinator.http.edge.route_names import RERANK_PATHS, SCORE_PATHS, TRANSCRIPTION_PATHS
from relayline.coordinator.http.rerank.asking import DOCUMENTS_MAX, Pair, RerankBody, pairs_of, prompts_of
from relayline.coordinator.sessions.generation import GenerationRequest, TokenEvent
from relayline.coordinator.text.tokenizer import Tokenizer
from relayline.deploy.testing.paths import ROOT
from relayline.deploy.testing.vocabulary_files import BOS, EOS, IM_END, add_vocabulary, write_tokenizer
from relayline.wire.common.bounds import CTX_TOKENS_MAX
from relayline.wire.common.errors import ContextLengthError
from relayline.wire.common.sampler_fields import POOLINGS
from relayline.wire.model_files.rank_head import LABELS_KEY
from tests.support.http_support import MODEL, FakeGenerator, serving

TEMPLATE = "<|im_start|>Q {query} D {document}<|im_end|>"


def reranker(path: Path, template: str | None = TEMPLATE, **added: bool) -> Tokenizer:
    """A vocabulary whose model has a head of two labels; `added`: tokens that stand between texts."""
    writer = gguf.GGUFWriter(path, "qwen3")
    add_vocabulary(writer)
    writer.add_uint32(LABELS_KEY, 2)
    if template is not None:
        writer.add_string("tokenizer.chat_template.rerank", template)
    for name, value in added.items():
        writer.add_bool(f"tokenizer.ggml.{name}", value)
    writer.add_sep_token_id(IM_END)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return Tokenizer.load(path)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return reranker(tmp_path_factory.mktemp("tok") / "tokenizer.gguf")


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(write_tokenizer(tmp_path_factory.mktemp("tok") / "tokenizer.gguf"))


def ranking(request: GenerationRequest) -> list[TokenEvent]:
    """The longer its prompt, the likelier is yes."""
    chance = len(request.prompt_tokens) / 1_024
    row = np.array([chance, 1 - chance], np.float32)
    return [TokenEvent(0, None, (), "length", embedding=row.tobytes())]


async def asked(tokenizer: Tokenizer, path: str, status: int = 200, **body: Any) -> tuple[Any, FakeGenerator]:
    generator = FakeGenerator(ranking)
    async with (
        serving(tokenizer, generator) as served,
        aiohttp.ClientSession(served.url) as session,
        session.post(path, json=body) as reply,
    ):
        assert reply.status == status, await reply.text()
        return await reply.json(), generator


def test_names_of_a_route_stand_in_one_place() -> None:
    texts = {file: file.read_text() for file in sorted((ROOT / "coordinator" / "http").rglob("*.py"))}
    for path in (*RERANK_PATHS[1:], *SCORE_PATHS[1:], *TRANSCRIPTION_PATHS[1:]):
        assert [file.name for file, text in texts.items() if f'"{path}"' in text] == ["route_names.py"], path
    assert {OPERATIONS[path] for path in (*RERANK_PATHS, *SCORE_PATHS)} == {"rerank"}
    assert {OPERATIONS[path] for path in TRANSCRIPTION_PATHS} == {"chat"}


@pytest.mark.parametrize("path", RERANK_PATHS)
async def test_documents_come_by_falling_score(tokenizer: Tokenizer, path: str) -> None:
    documents = ["bb", "dddd", {"text": "ccc", "title": "ignored"}, "dddd"]
    found, generator = await asked(tokenizer, path, query="a", documents=documents)
    texts = [each if isinstance(each, str) else each["text"] for each in documents]
    prompts = [tokenizer.encode(f"<|im_start|>Q a D {text}<|im_end|>", add_special=False) for text in texts]
    assert [list(request.prompt_tokens) for request in generator.requests] == prompts
    for request in generator.requests:
        assert dict(request.sampling.numbers) == {"pooling": POOLINGS["last"], "ranked": 1}
        assert (request.max_tokens, request.ignore_eos, request.cache_prompt) == (1, True, True)
    n_tokens = sum(map(len, prompts))
    assert found == {
        "model": MODEL,
        "object": "list",
        "usage": {"prompt_tokens": n_tokens, "total_tokens": n_tokens},
        "results": [{"index": at, "relevance_score": len(prompts[at]) / 1_024} for at in (1, 3, 2, 0)],
    }


async def test_fewer_documents_and_their_texts(tokenizer: Tokenizer) -> None:
    body: dict[str, Any] = {"query": "a", "documents": ["bb", {"text": "dddd"}, "ccc"], "return_documents": True}
    found, _ = await asked(tokenizer, "/v1/rerank", top_n=2, **body)
    assert [(each["index"], each["document"]) for each in found["results"]] == [
        (1, {"text": "dddd"}), (2, {"text": "ccc"}),
    ]  # fmt: skip
    for top_n in (0, 7, 10**30, None):
        found, _ = await asked(tokenizer, "/v1/rerank", top_n=top_n, **body)
        assert len(found["results"]) == 3


async def test_texts_are_answered_as_text_embeddings_inference_does(tokenizer: Tokenizer) -> None:
    found, generator = await asked(tokenizer, "/rerank", query="a", texts=["bb", "ccc"])
    lengths = [len(request.prompt_tokens) for request in generator.requests]
    assert found == [{"index": 1, "score": lengths[1] / 1_024}, {"index": 0, "score": lengths[0] / 1_024}]
    found, _ = await asked(tokenizer, "/rerank", query="a", texts=["bb"], return_text=True)
    assert found[0]["text"] == "bb"


@pytest.mark.parametrize("path", SCORE_PATHS)
async def test_pairs_are_scored_in_their_order(tokenizer: Tokenizer, path: str) -> None:
    for sent, queries in (("a", ["a", "a"]), (["a"], ["a", "a"]), (["a", "bbb"], ["a", "bbb"])):
        found, generator = await asked(tokenizer, path, text_1=sent, text_2=["cc", "d"])
        texts = [f"<|im_start|>Q {one} D {two}<|im_end|>" for one, two in zip(queries, ["cc", "d"], strict=True)]
        lengths = [len(tokenizer.encode(text, add_special=False)) for text in texts]
        assert [len(request.prompt_tokens) for request in generator.requests] == lengths
        assert found["data"] == [
            {"index": at, "object": "score", "score": length / 1_024} for at, length in enumerate(lengths)
        ]
        assert found["usage"] == {"prompt_tokens": sum(lengths), "total_tokens": sum(lengths)}
        assert (found["object"], found["model"]) == ("list", MODEL)
    found, _ = await asked(tokenizer, path, text_1="a", text_2="b")
    assert len(found["data"]) == 1


@pytest.mark.parametrize("names", [("queries", "documents"), ("queries", "items"), ("data_1", "data_2")])
async def test_scores_have_other_names_for_their_texts(tokenizer: Tokenizer, names: tuple[str, str]) -> None:
    """As vLLM has had them since text_1 and text_2."""
    _, generator = await asked(tokenizer, "/v1/score", **{names[0]: "a", names[1]: ["cc", "d"]})
    _, usual = await asked(tokenizer, "/v1/score", text_1="a", text_2=["cc", "d"])
    prompts = [[request.prompt_tokens for request in each.requests] for each in (generator, usual)]
    assert prompts[0] == prompts[1]
    found, _ = await asked(tokenizer, "/v1/score", 400, **{names[1]: ["cc", "d"]})
    assert found["error"]["message"] == f"{names[0]}: required field is missing"
    found, _ = await asked(tokenizer, "/v1/score", 400)
    assert found["error"]["param"] == "text_1"


async def test_a_placeholder_in_a_text_stays_as_it_is(tokenizer: Tokenizer) -> None:
    _, generator = await asked(tokenizer, "/v1/rerank", query="{document}", documents=["{query}"])
    wanted = tokenizer.encode("<|im_start|>Q {document} D {query}<|im_end|>", add_special=False)
    assert list(generator.requests[0].prompt_tokens) == wanted


async def test_without_a_template_tokens_stand_around_the_texts(tmp_path: Path) -> None:
    """As llama-server's format_prompt_rerank has it; the texts themselves hold no special tokens."""
    for number, (added, around) in enumerate(
        [
            ({}, ([], [], [])),
            ({"add_bos_token": True, "add_eos_token": True}, ([BOS], [EOS], [EOS])),
            ({"add_bos_token": True, "add_eos_token": True, "add_sep_token": True}, ([BOS], [EOS, IM_END], [EOS])),
        ]
    ):
        tokenizer = reranker(tmp_path / f"{number}.gguf", template=None, **added)
        _, generator = await asked(tokenizer, "/v1/rerank", query="<|eos|>", documents=["b"])
        before, between, after = around
        texts = [tokenizer.encode(text, add_special=False, parse_special=False) for text in ("<|eos|>", "b")]
        assert list(generator.requests[0].prompt_tokens) == [*before, *texts[0], *between, *texts[1], *after]
        assert EOS not in texts[0]


async def test_a_documents_first_tokens_are_enough_where_that_is_asked_for(tokenizer: Tokenizer) -> None:
    _, generator = await asked(
        tokenizer, "/v1/rerank", query="a", documents=["x" * 2_000, "yéyé", "z"], max_tokens_per_doc=2
    )
    for request, text in zip(generator.requests, ("xx", "y", "z"), strict=True):  # no half of a character is left
        wanted = tokenizer.encode(f"<|im_start|>Q a D {text}<|im_end|>", add_special=False)
        assert list(request.prompt_tokens) == wanted


def test_a_document_too_long_to_be_cut_is_named(tokenizer: Tokenizer) -> None:
    texts = ["b", "b" * (CTX_TOKENS_MAX * tokenizer.longest_piece_bytes + 1)]
    with pytest.raises(ContextLengthError) as caught:
        pairs_of(RerankBody(query="a", documents=list(texts), max_tokens_per_doc=4), tokenizer)
    assert caught.value.param == "documents[1]"


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({"documents": ["b"]}, "query: required field is missing"),
        ({"query": 5, "documents": ["b"]}, "query: expected str, got int"),
        ({"query": "a"}, "documents: required field is missing"),
        ({"query": "a", "documents": ["b"], "texts": ["b"]}, "documents: texts was sent too; send one of the two"),
        ({"query": "a", "documents": []}, "documents: expected array of length >= 1"),
        ({"query": "a", "documents": "b"}, "documents: expected array"),
        ({"query": "a", "documents": ["b"] * (DOCUMENTS_MAX + 1)}, f"expected array of length <= {DOCUMENTS_MAX}"),
        ({"query": "a", "documents": ["b", 5]}, "documents[1]: expected str | object, got int"),
        ({"query": "a", "documents": [{"title": "b"}]}, "documents[0].text: required field is missing"),
        ({"query": "a", "documents": ["b"], "top_n": -1}, "top_n: expected int >= 0"),
        ({"query": "a", "documents": ["b"], "max_tokens_per_doc": 0}, "max_tokens_per_doc: expected int >= 1"),
        ({"query": "a", "documents": ["b", "x" * 600]}, "documents[1] resulted in more than 512 tokens"),
        ({"query": "a", "documents": ["b", "x" * 504]}, "maximum context length is 511 tokens"),
        ({"query": "q" * 400, "documents": ["b", "x" * 400]}, "documents[1] resulted in more than 512 tokens with its"),
        ({"query": "q" * 600, "documents": ["b"]}, "reduce the length of the query."),
        ({"query": "q" * 512, "documents": ["b"]}, "your query resulted in 512 tokens"),
        ({"query": "a", "documents": ["b"], "model": "other"}, "other"),
    ],
)  # fmt: skip
async def test_bad_bodies_are_refused_in_one_line(tokenizer: Tokenizer, body: dict[str, Any], text: str) -> None:
    found, generator = await asked(tokenizer, "/v1/rerank", 404 if "model" in body else 400, **body)
    assert text in found["error"]["message"]
    assert "\n" not in found["error"]["message"]
    assert generator.requests == []


async def test_scores_of_unequal_lists_are_refused(tokenizer: Tokenizer) -> None:
    found, _ = await asked(tokenizer, "/v1/score", 400, text_1=["a", "b"], text_2=["a", "b", "c"])
    assert found["error"]["message"] == "text_2: 3 texts for 2 in text_1; send as many, or one text_1"
    found, _ = await asked(tokenizer, "/v1/score", 400, text_1=["a", "b"], text_2="a")
    assert found["error"]["message"].startswith("text_2: 1 text for 2")


@pytest.mark.parametrize(("text_1", "param"), [("q" * 600, "text_1"), (["a", "q" * 600], "text_1[1]")])
async def test_a_first_text_that_is_too_long_is_named(tokenizer: Tokenizer, text_1: Any, param: str) -> None:
    found, _ = await asked(tokenizer, "/v1/score", 400, text_1=text_1, text_2=["a", "b"])
    assert found["error"]["param"] == param


def test_all_prompts_together_have_a_bound(tokenizer: Tokenizer) -> None:
    pairs = [Pair("q" * 40, "d", f"documents[{at}]") for at in range(30)]
    with pytest.raises(ContextLengthError, match=r"documents\[20\]: .* at most 1000 tokens"):
        prompts_of(pairs, tokenizer, 512, 1_000)


@pytest.mark.parametrize("path", [*RERANK_PATHS, "/v1/score", "/score"])
async def test_a_model_without_a_head_that_ranks_says_so(plain: Tokenizer, path: str) -> None:
    found, _ = await asked(plain, path, 501, query="a", documents=["b", "c"])
    assert "this model's file has no head that ranks (cls.output.weight)" in found["error"]["message"]
    assert found["error"]["code"] == "not_implemented"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/responses", {"input": "a"}),
        ("/v1/responses", {"input": "a", "background": True}),
        ("/v1/messages", {"max_tokens": 5, "messages": [{"role": "user", "content": "a"}]}),
        ("/completion", {"prompt": "a"}),
        ("/infill", {"input_prefix": "a", "input_suffix": "b"}),
        ("/api/chat", {"messages": [{"role": "user", "content": "a"}]}),
        ("/api/generate", {"prompt": "a"}),
    ],
)
async def test_a_reranker_writes_no_text(tokenizer: Tokenizer, path: str, body: dict[str, Any]) -> None:
    found, generator = await asked(tokenizer, path, 501, **body)
    error = found["error"]
    assert "this model ranks documents and writes no text" in (error if isinstance(error, str) else error["message"])
    assert generator.requests == []


async def test_a_reranker_has_embeddings_and_tokens(tokenizer: Tokenizer) -> None:
    found, generator = await asked(tokenizer, "/v1/embeddings", input="a")
    assert len(found["data"]) == 1
    assert dict(generator.requests[0].sampling.numbers) == {"pooling": POOLINGS["last"]}
    found, _ = await asked(tokenizer, "/tokenize", content="a")
    assert found["tokens"] == tokenizer.encode("a", add_special=False)
    found, _ = await asked(tokenizer, "/api/show", model=MODEL)
    assert found["capabilities"] == []
