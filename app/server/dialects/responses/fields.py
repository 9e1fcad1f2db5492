"""The documented fields of requests to the Responses API: see `app.server.request_fields`."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from app.server.dialects.openai.fields import GENERATION
from app.server.dialects.responses.compaction import CompactRequest
from app.server.dialects.responses.requests import ResponseRequest
from app.server.request_fields import Field, FieldTable, alias, ignored, refused, supported

_O: Final = "OpenAI"
_SCHEMA: Final = {"type": "object", "properties": {"city": {"type": "string"}}}
_TOOL: Final = {"type": "function", "name": "f", "parameters": _SCHEMA}
_ONE_REPLY: Final = "A response has one reply. Leave it out."
_CACHED: Final = "Every prompt is cached."

_CONVERSATION: Sequence[Field] = (
    supported("model", _O, "a-model", "Default: the served model."),
    supported(
        "input",
        _O,
        "Hello",
        "A string, or a list of items. Words replace images and files. Audio and item references are refused.",
    ),
    supported("instructions", _O, "Be brief."),
    supported("previous_response_id", _O, "resp_1"),
)
_OWN: Sequence[Field] = (
    *_CONVERSATION,
    supported("max_output_tokens", _O, 100),
    alias("max_completion_tokens", "vLLM", 100, of="max_output_tokens"),
    supported("max_tool_calls", _O, 3, "It limits server-side tools, which this server does not have."),
    supported("tools", _O, [_TOOL], "Functions, custom tools, and namespaces are supported. Other tools are ignored."),
    supported("tool_choice", _O, "none"),
    supported("parallel_tool_calls", _O, False),
    supported("text", _O, {"format": {"type": "json_object"}}),
    supported("text.format", _O, {"type": "json_schema", "name": "a", "schema": _SCHEMA}),
    supported("text.verbosity", _O, "low", "Returned unchanged; the model does not see it."),
    supported("reasoning", _O, {"effort": "low"}),
    supported("reasoning.effort", _O, "low"),
    supported("reasoning.summary", _O, "auto", "The summary contains the whole reasoning."),
    supported("include", _O, ["message.output_text.logprobs"]),
    supported("top_logprobs", _O, 2),
    supported("metadata", _O, {"a": "b"}),
    supported("truncation", _O, "auto", "A prompt that is too long is refused with either value."),
    supported("background", _O, True),
    supported("prompt_cache_key", _O, "k", f"Returned unchanged. {_CACHED}"),
    supported("safety_identifier", _O, "me", "Returned unchanged."),
    ignored(
        "context_management",
        _O,
        [{"type": "compaction"}],
        "Prompts are not compacted; prompts that are too long are refused.",
    ),
    ignored("background_options", _O, {"completion_window": "soonest"}, "Every response starts as soon as possible."),
    ignored("access_programs", _O, {"cyber": "a"}, "This server has no access programs."),
    ignored("image", _O, {"context_compression": "enabled"}, "It applies to images, which no model here can see."),
    ignored("personality", _O, "friendly", "The model has its own personality."),
    refused("moderation", _O, {"model": "m"}, "Replies are not moderated. Leave it out."),
    refused("conversation", _O, "conv_1", "Conversations are not stored. Send previous_response_id."),
    refused("prompt", _O, {"id": "p"}, "Prompts are not stored. Send instructions and input."),
    refused("messages", _O, [{"role": "user", "content": "Hi"}], "It is a field of chat completions. Send input."),
    refused("response_format", _O, {"type": "json_object"}, "It is a field of chat completions. Send text.format."),
    refused("reasoning_effort", _O, "low", "It is a field of chat completions. Send reasoning.effort."),
    refused("n", "vLLM", 2, _ONE_REPLY, neutral=[1]),
    refused("best_of", "vLLM", 2, _ONE_REPLY, neutral=[1]),
    refused("use_beam_search", "vLLM", True, _ONE_REPLY, neutral=[False]),
)
_PATHS: Final = {field.path for field in _OWN}

RESPONSE: Final = FieldTable(
    ResponseRequest,
    {"input": "Hi"},
    # Fields of GENERATION are left out if this table has them, or the field that they are an alias of.
    (*_OWN, *(field for field in GENERATION if not {field.path, field.target} & _PATHS)),
)
COMPACT: Final = FieldTable(
    CompactRequest,
    {"input": "Hi"},
    (
        *_CONVERSATION,
        ignored("prompt_cache_key", _O, "k", _CACHED),
        ignored("prompt_cache_options", _O, {"ttl": "24h"}, _CACHED),
        ignored("prompt_cache_retention", _O, "24h", _CACHED),
        ignored("service_tier", _O, "flex", "This server has only one tier."),
        ignored("image", _O, {"context_compression": "enabled"}, "It applies to images, which no model here can see."),
    ),
)
TABLES: Mapping[str, FieldTable[Any]] = {
    "POST /v1/responses": RESPONSE,
    "POST /v1/responses/input_tokens": RESPONSE,
    "POST /v1/responses/compact": COMPACT,
}
