"""The documented fields of requests to LM Studio's APIs. Requests to /api/v0 have OpenAI's fields."""

from collections.abc import Mapping
from typing import Any

from app.server.dialects.lm_studio.requests import ChatRequest, DownloadRequest, LoadRequest, UnloadRequest
from app.server.dialects.openai.fields import TTL
from app.server.request_fields import FieldTable, ignored, refused, supported

STUDIO = "LM Studio"
_LOADED = "The model stays loaded with its settings."

CHAT = FieldTable(
    ChatRequest,
    {"input": "Hi"},
    [
        supported("model", STUDIO, "", "Default: the served model."),
        supported(
            "input",
            STUDIO,
            [{"type": "message", "content": "Hi"}],
            "A string, or a list of parts. Words replace images.",
        ),
        supported("system_prompt", STUDIO, "Be brief.", "It is stored with the chat."),
        supported("stream", STUDIO, True),
        supported("temperature", STUDIO, 0.7),
        supported("top_p", STUDIO, 0.9),
        supported("top_k", STUDIO, 40),
        supported("min_p", STUDIO, 0.05),
        supported("repeat_penalty", STUDIO, 1.1),
        supported("max_output_tokens", STUDIO, 100),
        supported("reasoning", STUDIO, "off"),
        supported("context_length", STUDIO, 4096, "Limit of prompt and reply together, in tokens."),
        supported("store", STUDIO, False, "Default: true."),
        supported("previous_response_id", STUDIO, "resp_1"),
        TTL,
        refused(
            "integrations",
            STUDIO,
            ["mcp/playwright"],
            "This server does not run tools. Use /v1/responses, and run its tool calls yourself.",
            neutral=[[]],
        ),
    ],
)
LOAD = FieldTable(
    LoadRequest,
    {"model": "hash"},
    [
        supported("model", STUDIO, "hash", "Must name a model of this machine."),
        supported("context_length", STUDIO, 2048, "Must not exceed the context length of the loaded model."),
        TTL,
        supported("echo_load_config", STUDIO, True),
        ignored("eval_batch_size", STUDIO, 512, _LOADED),
        ignored("flash_attention", STUDIO, True, _LOADED),
        ignored("num_experts", STUDIO, 4, _LOADED),
        ignored("parallel", STUDIO, 4, _LOADED),
        ignored("offload_kv_cache_to_gpu", STUDIO, True, _LOADED),
    ],
)
UNLOAD = FieldTable(UnloadRequest, {"instance_id": "hash"}, [supported("instance_id", STUDIO, "hash")])
_REFUSED = "Every request on this path is refused."
DOWNLOAD = FieldTable(
    DownloadRequest,
    {"model": "hash"},
    [supported("model", STUDIO, "hash", _REFUSED), ignored("quantization", STUDIO, "Q4_K_M", _REFUSED)],
)
TABLES: Mapping[str, FieldTable[Any]] = {
    "POST /api/v1/chat": CHAT,
    "POST /api/v1/models/load": LOAD,
    "POST /api/v1/models/unload": UNLOAD,
    "POST /api/v1/models/download": DOWNLOAD,
}
