"""Requests that relayline and llama-server are compared on: every route that both have, every field, bad input too."""

from __future__ import annotations

from typing import Any, NamedTuple

Body = dict[str, Any]


class Request(NamedTuple):
    """One request; without a body it is a GET, and a text is sent as it is."""

    path: str
    body: Body | str | None = None


COMPLETION: Body = {"prompt": "def read_lines(path):\n", "temperature": 0, "n_predict": 4}
CHAT: Body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, "temperature": 0}
TEXT: Body = {"prompt": "import os\n", "max_tokens": 3, "temperature": 0}
SCHEMA: Body = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
TOOL: Body = {"type": "function", "function": {"name": "look", "description": "Look.", "parameters": {
    "type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]}}}  # fmt: skip
CALL: Body = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": '{"at": "x"}'}}
USER: Body = {"role": "user", "content": "hi"}

_COMPLETIONS: tuple[Body, ...] = (
    {}, {"n_probs": 3}, {"return_tokens": True}, {"stream": True}, {"stream": True, "n_probs": 1}, {"stop": ["("]},
    {"n_predict": 0}, {"n_predict": 1}, {"prompt": ["a", "b"]}, {"prompt": [[5, 6], "x"]}, {"prompt": [5, 6, "x"]},
    {"prompt": {"prompt_string": "x"}}, {"response_fields": ["content", "generation_settings/n_predict"]},
    {"stream": True, "return_progress": True, "cache_prompt": False}, {"timings_per_token": True, "stream": True},
    {"repeat_penalty": 1.3, "repeat_last_n": 16}, {"dry_multiplier": 0.8}, {"logit_bias": [[93, -5]]},
    {"logit_bias": [["y", False]]}, {"ignore_eos": True}, {"grammar": 'root ::= "yes" | "no"'},
    {"json_schema": SCHEMA, "n_predict": 20}, {"samplers": ["top_k"]}, {"samplers": ["temperature", "top_k"]},
    {"n_cmpl": 2}, {"n": 2}, {"seed": 5, "temperature": 1.0}, {"mirostat": 2},
    {"post_sampling_probs": True, "n_probs": 2},
    {"n_probs": 50}, {"id_slot": 0}, {"n_keep": 5}, {"t_max_predict_ms": 1000}, {"min_keep": 2},
    {"presence_penalty": 1, "frequency_penalty": 1}, {"typical_p": 0.5}, {"xtc_probability": 0.5}, {"top_n_sigma": 1.0},
    {"prompt": ""}, {"prompt": []}, {"prompt": None}, {"prompt": [99999]}, {"temperature": "x"}, {"n_predict": -2},
    {"unknown": 1}, {"lora": [{"id": 0, "scale": 1}]}, {"n_predict": -1, "prompt": "x " * 10, "stop": ["\n"]},
    {"max_tokens": 2}, {"prompt": "a " * 2000}, {"dynatemp_range": 0.5},
    {"samplers": ["top_k", "adaptive_p"], "top_k": 1, "adaptive_target": 0.5},
    {"dynatemp_range": 0.5, "dynatemp_exponent": 2, "temperature": 1.0, "top_k": 1},
    {"top_k": 1}, {"top_p": 0.5}, {"min_p": 0.2}, {"top_k": 0}, {"temperature": -1}, {"seed": -1}, {"seed": 4294967295},
    {"stop": []}, {"stop": [""]}, {"stop": "("}, {"n_predict": "4"}, {"n_predict": 4.0}, {"stream": "yes"},
    {"n_probs": -1}, {"prompt": 5}, {"prompt": [-1]}, {"prompt": [[]]}, {"prompt": "a\u0000b"},
    {"prompt": "\u00e9\U0001f600"},
    {"grammar": "root ::= ("}, {"grammar": 'root ::= "a"', "json_schema": SCHEMA}, {"json_schema": {}},
    {"json_schema": {"type": "nothing"}}, {"json_schema": "x"}, {"logit_bias": {"93": -5}},
    {"logit_bias": [[99999, 1]]},
    {"logit_bias": "x"}, {"stop": ["\n"], "stream": True}, {"ignore_eos": True, "stream": True, "n_predict": 2},
    {"stream": True, "prompt": ["a", "b"]}, {"stream": True, "prompt": [99999]}, {"n_indent": 4}, {"samplers": "kt"},
    {"samplers": []}, {"samplers": ["nothing"]}, {"samplers": ["top-k", "temp"]}, {"samplers": ["temp", "top_k"]},
    {"dry_sequence_breakers": []}, {"dry_base": 0.5}, {"mirostat": 3},
    {"prompt": "x", "return_tokens": True, "n_probs": 1, "stream": True}, {"cache_prompt": False},
    {"response_fields": []}, {"response_fields": ["timings/predicted_n"]},
    {"samplers": ["top_k", "infill"], "top_k": 1}, {"n_cmpl": 0}, {"n_cmpl": 3, "n_predict": 1, "stream": True},
    {"repeat_last_n": -2},
)  # fmt: skip
_CHATS: tuple[Body, ...] = (
    {}, {"stream": True}, {"logprobs": True, "top_logprobs": 2}, {"timings_per_token": True, "stream": True},
    {"stream": True, "stream_options": {"include_usage": True}}, {"n": 2}, {"stop": ["e"]},
    {"tools": [TOOL], "tool_choice": "none"}, {"tools": [TOOL], "tool_choice": "required", "max_tokens": 60},
    {"tools": [TOOL], "tool_choice": "required", "max_tokens": 60, "stream": True},
    {"tools": [TOOL], "tool_choice": "nothing"}, {"tools": "x"}, {"tools": [{}]},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}, "max_tokens": 40},
    {"response_format": {"type": "json_object", "schema": SCHEMA}, "max_tokens": 40},
    {"response_format": {"type": "nothing"}}, {"response_format": {"type": "text"}},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "nothing"}}}},
    {"messages": []}, {"messages": "x"}, {"messages": [{"role": "user"}]}, {"messages": [{"content": "hi"}]},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]},
    {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]},
    {"messages": [USER, {"role": "assistant", "content": None, "tool_calls": [CALL]},
                  {"role": "tool", "tool_call_id": "call_1", "content": "it"}]},
    {"messages": [USER, {"role": "assistant", "content": "The"}]}, {"messages": [{"role": "odd", "content": "x"}]},
    {"logprobs": False, "top_logprobs": 2}, {"top_logprobs": 0, "logprobs": True}, {"n": 0}, {"max_tokens": 0},
    {"max_tokens": -1, "stop": ["\n"]}, {"max_completion_tokens": 2, "max_tokens": None}, {"temperature": 3},
    {"frequency_penalty": 1.5, "presence_penalty": 1.5}, {"logit_bias": {"93": -100}}, {"seed": 7, "temperature": 1},
    {"stop": None}, {"stream": True, "logprobs": True, "top_logprobs": 1}, {"stream": True, "n": 2},
    {"model": "another"}, {"messages": [{"role": "user", "content": "a " * 2000}]},
    {"chat_template_kwargs": {"enable_thinking": False}}, {"reasoning_format": "none"}, {"parallel_tool_calls": True},
    {"grammar": 'root ::= "yes" | "no"'}, {"messages": [{"role": "system", "content": "Be brief."}, USER]},
)  # fmt: skip
_TEXTS: tuple[Body, ...] = (
    {}, {"stream": True}, {"logprobs": 2}, {"echo": True},
    {"n": 2}, {"stop": ["\n"]}, {"prompt": ["a", "b"]}, {"prompt": [5, 6]}, {"suffix": "x"}, {"best_of": 2},
    {"max_tokens": None}, {"prompt": None}, {"stream": True, "stream_options": {"include_usage": True}},
    {"logprobs": 2, "stream": True},
)  # fmt: skip

REQUESTS: tuple[Request, ...] = (
    *(Request("/completion", COMPLETION | more) for more in _COMPLETIONS),
    *(Request("/v1/chat/completions", CHAT | more) for more in _CHATS),
    *(Request("/v1/completions", TEXT | more) for more in _TEXTS),
    Request("/tokenize", {"content": "hi there"}),
    Request("/tokenize", {"content": "hi", "with_pieces": True}),
    Request("/tokenize", {"content": ""}),
    Request("/tokenize", {"content": "a\u00e9\U0001f600", "with_pieces": True}),
    Request("/tokenize", {"content": "<|im_end|>x", "parse_special": True}),
    Request("/tokenize", {"content": "<|im_end|>x", "parse_special": False, "add_special": True}),
    Request("/tokenize", {}),
    Request("/tokenize", {"content": 5}),
    Request("/detokenize", {"tokens": [5, 6]}),
    Request("/detokenize", {"tokens": []}),
    Request("/detokenize", {}),
    Request("/detokenize", {"tokens": [99999]}),
    Request("/detokenize", {"tokens": "x"}),
    Request("/apply-template", {"messages": [USER]}),
    Request("/apply-template", {"messages": [USER, {"role": "assistant", "content": "The"}]}),
    Request("/apply-template", {"messages": [USER], "add_generation_prompt": False}),
    Request("/apply-template", {"messages": [USER], "tools": [TOOL]}),
    Request("/apply-template", {}),
    Request("/infill", {"input_prefix": "a", "input_suffix": "b"}),
    Request("/infill", {"input_prefix": "a"}),
    Request("/embedding", {"content": "x"}),
    Request("/v1/embeddings", {"input": "x"}),
    Request("/v1/embeddings", {"input": ["x", "y z"]}),
    Request("/v1/embeddings", {"input": [5, 6], "encoding_format": "base64"}),
    Request("/v1/embeddings", {}),
    Request("/v1/embeddings", {"input": ""}),
    Request("/props"),
    Request("/slots"),
    Request("/v1/models"),
    Request("/models"),
    Request("/health"),
    Request("/v1/health"),
    Request("/nope"),
    Request("/v1/chat/completions"),
    Request("/health", {}),
    Request("/completion", "{"),
    Request("/v1/chat/completions", "{"),
    Request("/v1/chat/completions", "[]"),
    Request("/completion", '{"prompt": "x", "n_predict": 1, "temperature": 0, "prompt": "y"}'),
)
