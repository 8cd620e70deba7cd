"""What the Gateway answers, as structs: the schemas of its responses in `GET /openapi.json`, and nothing else.

Answers are written by openai_answers.py, responses_answers.py, anthropic_answers.py and their like; these shapes are
held to them by every answer that tests/gateway/test_schemathesis.py and test_openapi_answers.py see: no member that is
not here, none of a wrong type. Where an answer is a struct of wire/ itself, that one is used.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from shardline.wire.embedding import Pooling
from shardline.wire.messages import Phase
from shardline.wire.telemetry import TelemetryEvent

Number = float | None
"""Finite, or null where there was nothing to measure."""


class Shape(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """No member but those that are named."""


class Error(msgspec.Struct, kw_only=True):
    """OpenAI's four fields, then ours; beside them what is known of the occurrence (`node`, `layers`, `phase`,
    `route_sessions`, `tokens_delivered` …)."""

    message: str
    type: str
    param: str | None
    code: Annotated[str, Meta(description="Stable; docs/reference/errors.md has every one.")]
    retryable: Annotated[bool, Meta(description="The same request can succeed later.")]
    advice: Annotated[str, Meta(description="What to do.")]


class ErrorAnswer(Shape, kw_only=True):
    error: Error


class AnthropicErrorAnswer(Shape, kw_only=True):
    type: Literal["error"]
    error: Error
    request_id: str | UnsetType = UNSET


# ---- chat completions and completions --------------------------------------------------------------------------------


class CachedTokens(Shape, kw_only=True):
    cached_tokens: Annotated[
        int | None,
        Meta(
            description="Tokens of the prompt that were not computed again; null where the upstream of a composite "
            "model does not tell it."
        ),
    ]


class ReasoningTokens(Shape, kw_only=True):
    reasoning_tokens: int


class Usage(Shape, kw_only=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens
    completion_tokens_details: ReasoningTokens | UnsetType = UNSET


UsageIfKnown = Annotated[
    Usage | None, Meta(description="Null where the upstream of a composite model does not tell it.")
]


class Timings(Shape, kw_only=True):
    """llama-server's, with `timings_per_token`; null what the upstream of a composite model does not tell."""

    cache_n: int | None
    prompt_n: int | None
    prompt_ms: Number
    prompt_per_token_ms: Number
    prompt_per_second: Number
    predicted_n: int | None
    predicted_ms: Number
    predicted_per_token_ms: Number
    predicted_per_second: Number


class PromptProgress(Shape, kw_only=True):
    """llama-server's, with `return_progress`. `processed` holds the cached tokens too."""

    total: int
    cache: int
    processed: int
    time_ms: float


class LikelyToken(Shape, kw_only=True):
    token: str
    logprob: Number
    bytes: list[int]


class TokenLogprob(LikelyToken, kw_only=True):
    top_logprobs: list[LikelyToken]


class ChatLogprobs(Shape, kw_only=True):
    content: list[TokenLogprob]
    refusal: None


class TextLogprobs(Shape, kw_only=True):
    tokens: list[str]
    token_logprobs: list[Number]
    top_logprobs: list[dict[str, Number]]
    text_offset: list[int]


class CalledFunction(Shape, kw_only=True):
    name: str
    arguments: Annotated[str, Meta(description="JSON.")]


class ToolCall(Shape, kw_only=True):
    id: str
    type: Literal["function"]
    function: CalledFunction


class CalledFunctionDelta(Shape, kw_only=True):
    name: str | UnsetType = UNSET
    arguments: str


class ToolCallDelta(Shape, kw_only=True):
    """Whole in one delta; of a composite model piece by piece, as its upstream tells it."""

    index: int
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET
    function: CalledFunctionDelta


class AnswerMessage(Shape, kw_only=True):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: Annotated[str, Meta(description="The thinking in front of the answer.")] | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


FinishReason = Annotated[
    Literal["stop", "length", "tool_calls", "content_filter"],
    Meta(description="content_filter: of a composite model alone, whose upstream has cut the answer."),
]
Account = Annotated[TelemetryEvent, Meta(description="Of the Route Session: route, times of each hop, bytes, tokens.")]


class ChatChoice(Shape, kw_only=True):
    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    telemetry: Account | UnsetType = UNSET


class ChatCompletion(Shape, kw_only=True):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: Annotated[str, Meta(description="Changes with the engine class and the files of the model.")]
    choices: list[ChatChoice]
    usage: UsageIfKnown
    telemetry: Account
    timings: Timings | UnsetType = UNSET


class Delta(Shape, kw_only=True):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChatChunkChoice(Shape, kw_only=True):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None


class ChatChunk(Shape, kw_only=True):
    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChunkChoice]
    usage: UsageIfKnown | UnsetType = UNSET
    telemetry: Account | UnsetType = UNSET
    timings: Timings | UnsetType = UNSET
    prompt_progress: PromptProgress | UnsetType = UNSET


class TextChoice(Shape, kw_only=True):
    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: FinishReason
    telemetry: Account | UnsetType = UNSET


class TextCompletion(Shape, kw_only=True):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[TextChoice]
    usage: UsageIfKnown
    telemetry: Account
    timings: Timings | UnsetType = UNSET


class TextChunkChoice(Shape, kw_only=True):
    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: FinishReason | None


class TextChunk(Shape, kw_only=True):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[TextChunkChoice]
    usage: UsageIfKnown | UnsetType = UNSET
    telemetry: Account | UnsetType = UNSET
    timings: Timings | UnsetType = UNSET
    prompt_progress: PromptProgress | UnsetType = UNSET


# ---- responses -------------------------------------------------------------------------------------------------------


class OutputPart(Shape, kw_only=True):
    type: Literal["output_text", "reasoning_text"]
    text: str
    annotations: list[Any] | UnsetType = UNSET
    logprobs: list[Any] | UnsetType = UNSET


class OutputItem(Shape, kw_only=True):
    """A message, the reasoning in front of it, or a call."""

    id: str
    type: Literal["message", "reasoning", "function_call"]
    status: Literal["in_progress", "completed", "incomplete"]
    role: Literal["assistant"] | UnsetType = UNSET
    content: list[OutputPart] | UnsetType = UNSET
    summary: list[Any] | UnsetType = UNSET
    call_id: str | UnsetType = UNSET
    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET


class ResponseUsage(Shape, kw_only=True):
    input_tokens: int
    input_tokens_details: CachedTokens
    output_tokens: int
    output_tokens_details: ReasoningTokens
    total_tokens: int


class Incomplete(Shape, kw_only=True):
    reason: Literal["max_output_tokens", "content_filter"]


class Response(Shape, kw_only=True):
    """With the fields of the request that it repeats."""

    id: str
    object: Literal["response"]
    created_at: int
    model: str
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    error: Error | None
    incomplete_details: Incomplete | None
    usage: ResponseUsage | None
    telemetry: Account | UnsetType = UNSET
    output: list[OutputItem]
    instructions: str | None
    max_output_tokens: int | None
    temperature: float
    top_p: float
    metadata: dict[str, str]
    text: dict[str, Any]
    reasoning: dict[str, Any]
    user: str | None
    store: Literal[False]
    background: Literal[False]
    previous_response_id: None
    truncation: Literal["disabled"]
    tools: list[dict[str, Any]]
    tool_choice: str | dict[str, Any]
    parallel_tool_calls: bool
    service_tier: Literal["default"]


class ResponseEvent(Shape, kw_only=True):
    """The `type` is the name of the event; docs/api.md has their order."""

    type: str
    sequence_number: int
    response: Response | UnsetType = UNSET
    item: OutputItem | UnsetType = UNSET
    part: OutputPart | UnsetType = UNSET
    item_id: str | UnsetType = UNSET
    output_index: int | UnsetType = UNSET
    content_index: int | UnsetType = UNSET
    delta: str | UnsetType = UNSET
    text: str | UnsetType = UNSET
    logprobs: list[Any] | UnsetType = UNSET
    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET


# ---- messages --------------------------------------------------------------------------------------------------------


class ContentBlock(Shape, kw_only=True):
    type: Literal["text", "thinking", "tool_use"]
    text: str | UnsetType = UNSET
    thinking: str | UnsetType = UNSET
    signature: Annotated[str, Meta(description="Empty: nothing is signed here.")] | UnsetType = UNSET
    id: str | UnsetType = UNSET
    name: str | UnsetType = UNSET
    input: dict[str, Any] | UnsetType = UNSET


StopReason = Literal["end_turn", "stop_sequence", "max_tokens", "tool_use", "refusal"]


class MessageUsage(Shape, kw_only=True):
    """Null where the upstream of a composite model does not tell it."""

    input_tokens: int | None
    cache_creation_input_tokens: int | None
    cache_read_input_tokens: int | None
    output_tokens: int | None


class Message(Shape, kw_only=True):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[ContentBlock]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage
    telemetry: Account | UnsetType = UNSET


class BlockDelta(Shape, kw_only=True):
    """Of a block by its `type`; of the message, why it stopped."""

    type: Literal["text_delta", "thinking_delta", "input_json_delta"] | UnsetType = UNSET
    text: str | UnsetType = UNSET
    thinking: str | UnsetType = UNSET
    partial_json: str | UnsetType = UNSET
    stop_reason: StopReason | UnsetType = UNSET
    stop_sequence: str | UnsetType | None = UNSET


class MessageEvent(Shape, kw_only=True):
    """The `type` is the name of the event."""

    type: str
    message: Message | UnsetType = UNSET
    index: int | UnsetType = UNSET
    content_block: ContentBlock | UnsetType = UNSET
    delta: BlockDelta | UnsetType = UNSET
    usage: MessageUsage | UnsetType = UNSET
    error: Error | UnsetType = UNSET


# ---- embeddings ------------------------------------------------------------------------------------------------------


class EmbeddingsUsage(Shape, kw_only=True):
    prompt_tokens: int
    total_tokens: int


class Embedding(Shape, kw_only=True):
    object: Literal["embedding"]
    index: int
    embedding: Annotated[str | list[float], Meta(description="As `encoding_format` says.")]


class Embeddings(Shape, kw_only=True):
    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: EmbeddingsUsage
    pooling: Annotated[Pooling | None, Meta(description="How the vectors were made.")]


# ---- the rest --------------------------------------------------------------------------------------------------------


class Token(Shape, kw_only=True):
    id: int
    piece: Annotated[str | list[int], Meta(description="Its text; its bytes, where they are part of a character.")]


class Tokens(Shape, kw_only=True):
    tokens: list[int | Token]


class Content(Shape, kw_only=True):
    content: str


class Health(Shape, kw_only=True):
    status: Literal["ok"]


class Live(Shape, kw_only=True):
    status: Literal["live"]


class Ready(Shape, kw_only=True):
    status: Literal["ready"]
    models: list[str]


class ModelEntry(Shape, kw_only=True):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    ready: Annotated[bool, Meta(description="Has a whole route now.")]
    missing: Annotated[list[tuple[int, int]], Meta(description="Layer ranges [first, last) that no Node has.")]
    content_id: Annotated[str, Meta(description="Digest of the model's files.")]
    engine_class: str
    composite: Annotated[bool, Meta(description="Served whole by another server behind one Node.")]
    n_layers: int | None
    context_length: int
    vocab_size: int | None
    kv_capacity_tokens: Annotated[int, Meta(description="Of the smallest Node of the best route.")]
    default_max_tokens: int


class Models(Shape, kw_only=True):
    object: Literal["list"]
    data: list[ModelEntry]


class SessionRecord(TelemetryEvent, frozen=True, kw_only=True):
    """The account of a Route Session, and when it was."""

    created: Annotated[float, Meta(description="Unix seconds.")]
    ended: Annotated[float | None, Meta(description="Unix seconds; null while it runs.")]
    phases: Annotated[list[tuple[Phase, float]], Meta(description="Each phase, and the ms until it began.")]


class Sessions(Shape, kw_only=True):
    sessions: Annotated[list[SessionRecord], Meta(description="Newest first.")]


class Modalities(Shape, kw_only=True):
    vision: bool
    audio: bool


class Props(Shape, kw_only=True):
    """llama-server's, as far as it has a meaning here."""

    default_generation_settings: dict[str, Any]
    model_alias: str
    model_path: str
    chat_template: str
    bos_token: str
    eos_token: str
    modalities: Modalities
    build_info: str
