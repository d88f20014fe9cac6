"""Answers of /tokenize and /detokenize, in llama-server's form and in vLLM's."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from relayline.coordinator.http.requests.bodies import DetokenizeBody, TokenizeBody
from relayline.coordinator.http.requests.prompts import check_tokens
from relayline.coordinator.text.tokenizer import Tokenizer

TOKENS_PER_PART = 4_096  # of a long answer to /tokenize


def tokenized(body: TokenizeBody, ids: Sequence[int], tokenizer: Tokenizer, ctx_tokens: int) -> bytes:
    """Return the answer to a body whose text has these token ids; `ctx_tokens`: 0 while that is not known."""

    def with_piece(token: int) -> object:
        return {"id": token, "piece": _piece(tokenizer.piece(token, special=True))}

    def name(token: int) -> object:
        return tokenizer.piece(token, special=True).decode(errors="replace")

    tokens = _joined(ids, with_piece if body.with_pieces else None)
    if body.content is not None:
        return b'{"tokens":[' + tokens + b"]}"
    texts = b"[" + _joined(ids, name) + b"]" if body.return_token_strs else b"null"
    found = msgspec.json.encode({"count": len(ids), "max_model_len": ctx_tokens or None})
    return found[:-1] + b',"tokens":[' + tokens + b'],"token_strs":' + texts + b"}"


def detokenized(body: DetokenizeBody, tokenizer: Tokenizer) -> bytes:
    """Return the answer to a body. Raises InvalidRequestError for ids outside the vocabulary."""
    check_tokens(body.tokens, tokenizer.n_vocab, "tokens")
    text = tokenizer.decode(body.tokens)
    return msgspec.json.encode({"content": text, "prompt": text})


def _joined(ids: Sequence[int], shown: Callable[[int], object] | None) -> bytes:
    """Return tokens, or the result of `shown` for each, as the inside of a JSON list; written in parts."""
    parts: list[bytes] = []
    for at in range(0, len(ids), TOKENS_PER_PART):
        part: Sequence[object] = ids[at : at + TOKENS_PER_PART]
        parts.append(msgspec.json.encode([*map(shown, part)] if shown else part)[1:-1])  # type: ignore[arg-type]
    return b",".join(parts)


def _piece(raw: bytes) -> str | list[int]:
    """Return a piece as text, or as its bytes when it is only part of a character."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return list(raw)
