"""The request bodies. Unknown fields are refused; so are known fields of OpenAI's that cannot be honoured here.

Types are strict: a number in quotes or a true in place of a 1 is an error, as it is at OpenAI.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

TokenId = Annotated[int, Field(ge=0, lt=1 << 31)]


class Strict(BaseModel):
    """A body or a part of one. `UNSUPPORTED` maps fields that exist elsewhere to the values that change nothing."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, ser_json_inf_nan="null")
    UNSUPPORTED: ClassVar[dict[str, tuple[Any, ...]]] = {}

    @model_validator(mode="before")
    @classmethod
    def _refuse(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        for name in cls.UNSUPPORTED.keys() & values.keys():
            if values[name] is not None and values[name] not in cls.UNSUPPORTED[name]:
                message = "{field} is not supported by this server; leave it out"
                raise PydanticCustomError("unsupported", message, {"field": name})  # type: ignore[arg-type]
        return {name: value for name, value in values.items() if name not in cls.UNSUPPORTED}


class StreamOptions(Strict):
    """What a stream tells beside the text."""

    UNSUPPORTED = {"include_obfuscation": (False,)}
    include_usage: bool = False
    continuous_usage_stats: bool = False


class JsonSchema(Strict):
    """A named JSON schema; it is always enforced exactly."""

    name: str = "answer"
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Strict):
    """Plain text, any JSON object, or JSON of a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(Strict):
    """Constrained text beyond OpenAI's response_format; give exactly one."""

    json_: dict[str, Any] | str | None = Field(None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None


class SampledRequest(Strict):
    """The fields that both ways of asking share; the first block is OpenAI's, the second what vLLM's users know."""

    model: str | None = None
    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0)
    top_p: float | None = Field(None, gt=0, le=1)
    n: int | None = Field(None, ge=1)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: str | list[str] | None = None
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: dict[str, float] | None = None
    seed: int | None = Field(None, ge=-(1 << 63), lt=1 << 63)
    response_format: ResponseFormat | None = None
    user: str | None = Field(None, max_length=256, description="written to the log, used for nothing else")

    top_k: int | None = Field(None, ge=-1)
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, gt=0)
    min_tokens: int | None = Field(None, ge=0)
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    allowed_token_ids: list[TokenId] | None = None
    banned_token_ids: list[TokenId] | None = None
    prompt_logprobs: int | None = Field(None, ge=0, le=20)
    structured_outputs: StructuredOutputs | None = None
    return_token_ids: bool | None = Field(None, description="add the token ids of every choice")

    speculative: bool | None = Field(None, description="false: nothing is drafted for this request")
    context_budget: int | None = Field(None, ge=1, description="entries that attention reads per KV head")
    return_spans: bool | None = Field(None, description="add to a stream which text was drafted, and by whom")


class CompletionRequest(SampledRequest):
    """POST /v1/completions"""

    UNSUPPORTED = {"suffix": ("",), "best_of": (1,)}
    prompt: str | list[str] | list[TokenId] | list[list[TokenId]]
    echo: bool | None = None
    add_special_tokens: bool | None = Field(None, description="false: the model's BOS token is not put in front")
    logprobs: int | None = Field(None, ge=0, le=20)


class Function(Strict):
    """A function that the model may call."""

    name: str = Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Strict):
    """One tool; only functions exist."""

    type: Literal["function"]
    function: Function


class NamedFunction(Strict):
    """The name of a function."""

    name: str


class NamedTool(Strict):
    """The choice of one tool by name."""

    type: Literal["function"]
    function: NamedFunction


class CalledFunction(Strict):
    """A call that the model made earlier; `arguments` is a JSON object as text."""

    name: str
    arguments: str = "{}"


class CalledTool(Strict):
    """An earlier tool call of an assistant message."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None


class Part(Strict):
    """A part of a message; only text exists here."""

    type: Literal["text"]
    text: str

    @model_validator(mode="before")
    @classmethod
    def _only_text(cls, values: Any) -> Any:
        kind = values.get("type") if isinstance(values, dict) else None
        if isinstance(kind, str) and kind != "text":
            message = "a content part of type {kind} is not supported: this server reads text only"
            raise PydanticCustomError("unsupported", message, {"kind": repr(kind)[:40]})  # type: ignore[arg-type]
        return values


class Message(Strict):
    """One message of a conversation."""

    UNSUPPORTED = {"refusal": ("",), "annotations": ([],), "audio": (), "function_call": ()}
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[Part] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[CalledTool] | None = None
    tool_call_id: str | None = None


class ChatRequest(SampledRequest):
    """POST /v1/chat/completions"""

    UNSUPPORTED = {
        "audio": (),
        "function_call": ("none",),
        "functions": ([],),
        "metadata": ({},),
        "modalities": (["text"],),
        "prediction": (),
        "prompt_cache_key": (),
        "reasoning_effort": (),
        "safety_identifier": (),
        "service_tier": ("auto", "default"),
        "store": (False,),
        "verbosity": (),
        "web_search_options": (),
    }
    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, bool | int | float | str | None] | None = None


class TokenizeRequest(Strict):
    """POST /tokenize: a text, or messages through the chat template."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = Field(None, min_length=1)
    tools: list[Tool] | None = None
    add_generation_prompt: bool = True
    add_special_tokens: bool = True
    return_token_strs: bool = False


class DetokenizeRequest(Strict):
    """POST /detokenize"""

    model: str | None = None
    tokens: list[TokenId]
