"""relayline and llama-server of the pinned llama.cpp, field by field: `python -m benches.fields`.

Both serve the demo model. Each of some 190 requests goes to both, and the answers are compared: status, fields, values.
A difference that no rule explains is printed, and makes the exit code 1. docs/reference/llama-server.md has the same
reasons for people.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import re
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp

from benches.field_requests import CHAT, COMPLETION, REQUESTS, TEXT, Request
from benches.peers import Peers, build_peers, find_peers
from benches.servers import Setup, llama_server_with, relayline_up
from relayline.deploy.testing.paths import DEMO_MODEL

N_LANES, CTX_TOKENS = 2, 512
LOGPROB_NEAR = 0.12  # two computations of the same row, one with other kernels
TIMEOUT_S = 60.0
# Of these only the fields are compared: the values are of one answer, or of one build.
VARYING = {"id", "created", "system_fingerprint", "build_info", "seed", "timings"}
BASES: Mapping[str, Mapping[str, Any]] = {
    "/completion": COMPLETION,
    "/v1/chat/completions": CHAT,
    "/v1/completions": TEXT,
}


class Rule(NamedTuple):
    """Differences of one kind, by regular expressions, and why they are there."""

    route: str
    sent: str  # of the fields that make the request another one than its route's first, as JSON; empty: any
    difference: str
    why: str


_REFUSED = "(status 200 theirs, 400 ours|status 500 theirs, 400 ours)"
_CHATS = "/v1/chat/completions"
_OPENAI = "OpenAI's way on OpenAI's routes"
RULES = (
    Rule("/v1/.*", "", r"/timings: only theirs", "with timings_per_token alone: OpenAI's answers have none"),
    Rule("", "", r"/prompt_progress/", "a stage tells of whole chunks"),
    Rule("", "", r"/(id_slot|id_task)\b", "lanes are the coordinator's"),
    Rule("", "", r"cached_tokens|tokens_cache\b", "what an earlier request left in a lane"),
    Rule("", "", r"completion_tokens_details|/refusal|/logprobs: only ours \(None|/usage: only ours \(None", _OPENAI),
    Rule("", "", r"status 500 theirs, 400 ours", "a client's mistake is 400"),
    # /completion
    Rule("/completion", '"(n_predict": 0|max_tokens": 0)', r"/(n_predict|max_tokens)", "one token is always picked"),
    Rule("/completion", "return_progress", r"/tokens: 1 theirs, 0 ours", "token 0, which nobody picked"),
    Rule("/completion", "logit_bias|ignore_eos", r"/logit_bias: \d theirs, 0 ours", "texts become tokens later"),
    Rule("/completion", "json_schema", r"/generation_settings/grammar", "another language of grammars"),
    Rule("/completion", '"json_schema": {}', "", "{} allows any value; llama-server has an object of it"),
    Rule("/completion", r'"samplers": \[("top_k"(, "(infill|adaptive_p)")?)?\]', "",
         "sampled at temperature 1: draws are our own"),
    Rule("/completion", '"samplers"', _REFUSED, "unknown ones, and some orders, are refused"),
    Rule("/completion", '"(seed|typical_p|xtc_probability|mirostat)"', r"/content", "draws are our own"),
    Rule("/completion", "mirostat", r"", "draws are our own"),
    Rule("/completion", "dynatemp_range", r"/content", "temperature 0 is the likeliest token"),
    Rule("/completion", "n_probs", "/top_logprobs", "near-ties change places"),
    Rule("/completion", "n_keep", r"/n_keep", "the context is not shifted"),
    Rule("/completion", '"(post_sampling_probs|min_keep|lora)"', _REFUSED,
         "it would change the answer, and is not served"),
    Rule("/completion", '"n_probs": (50|-1)', _REFUSED, "0 to 20, as OpenAI's top_logprobs"),
    Rule("/completion", '"prompt": (""|\\[\\[\\]\\])', _REFUSED, "there is no row to sample from"),
    Rule("/completion", '"n_predict": -2', "status 400 theirs, 200 ours", "taken as -1; older llama-servers do"),
    Rule("/completion", '"n_cmpl": 3', "status 400 theirs, 200 ours", "more answers than lanes wait"),
    Rule("/completion", '"dry_sequence_breakers": \\[\\]', "status 400 theirs, 200 ours", "nothing breaks a sequence"),
    Rule("/completion", '"(stop|logit_bias|dry_base|grammar)"|"mirostat": 3', _REFUSED,
         "a value that means nothing is refused, not left out"),
    # Chats
    Rule(_CHATS, "stream", r"/delta/content: 'None' theirs, '' ours", _OPENAI),
    Rule(_CHATS, '"n": 2', r"/usage/|/index|/delta/", "all answers are counted; their events come as they are made"),
    Rule(_CHATS, '"tools"|"tool_calls"', "", "this template knows no tools: relayline writes them into the prompt"),
    Rule(_CHATS, "response_format", r"/message/content|/usage/", "blanks between JSON's tokens are free"),
    Rule(_CHATS, '"role": "assistant", "content": "The"', "", "a last turn goes on with continue_final_message"),
    Rule(_CHATS, '"messages": (\\[\\]|.*"odd")', _REFUSED, "OpenAI refuses them"),
    Rule(_CHATS, '"top_logprobs": 0', r"/logprobs: only ours", _OPENAI),
    Rule(_CHATS, '"(max_tokens": 0|temperature": 3)', _REFUSED, "out of OpenAI's range"),
    Rule(_CHATS, "logprobs", "/id: only theirs", "OpenAI's form has no ids; return_token_ids gives them"),
    Rule(_CHATS, "timings_per_token", "/timings: only ours", "every event has them, the first one too"),
    Rule(_CHATS, '"seed"', r"/message/content", "draws are our own"),
    Rule(_CHATS, '"model": "another"', "status 200 theirs, 404 ours", "OpenAI's way unless --any-model-name"),
    # Completions
    Rule("/v1/completions", "stream", r"/usage|: 4 theirs, 5 ours", "usage comes last, and only when asked for"),
    Rule("/v1/completions", "logprobs", r"/logprobs/", "OpenAI's form of completions, not that of chats"),
    Rule("/v1/completions", "echo", r"/text", _OPENAI),
    Rule("/v1/completions", '"n": 2|"prompt": \\["a", "b"\\]', r"/usage/", "all answers are counted"),
    Rule("/v1/completions", "suffix", "status 200 theirs, 501 ours", "an answer without it would be another one"),
    Rule("/v1/completions", "best_of", _REFUSED, "an answer without it would be another one"),
    Rule("/v1/completions", '"max_tokens": null', "", "16 by default"),
    # The others
    Rule("/(de)?tokenize", "", _REFUSED, "a body without its field is refused"),
    Rule("/detokenize", "", r"/prompt: only ours", "vLLM's name of it"),
    Rule("/apply-template", '"assistant"|tools', r"/prompt", "as in chats: see there"),
    Rule("(/v1)?/embeddings?", "", r"status 501 theirs", "llama-server serves them in a mode of its own"),
    Rule("/props", "", r"/(model_ftype|model_path|media_marker|ui|ui_settings|cors_proxy_enabled)\b",
         "of its own page and process"),
    Rule("/props", "", "/chat_template_caps", "told by no other server"),
    Rule("/props", "", r"/(chat_template|endpoint_metrics|model_alias)\b", "of this server"),
    Rule("/slots", "", r"/(params|state|n_prompt_tokens|has_new_line|speculative)\b", "what clients ask is theirs"),
    Rule("(/v1)?/models", "", "", "OpenAI's fields, vLLM's and Anthropic's; no Ollama's"),
    Rule("", "", "status 404 theirs, 405 ours", "the path is known, the method is not"),
)  # fmt: skip


def explained(request: Request, difference: str) -> str:
    """Return why a difference is there, empty where no rule says it."""
    sent = json.dumps(_sent(request))
    for rule in RULES:
        is_of_route = re.fullmatch(rule.route or ".*", request.path)
        if is_of_route and re.search(rule.sent, sent) and re.search(rule.difference, difference):
            return rule.why
    return ""


def differences(theirs: Any, ours: Any, where: str = "") -> Iterator[str]:
    """Yield a line for each field that only one of two answers has, and each with two values."""
    if isinstance(theirs, dict) and isinstance(ours, dict):
        for key in dict.fromkeys([*theirs, *ours]):
            if key not in theirs:
                yield f"{where}/{key}: only ours ({str(ours[key])[:50]})"
            elif key not in ours:
                yield f"{where}/{key}: only theirs ({str(theirs[key])[:50]})"
            else:
                found = differences(theirs[key], ours[key], f"{where}/{key}")
                yield from (each for each in found if key not in VARYING or ": only " in each)
    elif isinstance(theirs, list) and isinstance(ours, list):
        if len(theirs) != len(ours):
            yield f"{where}: {len(theirs)} theirs, {len(ours)} ours"
        for one, other in zip(theirs, ours, strict=False):
            yield from differences(one, other, f"{where}[]")
    elif _is_number(theirs) and _is_number(ours) and isinstance(theirs + ours, float):
        if abs(theirs - ours) >= LOGPROB_NEAR:
            yield f"{where}: {theirs} theirs, {ours} ours"
    elif theirs != ours:
        yield f"{where}: {str(theirs)[:80]!r} theirs, {str(ours)[:80]!r} ours"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _sent(request: Request) -> Any:
    """Return what makes a request another one than the first of its route."""
    base = BASES.get(request.path, {})
    if not isinstance(request.body, dict):
        return request.body
    return {key: value for key, value in request.body.items() if base.get(key) != value}


class Answer(NamedTuple):
    """An answer: its status, and its body as JSON; of a stream the list of its events."""

    status: int
    body: Any


async def _ask(session: aiohttp.ClientSession, url: str, request: Request) -> Answer:
    data = request.body if isinstance(request.body, str) or request.body is None else json.dumps(request.body)
    method, headers = "GET" if data is None else "POST", {"Content-Type": "application/json"}
    async with session.request(method, url + request.path, data=data, headers=headers) as reply:
        text = await reply.text()
        if text.startswith("data:"):
            lines = [line.removeprefix("data: ") for line in text.split("\n\n")]
            return Answer(reply.status, [json.loads(line) for line in lines if line.startswith("{")])
        return Answer(reply.status, json.loads(text) if text[:1] in ("{", "[") else text[:200])


def compared(theirs: Answer, ours: Answer) -> list[str]:
    """Return the differences of two answers. Two refusals of one status are alike: texts and forms differ."""
    if theirs.status != ours.status:
        bodies = " | ".join(str(each.body)[:160] for each in (theirs, ours))
        return [f"status {theirs.status} theirs, {ours.status} ours: {bodies}"]
    if theirs.status != 200:
        return []
    return list(dict.fromkeys(differences(theirs.body, ours.body)))


@contextlib.asynccontextmanager
async def _both(peers: Peers, directory: Path) -> AsyncIterator[tuple[str, str]]:
    """Run both servers. Yields their addresses: llama-server's first."""
    setup = Setup(DEMO_MODEL, 2, N_LANES, CTX_TOKENS, tuple(os.sched_getaffinity(0)), directory, n_threads=1)
    theirs = ("--alias", "relayline-demo", "--ctx-size", str(N_LANES * CTX_TOKENS), "--parallel", str(N_LANES),
              "--threads", "1", "--slots", "--props")  # fmt: skip
    ours = ("--model-id", "relayline-demo", "--draft", "off", "--no-pin")
    async with (
        llama_server_with("llama-server", theirs, setup, peers) as url,
        relayline_up("relayline", ours, setup) as own,
    ):
        yield url, own.url


async def run(peers: Peers) -> int:
    """Compare all requests; print the unexplained differences. Returns the exit code."""
    reasons: Counter[str] = Counter()
    n_alike = n_unexplained = 0
    timeout = aiohttp.ClientTimeout(TIMEOUT_S)
    with tempfile.TemporaryDirectory(prefix="relayline-fields-") as directory:
        async with _both(peers, Path(directory)) as urls, aiohttp.ClientSession(timeout=timeout) as session:
            for request in REQUESTS:
                theirs, ours = [await _ask(session, url, request) for url in urls]
                found = {each: explained(request, each) for each in compared(theirs, ours)}
                n_alike += not found
                reasons.update(filter(None, found.values()))
                if unexplained := [each for each, why in found.items() if not why]:
                    print(f"{request.path} {json.dumps(_sent(request))[:160]}")
                    print("".join(f"    {each[:300]}\n" for each in unexplained), end="")
                    n_unexplained += len(unexplained)
    print(f"\n{len(REQUESTS)} requests: {n_alike} answered alike; {sum(reasons.values())} differences explained, "
          f"{n_unexplained} not")  # fmt: skip
    for why, count in reasons.most_common():
        print(f"{count:>5}  {why}")
    return 1 if n_unexplained else 0


def main() -> None:
    """Find or build llama-server, and compare."""
    parser = argparse.ArgumentParser(prog="python -m benches.fields", description=__doc__)
    parser.add_argument("--jobs", type=int, default=1, help="compilers at once, where llama-server has to be built")
    peers = find_peers() or build_peers(parser.parse_args().jobs)
    sys.exit(asyncio.run(run(peers)))


if __name__ == "__main__":
    main()
