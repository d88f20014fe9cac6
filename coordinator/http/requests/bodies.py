"""Request bodies as types: the fields that the API reads, with the type and range of each. Pure.

Fields that are not listed are ignored: clients send new ones every month (`user`, `store`, `metadata`, ...). Fields
that would change the answer and are not supported are listed, so that `validation` can refuse them.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, get_args, get_origin

import msgspec
from msgspec import Meta, Struct

from relayline.wire.common.bounds import (
    BIAS_MAX,
    CTX_TOKENS_MAX,
    LOGIT_BIAS_MAX,
    LOGPROBS_MAX,
    PENALTY_MAX,
    SAMPLER_TOKENS_MAX,
)
from relayline.wire.common.errors import InvalidRequestError
from relayline.wire.common.sampler_fields import HTTP_FIELDS
from relayline.wire.model_files.adapter_texts import ADAPTERS_MAX

MESSAGES_MAX = 16_384  # of one chat; each is some tokens of a prompt
PARTS_MAX = 16_384  # of one message
CALLS_MAX = 1_024  # tools called in one turn
SALT_CHARS_MAX = 1_024
CHOICES_MAX = 16_384  # that an answer may be one of: as many as its grammar has room for

Positive = Annotated[int, Meta(ge=1)]
TokenLimit = Annotated[int, Meta(ge=-1)]  # at least 1, or -1 for no limit, as llama-server has it
ThoughtBudget = Annotated[int, Meta(ge=-1)]  # -1: no bound
Share = Annotated[float, Meta(ge=0, le=1)]
Penalty = Annotated[float, Meta(ge=-PENALTY_MAX, le=PENALTY_MAX)]
Bias = Annotated[float, Meta(ge=-BIAS_MAX, le=BIAS_MAX)]
Salt = Annotated[str, Meta(min_length=1, max_length=SALT_CHARS_MAX)]
Choices = Annotated[list[str], Meta(max_length=CHOICES_MAX)]
Tokens = Annotated[list[int], Meta(max_length=CTX_TOKENS_MAX)]
LogprobCount = Annotated[int, Meta(ge=0, le=LOGPROBS_MAX)]


class StreamOptions(Struct):
    """`stream_options`."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None  # as vLLM has it: with include_usage, in each event


Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Json = msgspec.Raw  # a value left as the client wrote it
NO_JSON: Any = msgspec.field(default_factory=msgspec.Raw)  # rebuilt, since no schema can show a Raw


class JsonSchemaFormat(Struct, rename={"json_schema": "schema"}):
    """`response_format.json_schema`; name and description are for models that get to see them."""

    json_schema: Json = NO_JSON
    strict: bool | None = None  # else rules that cannot be followed are left out


class ResponseFormat(Struct, rename={"for_object": "schema"}):
    """`response_format`."""

    type: str
    json_schema: JsonSchemaFormat | None = None
    for_object: Json = NO_JSON  # of "json_object", as llama-server has it


class StructuredOutputs(Struct, rename={"json_schema": "json"}, forbid_unknown_fields=True):
    """`structured_outputs`, as vLLM has it."""

    json_schema: Json = NO_JSON
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_fallback: bool | None = None  # to another grammar engine, of which there is none
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None
    whitespace_pattern: str | None = None


TokenIds = Annotated[list[Annotated[int, Meta(ge=0)]], Meta(max_length=SAMPLER_TOKENS_MAX)]
# One field for each name in the table of sampler fields; `validation` checks the values.
if TYPE_CHECKING:

    class _Sampler(Struct):
        repeat_penalty: float | None
        repeat_last_n: float | None
        dry_penalty_last_n: float | None
else:
    _Sampler = msgspec.defstruct("_Sampler", [(name, float | None, None) for name in HTTP_FIELDS], kw_only=True)


class LoraScale(Struct, kw_only=True):
    """One entry of `lora`."""

    id: int
    scale: float = 0.0


class GenerationBody(_Sampler, kw_only=True):
    """The fields that both generating routes share. None means absent, as in OpenAI's own schema."""

    model: str | None = None
    max_tokens: TokenLimit | None = None
    n: Positive | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Share | None = None
    top_k: Annotated[int, Meta(ge=-1)] | None = None
    min_p: Share | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    cache_prompt: bool | None = None
    cache_salt: Salt | None = None  # as vLLM has it
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    logit_bias: (
        Annotated[dict[str, Bias], Meta(max_length=LOGIT_BIAS_MAX)]
        | Annotated[list[tuple[int | str, Bias | Literal[False]]], Meta(max_length=LOGIT_BIAS_MAX)]  # llama-server's
        | None
    ) = None
    min_tokens: Annotated[int, Meta(ge=0, le=CTX_TOKENS_MAX)] | None = None  # as vLLM has it, like the next
    stop_token_ids: Tokens | None = None
    allowed_token_ids: TokenIds | None = None
    bad_words: Annotated[list[str], Meta(max_length=SAMPLER_TOKENS_MAX)] | None = None
    include_stop_str_in_output: bool | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Json = NO_JSON  # as vLLM had it before
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None
    regex: str | None = None  # as SGLang has it, like the next
    ebnf: str | None = None
    json_schema: Json = NO_JSON  # as llama-server has it, like the next
    grammar: str | None = None
    prediction: Any = None  # read by validation: any error in it concerns the whole field
    # Of other servers; see validation.NEUTRAL.
    dry_sequence_breakers: list[str] | str | None = None  # a text: that list as JSON, with or without its brackets
    smoothing_factor: Any = None
    truncate_prompt_tokens: Any = None
    return_tokens_as_token_ids: Any = None
    logits_processors: Any = None
    use_beam_search: Any = None
    length_penalty: Any = None
    skip_special_tokens: Any = None
    add_special_tokens: bool | None = None
    chat_template: Any = None
    grammar_lazy: Any = None
    lora: Annotated[list[LoraScale], Meta(max_length=ADAPTERS_MAX)] | None = None  # as llama-server has it
    web_search_options: Any = None
    n_indent: Annotated[int, Meta(ge=0)] | None = None  # as llama-server has it, like the next
    t_max_predict_ms: Annotated[int, Meta(ge=-1)] | None = None
    prompt_logprobs: LogprobCount | None = None  # as vLLM has it
    timings_per_token: bool | None = None  # as llama-server has it, like the next
    return_progress: bool | None = None
    priority: int | None = None  # as vLLM has it: in the sender's own line, smaller ones go first
    service_tier: str | None = None  # OpenAI's, for the same
    n_predict: Annotated[int, Meta(ge=-2)] | None = None  # llama-server's max_tokens
    tools: list[Any] | None = None
    functions: list[Any] | None = None
    tool_choice: Any = None
    function_call: Any = None


class CompletionBody(GenerationBody, kw_only=True):
    """POST /v1/completions."""

    prompt: str | Annotated[list[int | str | list[int]], Meta(max_length=CTX_TOKENS_MAX)]
    logprobs: LogprobCount | None = None
    echo: bool | None = None
    best_of: Positive | None = None
    suffix: str | None = None


class MessageBody(Struct, kw_only=True, omit_defaults=True):
    """One chat message. Only `role` and `content` have a meaning here; the rest is for the model's template."""

    role: Annotated[str, Meta(min_length=1)]
    content: str | Annotated[list[Any], Meta(max_length=PARTS_MAX)] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: Any = None  # what vLLM and OpenRouter call it
    tool_calls: Annotated[list[Any], Meta(max_length=CALLS_MAX)] | None = None
    tool_call_id: str | None = None

    def __post_init__(self) -> None:
        """Give the thoughts the name by which templates know them."""
        if isinstance(self.reasoning, str) and self.reasoning_content is None:
            self.reasoning_content = self.reasoning
        self.reasoning = None


class ChatBody(GenerationBody, kw_only=True):
    """POST /v1/chat/completions."""

    messages: Annotated[list[MessageBody], Meta(min_length=1, max_length=MESSAGES_MAX)]
    max_completion_tokens: TokenLimit | None = None
    logprobs: bool | None = None
    top_logprobs: LogprobCount | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: Effort | None = None  # for templates that know one
    parallel_tool_calls: bool | None = None
    continue_final_message: bool | None = None  # as vLLM has it, like the next
    add_generation_prompt: bool | None = None
    reasoning_format: str | None = None  # as llama-server has it
    thinking_token_budget: ThoughtBudget | None = None  # as vLLM has it; the next three as llama-server
    thinking_budget_tokens: ThoughtBudget | None = None
    reasoning_budget_tokens: ThoughtBudget | None = None
    reasoning_budget_message: str | None = None
    modalities: list[str] | None = None
    audio: Any = None
    echo: Any = None


class TokenizeBody(Struct, kw_only=True):
    """POST /tokenize: `content` and its companions as in llama-server, the rest as in vLLM."""

    content: str | None = None
    add_special: bool = False
    parse_special: bool = True
    with_pieces: bool = False
    prompt: str | None = None
    messages: Annotated[list[MessageBody], Meta(min_length=1, max_length=MESSAGES_MAX)] | None = None
    add_special_tokens: bool = True  # around a prompt
    add_generation_prompt: bool | None = None  # behind messages: of these the next four, as in a chat
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[Any] | None = None
    return_token_strs: bool = False


class DetokenizeBody(Struct, kw_only=True):
    """POST /detokenize, as llama-server and vLLM have it."""

    tokens: Tokens


class TelemetryBody(Struct, forbid_unknown_fields=True):
    """Body of PUT /v1/telemetry; omitted fields stay unchanged."""

    level: str | None = None
    sample_ratio: float | None = None
    for_s: float | None = None  # how long the level holds; then the one before it comes back


class LayersBody(Struct, forbid_unknown_fields=True):
    """Body of PUT /v1/pipeline/layers: the first layer of each stage but the first."""

    cuts: tuple[int, ...]


class DrainBody(Struct, forbid_unknown_fields=True):
    """Body of PUT /v1/pipeline/stages/NAME: whether the stage is to hold no layers."""

    drained: bool


class InviteBody(Struct, forbid_unknown_fields=True):
    """Body of POST /v1/pipeline/invitations: who may join, from where, and whether as a spare."""

    name: str
    host: str = ""
    spare: bool = False


class NewStageBody(Struct, forbid_unknown_fields=True):
    """Body of POST /v1/pipeline/stages: the name of a stage that may join, and whether it is a spare."""

    name: str
    spare: bool = False


Body = TypeVar("Body", bound=Struct)

_AT = re.compile(r"^(?P<what>.*) - at (?P<key>`key` in )?`\$\.?(?P<path>.*)`$", re.DOTALL)
_MISSING = re.compile(r"missing required field `(?P<name>[^`]*)`")


def decode_body(raw: bytes | bytearray, kind: type[Body]) -> Body:
    """Return the body of a request as `kind`.

    Raises InvalidRequestError, naming the field in `param` when one is to blame.
    """
    if not raw:
        raise InvalidRequestError("the body is empty; send a JSON object")
    try:
        return msgspec.json.decode(raw, type=kind)
    except msgspec.ValidationError as error:
        if "got `float`" in str(error) and (whole := _with_whole_numbers(raw)) is not None:
            return decode_body(whole, kind)
        raise _field_error(str(error), kind) from None
    except msgspec.DecodeError as error:
        raise InvalidRequestError(f"the body is not valid JSON: {error}") from None
    except UnicodeDecodeError as error:
        raise InvalidRequestError(f"the body is not UTF-8: {error.reason} at byte {error.start}") from None
    except RecursionError:
        raise InvalidRequestError("the body is not acceptable JSON: nested too deeply") from None


_WHOLE = re.compile(rb"(-?\d{1,18})\.0{1,18}")


def _with_whole_numbers(raw: bytes | bytearray) -> bytes | None:
    """Return a body with its own fields' 2.0 written as 2, as languages without whole numbers mean it.

    None where there is no such field, or the body is no object.
    """
    try:
        fields = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
    except msgspec.DecodeError:
        return None
    wholes = {name: found[1] for name, value in fields.items() if (found := _WHOLE.fullmatch(bytes(value)))}
    return msgspec.json.encode({**fields, **{k: msgspec.Raw(v) for k, v in wholes.items()}}) if wholes else None


def _field_error(text: str, kind: type[Struct]) -> InvalidRequestError:
    at = _AT.match(text)
    what, path = (at["what"], at["path"]) if at else (text, "")
    missing = _MISSING.search(what)
    if missing:
        path = f"{path}.{missing['name']}" if path else missing["name"]
        return InvalidRequestError.of_field(path, "required field is missing")
    what = what.replace("`", "") + (" in each key" if at and at["key"] else "")
    what = what[:1].lower() + what[1:]
    if what.startswith("invalid enum value") and (words := _words_at(kind, path)):
        what = f"{what.removeprefix('invalid enum value ')} is none of {', '.join(words)}"
    if not path:
        return InvalidRequestError(f"the body: {what}")
    return InvalidRequestError.of_field(path, what)


def _words_at(kind: Any, path: str) -> list[str]:
    """Return the words that the field at a path of a body may hold; none where it is not a field of fixed words."""
    for name in path.split("."):
        parts = [part for part in (kind, *get_args(kind)) if isinstance(part, type) and issubclass(part, Struct)]
        fields = {field.encode_name: field.type for part in parts for field in msgspec.structs.fields(part)}
        kind = fields.get(name)
    literals = [part for part in (kind, *get_args(kind)) if get_origin(part) is Literal]
    return [str(word) for literal in literals for word in get_args(literal)]
