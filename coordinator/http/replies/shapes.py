"""Reply bodies as types, in the field order that OpenAI's API has. `UNSET` fields are left out of the JSON."""

from __future__ import annotations

import datetime
from typing import Literal

import msgspec
from msgspec import UNSET, Struct, UnsetType

from relayline.coordinator.http.replies.choice import FinishReason
from relayline.coordinator.sessions import generation
from relayline.coordinator.sessions.tenants import ServiceTier

encode = msgspec.json.Encoder().encode


def utc_text(moment: datetime.datetime) -> str:
    """Return a moment as RFC 3339 has it, in UTC. `moment`: with its zone."""
    return moment.astimezone(datetime.UTC).isoformat().replace("+00:00", "Z")


class PromptTokensDetails(Struct):
    """Where prompt tokens came from."""

    cached_tokens: int  # computed for others that began alike


class CompletionTokensDetails(Struct):
    """Completion tokens by kind."""

    reasoning_tokens: int  # reasoning, where it is shown separately
    accepted_prediction_tokens: int = 0  # tokens that the client's prediction had right
    rejected_prediction_tokens: int = 0  # of predictions, not of the completion: tokens that did not appear


class Usage(Struct):
    """Token counts. A prompt counts once however many choices continue it; tokens cut by a stop string count."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class CompletionLogprobs(Struct):
    """Legacy log probabilities: four lists with one entry per token."""

    tokens: list[str]
    token_logprobs: list[float | None]  # of an echoed prompt too, whose first token has none
    top_logprobs: list[dict[str, float] | None]  # with `logprobs: 0` the chosen tokens alone
    text_offset: list[int]  # characters before the token in the choice's text, the echoed prompt included


class PromptLogprob(Struct):
    """The model's log probability for one token at one place of a prompt."""

    logprob: float
    rank: int | None  # 1 for the likeliest; None for one that is not among those asked for
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]  # as vLLM has it: by token id; None at the first place


class Timings(Struct):
    """How long a request took so far, as llama-server has it."""

    cache_n: int  # prompt tokens that were copied
    prompt_n: int  # prompt tokens that were read
    prompt_ms: float  # until the first token: waiting for a lane included
    prompt_per_token_ms: float
    prompt_per_second: float
    predicted_n: int
    predicted_ms: float  # from the first token on
    predicted_per_token_ms: float
    predicted_per_second: float


class Embedding(Struct):
    """The vector of one input."""

    embedding: list[float] | str  # base64 of little-endian f32, where that was asked for
    index: int
    object: Literal["embedding"] = "embedding"


class EmbeddingsUsage(Struct):
    """Token counts of /v1/embeddings."""

    prompt_tokens: int
    total_tokens: int


class Embeddings(Struct):
    """Reply of /v1/embeddings."""

    data: list[Embedding]
    model: str
    usage: EmbeddingsUsage
    object: Literal["list"] = "list"


class RankedText(Struct):
    """A document of a request, repeated."""

    text: str


class RankedDocument(Struct):
    """The score of one document."""

    index: int  # in the request
    relevance_score: float
    document: RankedText | UnsetType = UNSET


class Reranked(Struct):
    """Reply of /v1/rerank, the best document first."""

    model: str
    usage: EmbeddingsUsage
    results: list[RankedDocument]
    object: Literal["list"] = "list"


class Score(Struct):
    """The score of one pair of texts."""

    index: int
    score: float
    object: Literal["score"] = "score"


class Scores(Struct):
    """Reply of /v1/score, as vLLM has it."""

    id: str
    created: int
    model: str
    data: list[Score]
    usage: EmbeddingsUsage
    object: Literal["list"] = "list"


class PromptProgress(Struct):
    """How far a prompt has been read, as llama-server has it."""

    total: int
    cache: int  # tokens that were copied
    processed: int  # tokens that have been read, copied ones included
    time_ms: int  # since the request was admitted

    @classmethod
    def of(cls, progress: generation.PromptProgress, time_ms: int) -> PromptProgress:
        """Write the pipeline's events."""
        return cls(progress.n_total, progress.n_cached, progress.n_read, time_ms)


class CompletionChoice(Struct):
    """One choice of a completion, or the part that one event adds to it."""

    text: str
    index: int
    logprobs: CompletionLogprobs | None = None
    finish_reason: FinishReason | None = None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET  # of a stream in a choice's first event
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class Completion(Struct):
    """Reply of /v1/completions, whole or one event of it."""

    id: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType = UNSET
    object: Literal["text_completion"] = "text_completion"
    timings: Timings | UnsetType = UNSET
    prompt_progress: PromptProgress | UnsetType = UNSET  # of an event with `return_progress`


class TopLogprob(Struct):
    """One alternative at one position."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    """The chosen token at one position, and its rivals."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct):
    """Log probabilities of a chat choice."""

    content: list[TokenLogprob]
    refusal: None = None


class CalledFunction(Struct):
    """The function of a tool call, or the part that one event adds to it."""

    arguments: str  # JSON text
    name: str | UnsetType = UNSET


class CalledCustom(Struct):
    """The custom tool of a call, or the part that one event adds to its input."""

    input: str
    name: str | UnsetType = UNSET


class ToolCall(Struct):
    """One call of a tool. Events say of which call they are; id and name come with its first."""

    function: CalledFunction | UnsetType = UNSET
    id: str | UnsetType = UNSET
    type: Literal["function", "custom"] | UnsetType = UNSET
    index: int | UnsetType = UNSET
    custom: CalledCustom | UnsetType = UNSET


class Delta(Struct, omit_defaults=True):
    """The part of a message that one event adds."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None


class ChunkChoice(Struct):
    """One choice inside a chat event."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatChunk(Struct):
    """One event of a streamed chat completion."""

    id: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChunkChoice]
    usage: Usage | UnsetType = UNSET
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    service_tier: ServiceTier | UnsetType = UNSET  # where the request named one
    timings: Timings | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET  # in the first event
    prompt_progress: PromptProgress | UnsetType = UNSET  # with `return_progress`


class AssistantMessage(Struct):
    """The message of a whole chat choice."""

    content: str | None  # None with calls and no text
    role: Literal["assistant"] = "assistant"
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET  # as DeepSeek's API has it
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(Struct):
    """One whole chat choice."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(Struct):
    """Reply of /v1/chat/completions."""

    id: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage
    object: Literal["chat.completion"] = "chat.completion"
    service_tier: ServiceTier | UnsetType = UNSET  # where the request named one
    timings: Timings | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class ModelMeta(Struct):
    """llama-server's facts about a model besides its name."""

    n_ctx: int  # tokens per stream
    n_vocab: int


class ModelArchitecture(Struct):
    """Further inputs of a model with a projector, in the form of OpenRouter and llama-server."""

    input_modalities: tuple[str, ...]  # text, and image and audio as far as they are taken
    output_modalities: tuple[str, ...] = ("text",)


class Model(Struct):
    """One entry of /v1/models."""

    id: str
    created: int
    owned_by: str = "relayline"
    object: Literal["model"] = "model"
    root: str = ""  # the name of the model behind an alias
    parent: str | UnsetType = UNSET  # of a LoRA adapter, as vLLM has it: the name of the model that it changes
    max_model_len: int | UnsetType = UNSET  # tokens per stream, as vLLM has it; left out until stages are connected
    meta: ModelMeta | UnsetType = UNSET  # as llama-server has it
    architecture: ModelArchitecture | UnsetType = UNSET  # left out where the model takes text alone
    default_parameters: dict[str, int | float] | UnsetType = UNSET  # that the model recommends, as OpenRouter has them
    # Anthropic's fields, of which its clients require all
    type: Literal["model"] = "model"
    display_name: str = ""
    created_at: str = ""  # RFC 3339
    lifecycle: Literal["active"] = "active"
    capabilities: None = None
    max_input_tokens: int | None = None  # the context, once stages are connected
    max_tokens: int | None = None  # of an answer


class ModelList(Struct):
    """Reply of /v1/models."""

    data: list[Model]
    object: Literal["list"] = "list"
    # Anthropic's fields: one page holds all
    first_id: str = ""
    last_id: str = ""
    has_more: bool = False
