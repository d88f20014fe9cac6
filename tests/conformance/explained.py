"""Failures of others' suites, each with its reason: another product's way, or what this server refuses by design."""

from __future__ import annotations

# (suite, pattern found in "TEST: MESSAGE", reason)
EXPLAINED: tuple[tuple[str, str, str], ...] = (
    (
        "openai-python",
        r"no route /v1/chat/completions/|not allowed on /v1/chat/completions",
        "Stored chat completions are not served; responses are stored here.",
    ),
    ("openai-python", r"DELETE is not allowed on /v1/models/", "The served model cannot be deleted by a client."),
    (
        "openai-python",
        r"not allowed on /v1/responses/compact",
        "OpenAI's compaction answers with an encrypted item that only its models read.",
    ),
    (
        "openai-python",
        r"no response '.*' is stored here|previous_response_id: the response",
        "The suite is made for a mock that takes any id; the response does not exist.",
    ),
    (
        "openai-python",
        r"stream: a stored response is not streamed again",
        "A stored response is read whole; it is not streamed a second time.",
    ),
    (
        "openai-python",
        r"input: required field is missing",
        "The suite asks the mock for a response to nothing; there is no stored prompt to take its place.",
    ),
    (
        "openai-python",
        r"(max_completion_tokens|best_of|max_tokens): expected int >= 1",
        "The mock takes 0; OpenAI's own service refuses it as well.",
    ),
    (
        "anthropic-sdk",
        r"(container|mcp_servers|inference_geo|tools\[\d+\]|messages\[\d+\]).*(not supported|served)",
        "Hosted tools, containers and the like are not served.",
    ),
    ("langchain", r"image|audio|pdf|media", "The demo model reads text only."),
)
