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
    (
        "anthropic-sdk",
        r"test_deprecated_model_warning",
        "The test asks for each of Anthropic's retired models by name; this server has one model.",
    ),
    (
        "llama-server",
        r"test_chat_completion\[|test_chat_completion::test_chat_completion_with_openai|test_completion_with_openai_library",
        "The test expects llama.cpp's build number as the fingerprint, and what the model stories260K writes.",
    ),
    (
        "llama-server",
        r"test_completion_with_response_format.*'\[ -3000 \]'",
        "A schema that gives `items` and no `type` allows any value, as JSON Schema says; the test wants an array.",
    ),
    (
        "llama-server",
        r"match_regex\('|test_completion::test_completion(_stream)?\[|_stops: |stream_vs_non_stream|response_fields"
        r"|completion_unified|multiple_choices: .*stop|prompt_cache:|cached_tokens: assert|usage_(single|multiple)"
        r"|tokenize_with_bos",
        "The test expects the text, the seed or the token counts of the model stories260K, which cannot be had here.",
    ),
    (
        "llama-server",
        r"completion_stream\[|timings_per_token: |logprobs_stream: |without_tool_call_fast",
        "The first event of a stream has an empty text, as OpenAI's has; llama-server's has null.",
    ),
    (
        "llama-server",
        r"__verbose",
        "`__verbose` is llama-server's own look inside; here `return_token_ids` and the spans show the prompt.",
    ),
    (
        "llama-server",
        r"test_template::|test_apply_chat_template",
        "The test starts llama-server with another model's chat template.",
    ),
    (
        "llama-server",
        r"test_(server_multiple_addresses|server_slots|server_model|metrics_disabled|cors_|local_media_file|no_ui)"
        r"|incorrect_api_key|pooling_none",
        "The test starts llama-server with flags of its own, and runs here against a server that is up.",
    ),
    (
        "llama-server",
        r"test_server_props",
        "The path of a file on the server is not told to its clients.",
    ),
    (
        "llama-server",
        r"correct_api_key",
        "Routes without `/v1` are OpenAI's here; llama-server's own form is at `/completion`.",
    ),
    (
        "llama-server",
        r"test_invalid_chat_completion_req",
        "Two turns of the assistant at the end are a conversation like any other; llama-server refuses them.",
    ),
    (
        "llama-server",
        r"context_size_exceeded|prompt_too_long",
        "A prompt over the context is told in OpenAI's words, with its code `context_length_exceeded`.",
    ),
    (
        "llama-server",
        r"return_progress|prompt_progress|llama_telemetry",
        "Progress follows the steps of this pipeline, whose batches have other bounds than llama-server's.",
    ),
    (
        "llama-server",
        r"token_count: assert 404",
        "`/v1/chat/completions/input_tokens` is llama-server's own; `/tokenize` with messages counts them here.",
    ),
    (
        "llama-server",
        r"with_image|vision_",
        "The demo model reads text only: 400 as in Anthropic's API; llama-server says 500. One test fetches a picture.",
    ),
    (
        "llama-server",
        r"anthropic_empty_messages",
        "A conversation without a message is refused, as Anthropic's API refuses it.",
    ),
    (
        "llama-server",
        r"thinking_history|thinking_with_reasoning",
        "The demo model's template has no place for thoughts.",
    ),
    (
        "llama-server",
        r"post_sampling|post_backend_sampling",
        "`post_sampling_probs` is refused: probabilities are told as they are before sampling.",
    ),
    (
        "llama-server",
        r"test_completion::test_logit_bias",
        "OpenAI's form of `logit_bias` has token ids for keys; llama-server takes texts too. Lists of pairs pass.",
    ),
    (
        "llama-server",
        r"embedding_multiple_with_fa",
        "The inputs are longer than the context that this suite's pipeline has.",
    ),
    (
        "llama-server",
        r"embedding_mixed_input|content_text_same",
        "`input` is a text, tokens or a list of either, as OpenAI has it; llama-server mixes them, and takes parts.",
    ),
    (
        "llama-server",
        r"test_infill",
        "The demo model's vocabulary has no tokens around a gap: 501.",
    ),
    (
        "llama-server",
        r"test_metrics_(prometheus_format|prompt_processed|predicted_total|embedding_prompt)",
        "Metrics have relayline's names; llama-server has other names, and headers beside them.",
    ),
    (
        "llama-server",
        r"static_assets|proxy_only",
        "Files of llama-server's own web page, and its proxy for tools.",
    ),
    (
        "schemathesis",
        r"^POST /infill: .*\[501\]",
        "The demo model's vocabulary has no tokens around a gap: 501, which the suite counts as a fault of the server.",
    ),
    *(
        ("vllm-entrypoints", f"::{test}: .*{message}", reason)
        for test, message, reason in (
            (
                r"test_completion_of_a_cut_prompt\[(left|right)-kept\d\]",
                "truncate_prompt_tokens: not supported",
                "A prompt that is too long is refused in OpenAI's words; nothing of it is cut. Refused in one line.",
            ),
            (
                "test_the_last_event_of_a_(completion|chat)_has_text",
                "(text=''|content=None)",
                "A stream ends with an event that has no text, as OpenAI's do; vLLM puts the last text into it.",
            ),
            ("test_beams", "use_beam_search: not supported", "Beams are not served. Refused in one line."),
            (
                "test_a_role_of_ones_own",
                "is no role; use one of",
                "An unknown role is refused, as OpenAI refuses it; vLLM hands it to the template.",
            ),
            (
                r"test_a_seed_too_long\[-?\d+\]",
                "DID NOT RAISE",
                "A seed of any size counts, modulo 2^64; vLLM takes 64 bits with a sign.",
            ),
            ("test_invocations", "KeyError: 'choices'", "SageMaker's route for vLLM's images there."),
            (
                r"test_small_routes\[(ping|load)\]",
                "404",
                "SageMaker's `/ping` and vLLM's optional `/load`; here `/health`, and the load in `/metrics`.",
            ),
            (
                r"test_a_last_message_is_gone_on_with\[True\]",
                "echo: not supported",
                "A chat's answer has what is new; the client has the rest. Refused in one line.",
            ),
            (
                "test_all_logprobs_of_a_(chat|prompt)",
                "logprobs: expected int >= 0",
                "-1 asks vLLM for the whole vocabulary; the most here is 20, as in OpenAI's API.",
            ),
            (
                "test_a_body_of_another_type",
                "DID NOT RAISE",
                "`curl -d` names a form where no type is given; the body is read as JSON, as llama-server does.",
            ),
            (
                "test_tokens_as_token_ids",
                "return_tokens_as_token_ids: not supported",
                "`return_token_ids` gives the ids; tokens keep their texts. Refused in one line.",
            ),
            (
                "test_a_response_in_the_background",
                "background: not supported",
                "A response is made while its request is open. Refused in one line.",
            ),
            (
                "test_messages_of_a_response",
                "KeyError: 'input_messages'",
                "vLLM's own look inside; here the spans show the prompt.",
            ),
        )
    ),
    (
        "vendor-specs",
        r"::test_(drawn|answer)\[/completions-.*\{\"text_offset\":\[.*\"token_logprobs\":\[null,",
        "Nothing stands before an echoed prompt's first token: its probability is null, as OpenAI's service has it.",
    ),
    (
        "vendor-specs",
        r"test_stream\[/completions-.*stream: not together with echo and logprobs",
        "A prompt's probabilities come with a whole answer, not in a stream; refused in one line.",
    ),
    (
        "vendor-specs",
        r"test_stream\[/completions-prompt-max_tokens-n\]: AssertionError: event, choices/#/finish_reason: null "
        r"is not of type \"string\"; event, choices/#/finish_reason: null is not one of [^;]*$",
        "OpenAI's description has no streams of completions; its service ends none of them before the last event.",
    ),
    (
        "vendor-specs",
        r"test_stream\[/v1/messages-.*: AssertionError: ping, : [^;]*$",
        "Anthropic's service sends `ping` events, which its guide describes and its description leaves out.",
    ),
    (
        "langchain",
        r"test_tool_calling.*\{'input': 1\} == \{'input': 3\}",
        "The call comes as its schema says; the small demo model does not put the right number in it.",
    ),
    ("langchain", r"test_agent_loop", "The demo model does not find out by itself that it has to call a tool."),
    ("langchain", r"test_unicode_tool_call", "The call comes; the demo model does not write Chinese."),
    ("langchain", r"image|audio|pdf|media", "The demo model reads text only."),
)
