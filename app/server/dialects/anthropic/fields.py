"""The documented fields of requests to Anthropic's API, including its beta features."""

from collections.abc import Mapping
from typing import Any, Final

from app.server.dialects.anthropic.requests import MessageRequest, TokenCountRequest
from app.server.request_fields import FieldTable, ignored, refused, supported

_A: Final = "Anthropic"
_QUESTION: Final = [{"role": "user", "content": "Hi"}]
_SCHEMA: Final = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
_TOOL: Final = {"name": "get_weather", "input_schema": _SCHEMA}

_PROMPT = (
    supported("model", _A, "claude-sonnet", "Absent, null, or empty: the served model."),
    supported("messages", _A, _QUESTION, "Words replace images and documents."),
    supported("system", _A, "Be brief."),
    supported("tools", _A, [_TOOL]),
    supported("tool_choice", _A, {"type": "auto", "disable_parallel_tool_use": True}),
    supported("thinking", _A, {"type": "adaptive"}, "Without it, the model does not reason."),
    supported("thinking.budget_tokens", _A, 1024),
    supported("output_config", _A, {"effort": "low"}),
    supported("output_config.effort", _A, "low"),
    supported("output_config.format", _A, {"type": "json_schema", "schema": _SCHEMA}),
    supported(
        "output_format", _A, {"type": "json_schema", "schema": _SCHEMA}, "The older name of `output_config.format`."
    ),
    ignored("cache_control", _A, {"type": "ephemeral"}, "Every prompt is cached."),
    ignored("context_management", _A, {"edits": []}, "Prompts are not edited; prompts that are too long are refused."),
    ignored("speed", _A, "fast", "This server has only one speed."),
    ignored(
        "betas",
        _A,
        ["interleaved-thinking-2025-05-14"],
        "It names beta features. Their fields have their own rows in this table.",
    ),
    ignored("user_profile_id", _A, "p", "It only identifies the user."),
    ignored("workspace_id", _A, "w", "This server has no workspaces."),
    ignored("diagnostics", _A, {"previous_message_id": "msg_1"}, "Every reply reports cache misses."),
    refused("mcp_servers", _A, [{"type": "url"}], "This server does not call MCP servers. Leave it out.", neutral=[[]]),
    refused("compaction", _A, {"type": "summary"}, "Not supported. Ask for a summary in a message."),
    refused("thread", _A, {"type": "create"}, "Conversations are not stored. Send all messages."),
)
_GENERATION = (
    supported("max_tokens", _A, 5, "0: the prompt is prefilled, and the reply is empty."),
    supported("stream", _A, True),
    supported("temperature", _A, 0.5, "Up to 100."),
    supported("top_k", _A, 40),
    supported("top_p", _A, 0.9),
    supported("stop_sequences", _A, ["END"]),
    supported("service_class", "Inglenook", "background"),
    ignored("metadata", _A, {"user_id": "u"}, "It only labels the request."),
    ignored("service_tier", _A, "auto", "This server has only one tier."),
    ignored("billing_policy", _A, {"type": "billing_policy"}, "Requests are free."),
    ignored("inference_geo", _A, "eu", "The reply is computed on this machine."),
    ignored("fallback_credit_token", _A, "t", "Requests are free."),
    ignored("fallbacks", _A, [], "No request is declined for policy reasons."),
    refused("container", _A, "container_1", "This server has no containers. Leave it out."),
)

MESSAGES: Final = FieldTable(MessageRequest, {"messages": _QUESTION, "max_tokens": 1}, (*_PROMPT, *_GENERATION))
TOKEN_COUNT: Final = FieldTable(TokenCountRequest, {"messages": _QUESTION}, _PROMPT)
TABLES: Mapping[str, FieldTable[Any]] = {"POST /v1/messages": MESSAGES, "POST /v1/messages/count_tokens": TOKEN_COUNT}
