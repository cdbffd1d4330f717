"""OpenAI's requests as this server takes them: types without coercion, and what is known but not served, by name."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, FiniteFloat

__all__ = [
    "Asked",
    "ChatRequest",
    "CompletionRequest",
    "DetokenizeRequest",
    "Generation",
    "Many",
    "Message",
    "Strict",
    "TemplateSwitches",
    "TokenizeRequest",
    "Tool",
]

T = TypeVar("T")
# Wrong at the first wrong item: a body has room for a million, and an error for each would keep the loop for seconds.
Many = Annotated[list[T], Field(fail_fast=True)]
MAX_COUNT = 1 << 31
MAX_PROMPTS = 1 << 14  # how many are served is a setting; these two bound the time that it takes to say so
MAX_BIASES = 1 << 14
Count = Annotated[int, Field(ge=1, le=MAX_COUNT)]
TokenId = Annotated[int, Field(ge=0, le=MAX_COUNT)]


def _bounded(given: Any) -> Any:
    """Refuse a table of too many entries before each is looked at."""
    if isinstance(given, dict) and len(given) > MAX_BIASES:
        raise ValueError(f"{len(given)} entries are too many; send fewer")
    return given


class Strict(BaseModel):
    """A JSON object whose values have the types they should: "5" is no number, and true is not 1."""

    model_config = ConfigDict(strict=True, extra="allow", hide_input_in_errors=True)


class StreamOptions(Strict):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class JsonSchema(Strict):
    name: str = Field(max_length=64)
    description: str | None = None
    schema_: dict[str, Any] | bool | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Strict):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class Speculation(Strict):
    method: str | None = Field(default=None, max_length=64)
    num_speculative_tokens: Annotated[int, Field(ge=0, le=64)] | None = None


class ContentPart(Strict):
    type: str
    text: str | None = None
    refusal: str | None = None


class Prediction(Strict):
    type: Literal["content"] = "content"
    content: str | Many[ContentPart]


class FunctionCall(Strict):
    name: str
    arguments: str


class ToolCall(Strict):
    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(Strict):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | Many[ContentPart] | None = None
    name: str | None = None
    tool_calls: Many[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    # An answer's own fields, which come back when a client appends it to the conversation.
    refusal: str | None = None
    annotations: list[Any] | None = None


class TemplateSwitches(Strict):
    """What a request may say to the chat template: whether to think, by the names that templates have for it."""

    enable_thinking: bool | None = None
    thinking: bool | None = None

    def given(self) -> dict[str, bool]:
        """Give those that were said."""
        both = {"enable_thinking": self.enable_thinking, "thinking": self.thinking}
        return {name: value for name, value in both.items() if value is not None}


class Function(Strict):
    name: Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[a-zA-Z0-9_.-]+$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Strict):
    """A function that the model may call."""

    type: Literal["function"]
    function: Function


class NamedFunction(Strict):
    name: str


class NamedTool(Strict):
    type: Literal["function"]
    function: NamedFunction


class Asked(Strict):
    """What all ways to ask for text have in common."""

    model: str | None = Field(default=None, max_length=512)
    stream: bool | None = None
    temperature: FiniteFloat | None = None
    top_p: FiniteFloat | None = None
    seed: int | None = None
    speculation: Literal["off", "auto"] | Speculation | None = None
    # Said by many clients, and without effect here.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    store: bool | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None


class Generation(Asked):
    """What chats and completions have in common besides."""

    stream_options: StreamOptions | None = None
    top_k: int | None = None
    min_p: FiniteFloat | None = None
    n: Count | None = None
    stop: str | Many[str] | None = None
    stop_token_ids: Many[TokenId] | None = None
    min_tokens: Annotated[int, Field(ge=0, le=MAX_COUNT)] | None = None
    ignore_eos: bool | None = None
    presence_penalty: FiniteFloat | None = None
    frequency_penalty: FiniteFloat | None = None
    repetition_penalty: FiniteFloat | None = None
    logit_bias: Annotated[dict[str, FiniteFloat], BeforeValidator(_bounded)] | None = None
    bad_words: Many[str] | None = None
    prediction: Prediction | None = None
    response_format: ResponseFormat | None = None
    priority: Annotated[int, Field(ge=-MAX_COUNT, le=MAX_COUNT)] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None


class ChatRequest(Generation):
    """``POST /v1/chat/completions``."""

    messages: Annotated[Many[Message], Field(min_length=1, max_length=4096)]
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_COUNT)] | None = None
    tools: Annotated[Many[Tool], Field(max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: TemplateSwitches | None = None


class CompletionRequest(Generation):
    """``POST /v1/completions``."""

    prompt: str | Many[str] | Many[TokenId] | Annotated[Many[Many[TokenId]], Field(max_length=MAX_PROMPTS)]
    max_tokens: Annotated[int, Field(ge=0, le=MAX_COUNT)] | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_COUNT)] | None = None
    echo: bool | None = None
    best_of: Count | None = None


class TokenizeRequest(Strict):
    """``POST /tokenize``: a prompt, or a conversation by the chat template."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[Many[Message], Field(min_length=1, max_length=4096)] | None = None
    tools: Annotated[Many[Tool], Field(max_length=128)] | None = None
    add_special_tokens: bool = True
    chat_template_kwargs: TemplateSwitches | None = None


class DetokenizeRequest(Strict):
    """``POST /detokenize``."""

    model: str | None = None
    tokens: Annotated[Many[TokenId], Field(max_length=1 << 20)]
