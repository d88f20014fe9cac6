"""From the body of POST /v1/embeddings or /embedding to prompts. For a body's worker."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from relayline.coordinator.http.requests.bodies import Positive, decode_body
from relayline.coordinator.text.tokenizer import Tokenizer
from relayline.wire.common.bounds import CTX_TOKENS_MAX, N_EMBD_MAX
from relayline.wire.common.errors import InvalidRequestError

INPUTS_MAX = 2_048  # of one body, as OpenAI has it
NORM_MAX = 100  # of llama-server's `embd_normalize`


class EmbeddingsBody(Struct, kw_only=True):
    """POST /v1/embeddings; with `content`, as llama-server has it."""

    input: Any = None  # text, token ids, or a list of either
    content: Any = None
    prompt: str | None = None  # of Ollama's older form
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Meta(ge=1, le=N_EMBD_MAX)] | None = None
    embd_normalize: Annotated[int, Meta(ge=-1, le=NORM_MAX)] | None = None  # llama-server's
    truncate_prompt_tokens: Positive | None = None  # vLLM's: this many of each prompt's last tokens
    add_special_tokens: bool | None = None


class AnswerOptions(Struct):
    """How the answer is to be written."""

    is_base64: bool
    dimensions: int  # 0: all
    norm: int


def read(raw: bytes | bytearray) -> EmbeddingsBody:
    """Return a body. Raises InvalidRequestError."""
    body = decode_body(raw, EmbeddingsBody)
    if [body.input, body.content, body.prompt].count(None) != 2:
        raise InvalidRequestError.of_field("input", "required field is missing, or content or prompt was sent too")
    return body


def answer_options(body: EmbeddingsBody) -> AnswerOptions:
    """Return how the answer is to be written."""
    norm = 2 if body.embd_normalize is None else body.embd_normalize
    return AnswerOptions(body.encoding_format == "base64", body.dimensions or 0, norm)


def inputs_of(body: EmbeddingsBody, tokenizer: Tokenizer, ctx_tokens: int) -> list[list[int]]:
    """Return the prompts of a body as token ids, unchecked where they came as such. Raises InvalidRequestError."""
    name = next((each for each in ("content", "prompt") if getattr(body, each) is not None), "input")
    sent = getattr(body, name)
    is_one = not isinstance(sent, list) or (sent and all(type(part) is int for part in sent))
    several = [sent] if is_one else sent
    if not 0 < len(several) <= INPUTS_MAX:
        raise InvalidRequestError.of_field(name, f"a list has 1 to {INPUTS_MAX} inputs, got {len(several)}")
    n_kept = body.truncate_prompt_tokens
    found = []
    for at, part in enumerate(several):
        where = f"{name}[{at}]" if len(several) > 1 else name
        if isinstance(part, str):
            n_max = CTX_TOKENS_MAX if n_kept else ctx_tokens
            add_special = body.add_special_tokens is not False
            ids = tokenizer.encode(part, add_special=add_special, ctx_tokens=n_max, param=where)
        elif isinstance(part, list) and part and all(type(token) is int for token in part):
            ids = part
        else:
            raise InvalidRequestError.of_field(where, "must be text, or a list of token ids that is not empty")
        if not ids:
            raise InvalidRequestError.of_field(where, "the input has no tokens")
        found.append(ids[-n_kept:] if n_kept else ids)
    return found
