"""OpenAI's lines of a batch: one request per line of the input, one answer per line of the output.

Pure: bytes in, bytes out. Nothing here knows a server or a file.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import secrets
from typing import Any, NoReturn

# What a batch may ask of a relayline. All take and give one JSON object.
SERVED_URLS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/embeddings",
    "/v1/responses",
    "/v1/messages",
    "/v1/rerank",
    "/v1/score",
)
URLS = (*SERVED_URLS, "/v1/moderations")  # and of OpenAI
LINE_BYTES_MAX = 17 << 20  # a body of 16 MiB, which is the most that a coordinator takes, and what is around it
ANSWER_BYTES_MAX = 256 << 20  # of one answer; log probabilities of a long one are large
ID_CHARS_MAX = 512  # of a custom_id
BOM = b"\xef\xbb\xbf"  # that editors put before the first line


class LineError(ValueError):
    """A line that is no request of a batch, or no answer; the text says what is wrong with it."""


@dataclasses.dataclass(frozen=True, slots=True)
class Asked:
    """One request of a batch."""

    custom_id: str
    url: str
    """One of URLS."""
    body: dict[str, Any]


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one request: the server's answer, or why there is none."""

    custom_id: str
    status: int = 0
    """Of HTTP; 0 without an answer."""
    request_id: str = ""
    body: Any = None
    error_code: str = ""
    error_message: str = ""

    @property
    def is_failed(self) -> bool:
        """Whether the request has no answer, or an error for one."""
        return not 200 <= self.status < 300

    def n_tokens(self) -> int:
        """Return the tokens that the model wrote for it (of embeddings, those that it read), by the server's count."""
        usage = self.body.get("usage") if isinstance(self.body, dict) else None
        if not isinstance(usage, dict):
            return 0
        for name in ("completion_tokens", "output_tokens", "prompt_tokens"):
            if isinstance(count := usage.get(name), int):
                return count
        return 0

    def line(self) -> bytes:
        """Return the line of an output file, with its line end."""
        response = {"status_code": self.status, "request_id": self.request_id, "body": self.body}
        found = {
            "id": f"batch_req_{secrets.token_hex(12)}",
            "custom_id": self.custom_id,
            "response": response if self.status else None,
            "error": None if self.status else {"code": self.error_code, "message": self.error_message},
        }
        return json.dumps(found, separators=(",", ":")).encode() + b"\n"


def read_request(raw: bytes) -> Asked:
    """Return the request of one line. Raises LineError."""
    found = _object(raw)
    custom_id, url, body = found.get("custom_id"), found.get("url"), found.get("body")
    if not isinstance(custom_id, str) or not custom_id:
        raise LineError("it has no custom_id, which must be a text that names this request in the output")
    if len(custom_id) > ID_CHARS_MAX:
        raise LineError(f"its custom_id has {len(custom_id)} characters, more than {ID_CHARS_MAX}")
    if found.get("method") != "POST":
        raise LineError(f'its method is {_shown(found.get("method"))}; it must be "POST"')
    if url not in URLS:
        raise LineError(f"its url is {_shown(url)}; a batch may ask {', '.join(URLS)}")
    if not isinstance(body, dict):
        raise LineError(f"its body is {_shown(body)}; it must be a JSON object, the body of the request")
    if body.get("stream"):
        raise LineError("its body has stream: true; the answers of a batch come whole")
    if body.get("background"):
        raise LineError("its body has background: true; a batch waits for its answers")
    return Asked(custom_id, str(url), body)


def read_answer(raw: bytes) -> tuple[str, bool]:
    """Return (custom_id, whether it failed) of one line of an output. Raises LineError."""
    found = _object(raw)
    custom_id, response = found.get("custom_id"), found.get("response")
    if not isinstance(custom_id, str) or not ("response" in found or "error" in found):
        raise LineError("it is no answer of a batch: it needs a custom_id, and a response or an error")
    status = response.get("status_code") if isinstance(response, dict) else None
    is_answered = isinstance(status, int) and 200 <= status < 300 and found.get("error") is None
    return custom_id, not is_answered


def fingerprint(custom_id: str, salt: bytes) -> int:
    """Return 64 bits that stand for a name; `salt` is at most 16 bytes."""
    data = custom_id.encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(data, digest_size=8, salt=salt).digest(), "little")


def _object(raw: bytes) -> dict[str, Any]:
    if len(raw) > ANSWER_BYTES_MAX:
        raise LineError(f"it has more than {ANSWER_BYTES_MAX >> 20} MiB")
    try:
        found = json.loads(raw, parse_constant=_no_number)
    except RecursionError:
        raise LineError("it is nested too deeply") from None
    except ValueError as error:
        raise LineError(f"it is no JSON: {error}") from None
    if not isinstance(found, dict):
        shown = "null" if found is None else _shown(found)
        raise LineError(f"it is {shown}; it must be a JSON object")
    return found


def _no_number(text: str) -> NoReturn:
    raise LineError(f"it is no JSON: {text} is no number")


def _shown(value: Any) -> str:
    if value is None:
        return "missing"
    if isinstance(value, str | int | float | bool):
        return json.dumps(value if not isinstance(value, str) else value[:80])
    return "a list" if isinstance(value, list) else "an object"
