"""From the body of POST /v1/rerank or /v1/score to prompts: one for each pair of texts. For a body's worker.

A reranker reads a query and a document as one prompt. Its file says how: by a template named "rerank", or by tokens
between them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated

from msgspec import Meta, Struct
from msgspec.structs import replace

from relayline.coordinator.http.requests.bodies import Positive, decode_body
from relayline.coordinator.text.tokenizer import Tokenizer
from relayline.wire.common.bounds import CTX_TOKENS_MAX
from relayline.wire.common.errors import ContextLengthError, InvalidRequestError
from relayline.wire.common.texts import counted

DOCUMENTS_MAX = 2_048  # of one body
_PLACES = re.compile(r"(\{query\}|\{document\})")


class Document(Struct):
    """A document as an object: Cohere's and Jina's other form."""

    text: str


Documents = Annotated[list[str | Document], Meta(min_length=1, max_length=DOCUMENTS_MAX)]
Texts = Annotated[list[str], Meta(min_length=1, max_length=DOCUMENTS_MAX)]


class RerankBody(Struct, kw_only=True):
    """POST /v1/rerank, as Jina, Cohere, llama-server and vLLM have it; with `texts`, as text-embeddings-inference."""

    query: str
    documents: Documents | None = None
    texts: Texts | None = None
    model: str | None = None
    top_n: Annotated[int, Meta(ge=0)] | None = None  # 0: all
    return_documents: bool | None = None
    return_text: bool | None = None  # with `texts`
    max_tokens_per_doc: Positive | None = None  # Cohere's: this many of each document's first tokens


class ScoreBody(Struct, kw_only=True):
    """POST /v1/score, as vLLM has it: one text against several, or as many pairs as there are texts."""

    text_1: str | Texts | None = None
    text_2: str | Texts | None = None
    queries: str | Texts | None = None
    documents: str | Texts | None = None
    items: str | Texts | None = None
    data_1: str | Texts | None = None
    data_2: str | Texts | None = None
    model: str | None = None


_SCORED = (("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2"))  # vLLM's names


class RankOptions(Struct):
    """How the answer is to be written."""

    documents: list[str]  # that the answer repeats; empty: none
    top_n: int  # 0: all
    is_bare_list: bool = False  # the answer is a list alone, as text-embeddings-inference has it


class Pair(Struct):
    """Two texts of one prompt, and the names of the fields that they came in."""

    query: str
    document: str
    param: str  # of the document
    query_param: str = "query"


def read_rerank(raw: bytes | bytearray) -> RerankBody:
    """Return a body. Raises InvalidRequestError."""
    body = decode_body(raw, RerankBody)
    if body.documents is None and body.texts is None:
        raise InvalidRequestError.of_field("documents", "required field is missing")
    if body.documents is not None and body.texts is not None:
        raise InvalidRequestError.of_field("documents", "texts was sent too; send one of the two")
    return body


def _sent(body: RerankBody) -> list[str]:
    return body.texts or [each if isinstance(each, str) else each.text for each in body.documents or ()]


def answer_options(body: RerankBody) -> RankOptions:
    """Return how the answer is to be written."""
    shows = body.return_documents if body.texts is None else body.return_text
    return RankOptions(_sent(body) if shows else [], min(body.top_n or 0, DOCUMENTS_MAX), body.texts is not None)


def pairs_of(body: RerankBody, tokenizer: Tokenizer) -> list[Pair]:
    """Return the query with each document. Raises InvalidRequestError."""
    name = "texts" if body.documents is None else "documents"
    n_max = body.max_tokens_per_doc
    pairs = [Pair(body.query, text, f"{name}[{at}]") for at, text in enumerate(_sent(body))]
    return pairs if n_max is None else [replace(pair, document=_cut(pair, tokenizer, n_max)) for pair in pairs]


def read_score(raw: bytes | bytearray) -> ScoreBody:
    """Return a body. Raises InvalidRequestError."""
    return decode_body(raw, ScoreBody)


def scored_pairs(body: ScoreBody) -> list[Pair]:
    """Return the pairs of a body. Raises InvalidRequestError."""
    one, other = next((each for each in _SCORED if getattr(body, each[1]) is not None), _SCORED[0])
    first, second = _several(body, one), _several(body, other)
    names = [f"{one}[{at}]" for at in range(len(first))] if len(first) > 1 else [one]
    if len(first) == 1:
        first, names = first * len(second), names * len(second)
    if len(first) != len(second):
        text = f"{counted(len(second), 'text')} for {len(first)} in {one}; send as many, or one {one}"
        raise InvalidRequestError.of_field(other, text)
    texts = enumerate(zip(first, second, names, strict=True))
    return [Pair(query, document, f"{other}[{at}]", name) for at, (query, document, name) in texts]


def _several(body: ScoreBody, name: str) -> list[str]:
    sent: str | list[str] | None = getattr(body, name)
    if sent is None:
        raise InvalidRequestError.of_field(name, "required field is missing")
    return [sent] if isinstance(sent, str) else sent


def _cut(pair: Pair, tokenizer: Tokenizer, n_max: int) -> str:
    """Return a document up to its first tokens. Raises InvalidRequestError."""
    document = pair.document
    ids = tokenizer.encode(
        document, add_special=False, parse_special=False, ctx_tokens=CTX_TOKENS_MAX, param=pair.param
    )
    return document if len(ids) <= n_max else tokenizer.decode(ids[:n_max]).rstrip("\ufffd")


def prompts_of(pairs: Sequence[Pair], tokenizer: Tokenizer, ctx_tokens: int, total_max: int) -> list[list[int]]:
    """Return the prompt of each pair. Raises InvalidRequestError, and that for more tokens than `total_max` in all."""
    found, n_left = [], total_max
    for pair in pairs:
        ids = _fitting(pair, tokenizer, ctx_tokens)
        n_left -= len(ids)
        if n_left < 0:
            text = f"the queries and documents of one request have at most {total_max} tokens, each with its query"
            raise ContextLengthError(f"{pair.param}: {text}", pair.param)
        if not ids:
            raise InvalidRequestError.of_field(pair.param, "the query and the document have no tokens")
        found.append(ids)
    return found


def _fitting(pair: Pair, tokenizer: Tokenizer, ctx_tokens: int) -> list[int]:
    """Return the prompt of a pair. Raises ContextLengthError, about the query where that alone is too long."""
    try:
        ids = _prompt(pair, tokenizer, ctx_tokens)
        if len(ids) < ctx_tokens:
            return ids
        size = f"{len(ids)} tokens"
    except ContextLengthError:
        size = f"more than {ctx_tokens} tokens"
    n_query = len(tokenizer.encode(pair.query, add_special=False, ctx_tokens=ctx_tokens, param=pair.query_param))
    if n_query >= ctx_tokens:
        raise ContextLengthError.of_prompt(ctx_tokens - 1, f"{n_query} tokens", pair.query_param)
    raise ContextLengthError.of_prompt(ctx_tokens - 1, f"{size} with its query", pair.param)


def _prompt(pair: Pair, tokenizer: Tokenizer, ctx_tokens: int) -> list[int]:
    pairing = tokenizer.pairing
    if pairing.template is not None:
        texts = {"{query}": pair.query, "{document}": pair.document}
        rendered = "".join(texts.get(part, part) for part in _PLACES.split(pairing.template))
        return tokenizer.encode(rendered, add_special=False, ctx_tokens=ctx_tokens, param=pair.param)
    query, document = (
        tokenizer.encode(text, add_special=False, parse_special=False, ctx_tokens=ctx_tokens, param=pair.param)
        for text in (pair.query, pair.document)
    )
    return [*pairing.before, *query, *pairing.between, *document, *pairing.after]
