"""Reasons for failures of others' suites: the suite tests another product's way, or this server refuses by design.

An explanation holds only for failures that have one of its names and whose message fits its pattern.
"""

from __future__ import annotations

import dataclasses
import re


@dataclasses.dataclass(frozen=True, slots=True)
class Explanation:
    """Why a test of a suite fails."""

    suite: str
    tests: str  # a pattern of whole names, without the brackets at their end
    message: str  # a pattern of the failure's message, from its first character on
    reason: str

    def fits(self, suite: str, test: str, message: str) -> bool:
        """Return whether a failure is this one."""
        name = test.partition("[")[0]
        return suite == self.suite and bool(re.fullmatch(self.tests, name) and re.match(self.message, message))


_FORMS = "test_(method|raw_response|streaming_response)"
_400, _404, _405 = (f"[a-z]+\\.[A-Za-z]+Error: Error code: {status} - " for status in (400, 404, 405))
_NOT_STORIES = (
    "The test expects the text, the seed or the token counts of the model stories260K, which cannot be had here."
)
_FLAGS = "The test starts llama-server with flags of its own, and runs here against a server that is up."


def _got(status: int, wanted: int) -> str:
    return rf"assert {status} == {wanted} \+ where {status} = <utils\.ServerResponse"


_OPENAI_PYTHON = (
    (
        f"TestCompletions::{_FORMS}_(retrieve|update|delete|list)(_with_all_params)?",
        f"({_404}no route /v1/chat/completions/completion_id$|{_405}GET is not allowed on /v1/chat/completions$)",
        "Stored chat completions are not served; responses are stored here.",
    ),
    (
        f"TestModels::{_FORMS}_delete",
        f"{_405}DELETE is not allowed on /v1/models/relayline-demo$",
        "The served model cannot be deleted by a client.",
    ),
    (
        f"TestResponses::{_FORMS}_compact(_with_all_params)?",
        f"{_405}POST is not allowed on /v1/responses/compact$",
        "OpenAI's compaction answers with an encrypted item that only its models read.",
    ),
    (
        rf"(TestResponses::{_FORMS}_(retrieve(_with_all_params)?_overload_\d|delete|cancel)"
        f"|TestInputItems::{_FORMS}_list(_with_all_params)?)",
        rf"{_404}no response '(resp_677efb5139a88190b512bc3fef8e535d|response_id)' is stored here$",
        "The suite is made for a mock that takes any id; the response does not exist.",
    ),
    (
        r"(TestResponses::test_method_create_with_all_params_overload_\d|TestInputTokens::test_method_count_with_all_params)",
        f"{_400}previous_response_id: send one of conversation and previous_response_id: ",
        "The mock takes a conversation and a previous response at once; OpenAI's own service refuses both together.",
    ),
    (
        rf"(TestResponses::{_FORMS}_create_overload_\d|TestInputTokens::{_FORMS}_count)",
        f"{_400}input: required field is missing$",
        "The suite asks the mock for a response to nothing; there is no stored prompt to take its place.",
    ),
    (
        r"TestCompletions::test_method_create_with_all_params_overload_\d",
        f"{_400}(max_completion_tokens|best_of): expected int >= 1$",
        "The mock takes 0; OpenAI's own service refuses it as well.",
    ),
    (
        r"TestCompletions::test_method_create_with_all_params_overload_\d",
        f"{_400}audio: not supported by this server yet; send none$",
        "The test asks for an answer in sound; no model that speaks is served.",
    ),
)
_ANTHROPIC = (
    (
        r"TestMessages::test_method_create_with_all_params_overload_\d",
        f"{_400}.*'container: not supported by this server; send none'",
        "Hosted tools, containers and the like are not served.",
    ),
    (
        "TestMessages::test_deprecated_model_warning",
        f"{_404}.*the model 'claude-[^']*' does not exist; this server has 'relayline-demo'",
        "The test asks for each of Anthropic's retired models by name; this server has one model.",
    ),
)
_LANGCHAIN = (
    (
        "Test(Chat|Responses|Messages)::test_tool_calling(_async)?",
        r"AssertionError: assert \{'input': \d+\} == \{'input': 3\}",
        "The call comes as its schema says; the small demo model does not put the right number in it.",
    ),
    (
        "Test(Chat|Responses|Messages)::test_agent_loop",
        r"assert False \+ where False = any\(<generator object ChatModelIntegrationTests\.test_agent_loop",
        "The demo model does not find out by itself that it has to call a tool.",
    ),
    (
        "Test(Chat|Responses|Messages)::test_unicode_tool_call_integration",
        "AssertionError: Unicode characters not found in: ",
        "The call comes; the demo model does not write Chinese.",
    ),
)
_SCHEMATHESIS = (
    (
        "POST /(infill|api/generate)",
        r"ST101.*\[501\]",
        "The demo model's vocabulary has no tokens around a gap: 501, which the suite counts as a fault of the server.",
    ),
    (
        "POST (/v[12])?/(rerank|reranking|score)",
        r"ST101.*\[501\]",
        "The demo model has no head that ranks: 501, which the suite counts as a fault of the server.",
    ),
    (
        "POST (/v1)?/audio/transcriptions",
        r"ST101.*\[501\]",
        "The demo model takes no audio: 501, which the suite counts as a fault of the server.",
    ),
)
_VLLM = (
    (
        "test_completion_of_a_cut_prompt",
        f"{_400}truncate_prompt_tokens: not supported",
        "A prompt that is too long is refused in OpenAI's words; nothing of it is cut. Refused in one line.",
    ),
    (
        "test_the_last_event_of_a_(completion|chat)_has_text",
        r"(AssertionError: assert '' \+ where '' = CompletionChoice\(finish_reason='length'"
        r"|AssertionError: assert None \+ where None = ChoiceDelta\()",
        "A stream ends with an event that has no text, as OpenAI's do; vLLM puts the last text into it.",
    ),
    ("test_beams", f"{_400}use_beam_search: not supported", "Beams are not served. Refused in one line."),
    (
        "test_a_role_of_ones_own",
        rf"{_400}messages\[0\]\.role: 'my-custom-role' is not a role",
        "An unknown role is refused, as OpenAI refuses it; vLLM hands it to the template.",
    ),
    (
        "test_a_seed_too_long",
        "Failed: DID NOT RAISE BadRequestError$",
        "A seed of any size counts, modulo 2^64; vLLM takes 64 bits with a sign.",
    ),
    ("test_invocations", "KeyError: 'choices'$", "SageMaker's route in vLLM's images there; not served."),
    (
        "test_small_routes",
        r"AssertionError: assert 404 == 200 .*/(ping|load)'\)",
        "SageMaker's `/ping` and vLLM's optional `/load`; here `/health`, and the load in `/metrics`.",
    ),
    (
        "test_a_last_message_is_gone_on_with",
        f"{_400}echo: not supported",
        "A chat's answer has what is new; the client has the rest. Refused in one line.",
    ),
    (
        "test_all_logprobs_of_a_(chat|prompt)",
        f"{_400}(top|prompt)_logprobs: expected int >= 0$",
        "-1 asks vLLM for the whole vocabulary; the most here is 20, as in OpenAI's API.",
    ),
    (
        "test_a_body_of_another_type",
        "Failed: DID NOT RAISE APIStatusError$",
        "`curl -d` names a form where no type is given; the body is read as JSON, as llama-server does.",
    ),
    (
        "test_tokens_as_token_ids",
        f"{_400}return_tokens_as_token_ids: not supported",
        "`return_token_ids` gives the ids; tokens keep their texts. Refused in one line.",
    ),
    (
        "test_messages_of_a_response",
        "KeyError: 'input_messages'$",
        "vLLM's own look inside; here the spans show the prompt.",
    ),
)
_SPECS = (
    (
        "test_answer",
        r"AssertionError: Response violates schema: \{\"text_offset\":\[[\d,]*\],\"token_logprobs\":\[null,",
        "Nothing stands before an echoed prompt's first token: its probability is null, as OpenAI's service has it.",
    ),
    (
        "test_stream",
        r"AssertionError: \{\"error\":\{\"message\":\"stream: not together with echo and logprobs\"",
        "A prompt's probabilities come with a whole answer, not in a stream; refused in one line.",
    ),
    (
        "test_stream",
        r"AssertionError: event, choices/#/finish_reason: null is not of type \"string\"; "
        r"event, choices/#/finish_reason: null is not one of [^;]*$",
        "OpenAI's description has no streams of completions; its service ends none of them before the last event.",
    ),
    (
        "test_stream",
        r"AssertionError: ping, : \{\"type\":\"ping\"\} is not valid under any of the schemas [^;]*$",
        "Anthropic's service sends `ping` events, which its guide describes and its description leaves out.",
    ),
)
_LLAMA_SERVER = (
    (
        "test_chat_completion::test_chat_completion",
        r"AssertionError: assert False \+ where False = <built-in method startswith of str object at 0x\w+>\('b'\)",
        "The test expects llama.cpp's build number as the fingerprint.",
    ),
    (
        "(test_chat_completion::test_chat|test_completion::test)_completion_with_openai_library",
        r"AssertionError: assert \('relayline-[\d.]+' is not None and False\)",
        "The test expects llama.cpp's build number as the fingerprint.",
    ),
    (
        "test_chat_completion::test_completion_with_response_format",
        r"AssertionError: assert False \+ where False = match_regex\('\[ -3000 \]', ",
        "A schema that gives `items` and no `type` allows any value, as JSON Schema says; the test wants an array.",
    ),
    (
        "(test_basic::test_load_split_model|test_compat_oai_responses::test_responses_with_openai_library"
        "|test_completion::test_completion_stream_with_openai_library)",
        r"(AssertionError: )?assert False \+ where False = match_regex\('\((little\|girl|Suddenly|going\|bed)\)\+', ",
        _NOT_STORIES,
    ),
    ("test_completion::test_completion(_stream)?", r"assert \d+ == (18|46)$", _NOT_STORIES),
    (
        "test_completion::test_completion_stream_vs_non_stream",
        r"(AssertionError: )?assert (\"|').*(\"|') == (\"|')",
        "The test starts llama-server with a seed for all requests; here each draws anew unless it names one.",
    ),
    (
        "test_completion::test_completion_response_fields",
        "AssertionError: assert 'I believe th.*' == '<s> I believ",
        _NOT_STORIES,
    ),
    (
        "test_completion::test_completion_prompt_cache",
        r"AssertionError: assert \('prompt_n' in \{.*and \(\d+ \+ \d+\) == 2\d\d\)",
        _NOT_STORIES,
    ),
    ("test_chat_completion::test_chat_completion_cached_tokens", "assert 17 == 77$", _NOT_STORIES),
    ("test_chat_completion::test_chat_completions_multiple_choices", "AssertionError: .*'stop'", _NOT_STORIES),
    ("test_embedding::test_embedding_usage_(single|multiple)", r"assert \d+ == (9|6|\(2 \* 9\))$", _NOT_STORIES),
    ("test_tokenize::test_tokenize_with_bos", r"assert \d+ == 1$", _NOT_STORIES),
    (
        "test_chat_completion::test_(chat_completion_(stream|with_timings_per_token)|logprobs_stream)",
        "AssertionError: assert '' is None",
        "The first event of a stream has an empty text, as OpenAI's has; llama-server's has null.",
    ),
    (
        "test_tool_call::test_completion_without_tool_call_fast",
        "AssertionError: Expected non empty content delta!$",
        "The first event of a stream has an empty text, as OpenAI's has; llama-server's has null.",
    ),
    (
        "test_chat_completion::test_(chat_template(_assistant_prefill|_continue_final_message_vllm_compat)?|verbose_debug)",
        r"AssertionError: assert '__verbose' in \{",
        "`__verbose` is llama-server's own look inside; here `return_token_ids` and the spans show the prompt.",
    ),
    (
        "test_template::test_reasoning",
        "AssertionError: Expected prompt to end with '",
        "The test starts llama-server with another model's chat template.",
    ),
    (
        "test_template::test_(date_inside_prompt|add_generation_prompt)",
        r"AssertionError: Expected (today's date|generation prompt) \(.*\) in content",
        "The test starts llama-server with another model's chat template.",
    ),
    (
        "test_chat_completion::test_apply_chat_template",
        r"AssertionError: assert '<\|system\|>Yo.*' == '<\|START_OF_T",
        "The test starts llama-server with another model's chat template.",
    ),
    ("test_basic::test_server_multiple_addresses", r"assert False \+ where False = all\(\[None, None\]\)", _FLAGS),
    ("test_basic::test_server_models", "AssertionError: assert 'relayline-demo' == 'tinyllama-2'", _FLAGS),
    ("test_basic::test_server_model_aliases_and_tags", "KeyError: 'aliases'$", _FLAGS),
    ("test_basic::test_no_ui", "AssertionError: assert '<!doctype html>' in 'relayline serves", _FLAGS),
    ("(test_basic::test_server_slots|test_metrics::test_metrics_disabled)", _got(200, 501), _FLAGS),
    ("test_security::test_incorrect_api_key", _got(200, 401), _FLAGS),
    ("test_security::test_cors_(options|origins_localhost_rejects)", _got(403, 200), _FLAGS),
    (
        "test_security::test_cors_origins_(localhost_reflects|defaults_to_localhost_with_tools_enabled)",
        _got(204, 200),
        _FLAGS,
    ),
    ("test_security::test_local_media_file", _got(400, 200), _FLAGS),
    ("test_embedding::test_embedding_pooling_none", "KeyError: 0$", _FLAGS),
    ("test_embedding::test_embedding_pooling_none_oai", _got(200, 400), _FLAGS),
    (
        "test_basic::test_server_props",
        "KeyError: 'model_path'$",
        "The path of a file on the server is not told to its clients.",
    ),
    (
        "test_security::test_correct_api_key(_anthropic_header)?",
        r"AssertionError: assert 'content' in \{'id': 'cmpl-",
        "Routes without `/v1` are OpenAI's here; llama-server's own form is at `/completion`.",
    ),
    (
        "test_chat_completion::test_invalid_chat_completion_req",
        r"assert \(200 == 400 or 200 == 500\)",
        "Two turns of the assistant at the end are a conversation like any other; llama-server refuses them.",
    ),
    (
        "test_chat_completion::test_context_size_exceeded(_stream)?",
        "AssertionError: assert 'invalid_request_error' == 'exceed_context_size_error'",
        "A prompt over the context is told in OpenAI's words, with its code `context_length_exceeded`.",
    ),
    (
        "test_embedding::test_embedding_error_prompt_too_long",
        "assert 'too large' in \"This model's maximum context length is 256 tokens",
        "A prompt over the context is told in OpenAI's words, with its code `context_length_exceeded`.",
    ),
    (
        "test_chat_completion::test_return_progress",
        r"assert (\d+ == \d+|0 > 0)$",
        "Progress follows the steps of this pipeline, whose batches have other bounds than llama-server's.",
    ),
    (
        "test_compat_oai_responses::test_responses_stream_with_llama_telemetry",
        "assert False$",
        "Progress and timings of llama-server stand in no event of a response here.",
    ),
    (
        "test_metrics::test_metrics_timings_on_prompt_progress",
        "KeyError: 'timings'$",
        "Timings stand in events of an answer's tokens, not in those of its progress.",
    ),
    (
        "test_chat_completion::test_chat_completions_token_count",
        _got(404, 200),
        "`/v1/chat/completions/input_tokens` is llama-server's own; `/tokenize` with messages counts them here.",
    ),
    (
        "test_compat_anthropic::test_anthropic_(tool_result_with_image|vision_format_accepted)",
        _got(400, 500),
        "The demo model reads text only: 400 as in Anthropic's API; llama-server says 500.",
    ),
    (
        "test_compat_anthropic::test_anthropic_vision_base64_with_multimodal_model",
        r"requests\.exceptions\.[A-Za-z]+Error: .*huggingface\.co",
        "The test fetches a picture from a hub.",
    ),
    (
        "test_compat_anthropic::test_anthropic_empty_messages",
        _got(400, 200),
        "A conversation without a message is refused, as Anthropic's API refuses it.",
    ),
    (
        "test_compat_anthropic::test_anthropic_thinking_history_in_(count_tokens|template)",
        "AssertionError: Expected (more tokens with thinking|first reasoning text in prompt)",
        "The demo model's template has no place for thoughts.",
    ),
    (
        "test_completion::test_n_probs_post(_backend)?_sampling",
        _got(400, 200),
        "`post_sampling_probs` is refused: probabilities are told as they are before sampling.",
    ),
    (
        "test_completion::test_logit_bias",
        _got(400, 200),
        "OpenAI's form of `logit_bias` has token ids for keys; llama-server takes texts too. Lists of pairs pass.",
    ),
    (
        "test_embedding::test_embedding_multiple_with_fa",
        _got(400, 200),
        "The inputs are longer than the context that this suite's pipeline has.",
    ),
    (
        "test_embedding::test_embedding_(mixed_input|content_text_same_as_string)",
        _got(400, 200),
        "`input` is a text, tokens or a list of either, as OpenAI has it; llama-server mixes them, and takes parts.",
    ),
    (
        "test_infill::test_(infill_with(out)?_input_extra|invalid_input_extra_req)",
        r"assert 501 == (200|400) \+ where 501 = <utils\.ServerResponse",
        "The demo model's vocabulary has no tokens around a gap: 501.",
    ),
    (
        "test_metrics::test_metrics_(prometheus_format|predicted_total_matches_requests|embedding_prompt_is_counted)",
        "AssertionError: assert 'Process-Start-Time-Unix' in ",
        "Metrics have relayline's names; llama-server has other names, and headers beside them.",
    ),
    (
        "test_metrics::test_metrics_prompt_processed_and_cached",
        "assert 0 > 0$",
        "Metrics have relayline's names; llama-server has other names, and headers beside them.",
    ),
    (
        "test_security::test_access_static_assets_without_api_key",
        "AssertionError: Expected 200 for /sw.js, got 404",
        "A file of llama-server's own web page.",
    ),
    (
        "test_security::test_cors_proxy_only_forwards_explicit_proxy_headers",
        _got(404, 200),
        "llama-server's proxy for tools.",
    ),
)

EXPLAINED = tuple(
    Explanation(suite, f"{module}{tests}", message, reason)
    for suite, module, explanations in (
        ("openai-python", "", _OPENAI_PYTHON),
        ("anthropic-sdk", "", _ANTHROPIC),
        ("langchain", "", _LANGCHAIN),
        ("schemathesis", "", _SCHEMATHESIS),
        ("vllm-entrypoints", "vllm_entrypoints::", _VLLM),
        ("vendor-specs", "vendor_specs::", _SPECS),
        ("llama-server", "", _LLAMA_SERVER),
    )
    for tests, message, reason in explanations
)
