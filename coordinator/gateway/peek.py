"""The parts of a request's body that a gateway reads: the model, and keys that recognise its beginning. Pure.

A conversation is known by a chain of hashes, one at the end of each message, each over everything before it. The next
turn has the same messages in front, so that the longest hash that a replica has seen says how much it need not read.
"""

from __future__ import annotations

import msgspec
import xxhash

from relayline.coordinator.gateway.bounds import CHAIN_FIRST, CHAIN_MAX
from relayline.coordinator.http.requests.multipart import fields_of
from relayline.coordinator.http.responses.bodies import ConversationName
from relayline.wire.common.errors import InvalidRequestError

BYTES_PER_TOKEN = 4  # of a prompt as JSON, about
USUAL_OUTPUT_TOKENS = 256  # of an answer without max_tokens
OUTPUT_TOKENS_MAX = 1_024  # clients ask for far more than they get
_FIRST_BLOCK_BYTES = 256  # of a prompt that is one text; each further block is longer
_GROWTH = 1.3
_NO_LORA = frozenset({b"", b"null", b"[]"})


class Mark(msgspec.Struct, frozen=True, array_like=True):
    """The end of one beginning of a conversation."""

    hash: bytes
    n_bytes: int  # of the beginning


class Asked(msgspec.Struct, frozen=True, array_like=True):
    """The fields of a request that decide which replica answers."""

    model: str | None = None
    previous_id: str = ""
    """The stored response that it continues; only its holder can answer."""
    conversation_id: str = ""
    """The conversation that it goes on with; only its holder can answer."""
    chain: tuple[Mark, ...] = ()
    """The beginnings of its conversation, the shortest one first."""
    prompt_bytes: int = 0
    output_tokens: int = USUAL_OUTPUT_TOKENS
    has_lora: bool = False
    """Whether it chooses adapters by number, which only the pipeline can tell the names of."""


class _Body(msgspec.Struct):
    """The fields of all dialects that the gateway reads. Any type is accepted, because the pipeline reports what is
    wrong with them."""

    model: msgspec.Raw = msgspec.Raw()
    name: msgspec.Raw = msgspec.Raw()  # Ollama's older word for it, of /api/show and /api/pull
    previous_response_id: msgspec.Raw = msgspec.Raw()
    conversation: msgspec.Raw = msgspec.Raw()
    messages: msgspec.Raw = msgspec.Raw()
    input: msgspec.Raw = msgspec.Raw()
    prompt: msgspec.Raw = msgspec.Raw()
    content: msgspec.Raw = msgspec.Raw()
    system: msgspec.Raw = msgspec.Raw()
    instructions: msgspec.Raw = msgspec.Raw()
    tools: msgspec.Raw = msgspec.Raw()
    n_predict: msgspec.Raw = msgspec.Raw()
    max_tokens: msgspec.Raw = msgspec.Raw()
    max_completion_tokens: msgspec.Raw = msgspec.Raw()
    max_output_tokens: msgspec.Raw = msgspec.Raw()
    lora: msgspec.Raw = msgspec.Raw()


def peek(raw: bytes) -> Asked:
    """Return the fields of a body that matter here; nothing if it is not a JSON object, which any pipeline will
    refuse."""
    try:
        body = msgspec.json.decode(raw, type=_Body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return _of_form(raw)
    front = [part for part in (body.tools, body.system, body.instructions) if bytes(part)]
    talk = next((part for part in (body.messages, body.input, body.prompt, body.content) if bytes(part)), msgspec.Raw())
    chain = _chain(front, _pieces(bytes(talk)))
    lengths = (body.max_completion_tokens, body.max_output_tokens, body.max_tokens, body.n_predict)
    return Asked(
        model=_text(body.model) or _text(body.name),
        previous_id=_text(body.previous_response_id) or "",
        conversation_id=_conversation_id(body.conversation),
        chain=_kept(chain),
        prompt_bytes=chain[-1].n_bytes if chain else 0,
        output_tokens=next((n for part in lengths if (n := _count(part)) is not None), USUAL_OUTPUT_TOKENS),
        has_lora=bytes(body.lora) not in _NO_LORA,
    )


def _of_form(raw: bytes) -> Asked:
    """Return the model that a form with a file names, as the pipeline will read it."""
    try:
        fields = fields_of(raw)
    except InvalidRequestError:
        return Asked()
    model = fields.get("model")
    name = model.decode("utf-8", "replace") if model else None
    return Asked(model=name, prompt_bytes=len(raw), has_lora="lora" in fields)


def _pieces(talk: bytes) -> list[bytes]:
    """Return the messages, or the blocks of a text, in order."""
    if talk.startswith(b"["):
        return [bytes(each) for each in msgspec.json.decode(talk, type=list[msgspec.Raw])]
    pieces, at, n_bytes = [], 0, float(_FIRST_BLOCK_BYTES)
    text = talk[:-1] if talk.endswith(b'"') else talk  # a longer text continues where this one's quote is
    while at < len(text):
        pieces.append(text[at : at + int(n_bytes)])
        at += int(n_bytes)
        n_bytes *= _GROWTH
    return pieces


def _chain(front: list[msgspec.Raw], pieces: list[bytes]) -> list[Mark]:
    hasher, n_bytes, chain = xxhash.xxh3_128(), 0, []
    for part in front:
        hasher.update(part)
        n_bytes += len(bytes(part))
    for piece in pieces:
        hasher.update(b"\x00%d\x00" % len(piece))  # else messages of tokens, say, could be cut in two ways
        hasher.update(piece)
        n_bytes += len(piece)
        chain.append(Mark(hasher.digest(), n_bytes))
    return chain


def _kept(chain: list[Mark]) -> tuple[Mark, ...]:
    if len(chain) <= CHAIN_MAX:
        return tuple(chain)
    return (*chain[:CHAIN_FIRST], *chain[CHAIN_FIRST - CHAIN_MAX :])


def _text(part: msgspec.Raw) -> str | None:
    try:
        found = msgspec.json.decode(part, type=str) if bytes(part) else None
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None
    return found


def _conversation_id(part: msgspec.Raw) -> str:
    """Return the id of a conversation in either form; empty for anything else."""
    try:
        found = msgspec.json.decode(part, type=str | ConversationName) if bytes(part) else ""
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return ""
    return found.id if isinstance(found, ConversationName) else found


def _count(part: msgspec.Raw) -> int | None:
    try:
        found = msgspec.json.decode(part, type=int) if bytes(part) else None
    except msgspec.MsgspecError:
        return None
    return None if found is None or found < 0 else min(found, OUTPUT_TOKENS_MAX)
