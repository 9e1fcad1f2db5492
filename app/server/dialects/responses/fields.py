"""The documented fields of the requests of the Responses API: see `app.server.request_fields`."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from app.server.dialects.openai.fields import GENERATION
from app.server.dialects.responses.compaction import CompactRequest
from app.server.dialects.responses.requests import ResponseRequest
from app.server.request_fields import Field, FieldTable, alias, ignored, refused, supported

_O: Final = "OpenAI"
_SCHEMA: Final = {"type": "object", "properties": {"city": {"type": "string"}}}
_TOOL: Final = {"type": "function", "name": "f", "parameters": _SCHEMA}
_ONE_REPLY: Final = "A response is one reply. Leave it out."
_CACHED: Final = "Every prompt is cached."

_CONVERSATION: Sequence[Field] = (
    supported("model", _O, "a-model", "Without it, the served model answers."),
    supported("input", _O, "Hello", "A text, or items. Images, audio, files, and item references are refused."),
    supported("instructions", _O, "Be brief."),
    supported("previous_response_id", _O, "resp_1"),
)
_OWN: Sequence[Field] = (
    *_CONVERSATION,
    supported("max_output_tokens", _O, 100),
    alias("max_completion_tokens", "vLLM", 100, of="max_output_tokens"),
    supported("max_tool_calls", _O, 3, "It limits tools that a server runs itself. There are none here."),
    supported("tools", _O, [_TOOL], "Functions, custom tools, and namespaces. Others are passed over."),
    supported("tool_choice", _O, "none"),
    supported("parallel_tool_calls", _O, False),
    supported("text", _O, {"format": {"type": "json_object"}}),
    supported("text.format", _O, {"type": "json_schema", "name": "a", "schema": _SCHEMA}),
    supported("text.verbosity", _O, "low", "It is reported back, and the model is not told of it."),
    supported("reasoning", _O, {"effort": "low"}),
    supported("reasoning.effort", _O, "low"),
    supported("reasoning.summary", _O, "auto", "The thoughts are reported as their summary."),
    supported("include", _O, ["message.output_text.logprobs"]),
    supported("top_logprobs", _O, 2),
    supported("metadata", _O, {"a": "b"}),
    supported("truncation", _O, "auto", "Nothing is dropped: a prompt that is too long is refused."),
    supported("background", _O, True),
    supported("prompt_cache_key", _O, "k", f"It is reported back. {_CACHED}"),
    supported("safety_identifier", _O, "me", "It is reported back."),
    ignored("context_management", _O, [{"type": "compaction"}], "A prompt is kept whole or refused, never compacted."),
    ignored("background_options", _O, {"completion_window": "soonest"}, "A response begins as soon as it can."),
    ignored("access_programs", _O, {"cyber": "a"}, "There are no programs to belong to."),
    ignored("image", _O, {"context_compression": "enabled"}, "It is about images, which are refused."),
    ignored("personality", _O, "friendly", "The model has one."),
    refused("moderation", _O, {"model": "m"}, "There is no moderation here. Leave it out."),
    refused("conversation", _O, "conv_1", "Conversations are not kept here. Send previous_response_id."),
    refused("prompt", _O, {"id": "p"}, "Prompts are not kept here. Send instructions and input."),
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
    # A field of GENERATION is left out if this table has it, or what it is an alias of.
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
        ignored("service_tier", _O, "flex", "A summary is written at once."),
        ignored("image", _O, {"context_compression": "enabled"}, "It is about images, which are refused."),
    ),
)
TABLES: Mapping[str, FieldTable[Any]] = {
    "POST /v1/responses": RESPONSE,
    "POST /v1/responses/input_tokens": RESPONSE,
    "POST /v1/responses/compact": COMPACT,
}
