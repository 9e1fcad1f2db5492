"""The documented fields of requests to Ollama's API."""

from collections.abc import Mapping, Sequence
from typing import Any

from app.server.dialects.ollama.requests import (
    ChatRequest,
    DeleteRequest,
    EmbeddingsRequest,
    EmbedRequest,
    GenerateRequest,
    PullRequest,
    ShowRequest,
)
from app.server.request_fields import Field, FieldTable, ignored, refused, supported

OLLAMA = "Ollama"
LLAMA = "llama.cpp"
_LOADED = "The model stays loaded with its settings."
_WHOLE = "Prompts are not truncated; prompts that are too long are refused."
_GONE = "Ollama has removed this option."

NAMED: Sequence[Field] = (
    supported("model", OLLAMA, "hash"),
    supported("name", OLLAMA, "hash", "The older name of `model`."),
)
KEEP_ALIVE = supported(
    "keep_alive", OLLAMA, "5m", "Seconds, or a duration such as `1h30m`. Below 0: no limit. 0: unloads the model."
)
OPTIONS: Sequence[Field] = (
    supported("options", OLLAMA, {}),
    supported("options.num_ctx", OLLAMA, 4096, "Limit of prompt and reply together, in tokens."),
    supported(
        "options.num_predict", OLLAMA, 100, "Below 0: generate until the context is full. 0: only prefill the prompt."
    ),
    supported("options.seed", OLLAMA, 42),
    supported("options.temperature", OLLAMA, 0.8),
    supported("options.top_k", OLLAMA, 20),
    supported("options.top_p", OLLAMA, 0.9),
    supported("options.min_p", OLLAMA, 0.05),
    supported("options.repeat_penalty", OLLAMA, 1.2),
    supported(
        "options.repeat_last_n", OLLAMA, 33, "0 turns the penalty off. Any other value applies it to all tokens."
    ),
    supported("options.presence_penalty", OLLAMA, 1.5),
    supported("options.frequency_penalty", OLLAMA, 1.0),
    supported("options.stop", OLLAMA, ["\n", "user:"]),
    supported("options.dry_multiplier", LLAMA, 0.8),
    supported("options.dry_base", LLAMA, 1.75),
    supported("options.dry_allowed_length", LLAMA, 2),
    supported("options.dry_penalty_last_n", LLAMA, -1),
    supported("options.dry_sequence_breakers", LLAMA, ["\n"]),
    ignored(
        "options.typical_p",
        OLLAMA,
        0.7,
        "Ollama applies it only to some models, and the example in its documentation sends it.",
    ),
    ignored("options.mirostat", OLLAMA, 1, _GONE),
    ignored("options.mirostat_tau", OLLAMA, 0.8, _GONE),
    ignored("options.mirostat_eta", OLLAMA, 0.6, _GONE),
    ignored("options.tfs_z", OLLAMA, 0.5, _GONE),
    ignored("options.penalize_newline", OLLAMA, True, _GONE),
    ignored("options.num_keep", OLLAMA, 5, _WHOLE),
    ignored("options.draft_num_predict", OLLAMA, 4, "A draft model changes only the speed."),
    *(
        ignored(f"options.{name}", OLLAMA, example, _LOADED)
        for name, example in (
            ("num_batch", 2),
            ("num_gpu", 1),
            ("main_gpu", 0),
            ("num_thread", 8),
            ("numa", False),
            ("low_vram", False),
            ("f16_kv", True),
            ("logits_all", False),
            ("vocab_only", False),
            ("use_mmap", True),
            ("use_mlock", False),
            ("embedding_only", False),
        )
    ),
)
GENERATING: Sequence[Field] = (
    *NAMED,
    *OPTIONS,
    KEEP_ALIVE,
    supported("stream", OLLAMA, False, "Default: true."),
    supported("format", OLLAMA, "json", "`json`, or a JSON schema."),
    supported("think", OLLAMA, "high", "true, false, or an effort such as `high`."),
    supported("logprobs", OLLAMA, True),
    supported("top_logprobs", OLLAMA, 3),
    ignored("truncate", OLLAMA, True, f"{_WHOLE} The error has both numbers."),
    ignored("shift", OLLAMA, True, "A reply ends when the context is full."),
    refused("_debug_render_only", OLLAMA, True, "Send the request to POST /apply-template.", neutral=[False]),
)
CHAT = FieldTable(
    ChatRequest,
    {"model": "hash"},
    [
        *GENERATING,
        supported(
            "messages",
            OLLAMA,
            [{"role": "user", "content": "Hi", "thinking": "", "tool_calls": [], "images": ["iVBORw0KGgo="]}],
            "Words replace images.",
        ),
        supported("tools", OLLAMA, [{"type": "function", "function": {"name": "f"}}]),
        supported("tool_choice", "OpenAI", "auto"),
    ],
)
GENERATE = FieldTable(
    GenerateRequest,
    {"model": "hash"},
    [
        *GENERATING,
        supported("prompt", OLLAMA, "Why is the sky blue?"),
        supported("suffix", OLLAMA, "    return result"),
        supported("system", OLLAMA, "Be brief.", "Refused with raw, and ignored with suffix."),
        supported("context", OLLAMA, [1, 2, 3], "Token ids of an earlier reply, which the prompt continues."),
        supported("raw", OLLAMA, True),
        refused("template", OLLAMA, "{{ .Prompt }}", "Send the whole prompt with raw.", neutral=[""]),
        supported("images", OLLAMA, ["iVBORw0KGgo="], "Words replace them. Refused with raw and with suffix."),
        refused("width", OLLAMA, 512, "This version writes text only.", neutral=[0]),
        refused("height", OLLAMA, 512, "This version writes text only.", neutral=[0]),
        refused("steps", OLLAMA, 20, "This version writes text only.", neutral=[0]),
    ],
)
_LOADING = ignored("options", OLLAMA, {"num_ctx": 512}, _LOADED)
EMBED = FieldTable(
    EmbedRequest,
    {"model": "hash"},
    [
        *NAMED,
        KEEP_ALIVE,
        _LOADING,
        supported("input", OLLAMA, ["Hi", "there"]),
        supported("truncate", OLLAMA, False),
        supported("dimensions", OLLAMA, 8),
    ],
)
EMBEDDINGS = FieldTable(
    EmbeddingsRequest, {"model": "hash"}, [*NAMED, KEEP_ALIVE, _LOADING, supported("prompt", OLLAMA, "Hi")]
)
_NO_MODELFILE = "It changes a Modelfile, which this version does not have."
SHOW = FieldTable(
    ShowRequest,
    {"model": "hash"},
    [
        *NAMED,
        ignored("verbose", OLLAMA, True, "Replies never include the vocabulary or the tensors."),
        ignored("system", OLLAMA, "Be brief.", _NO_MODELFILE),
        ignored("template", OLLAMA, "{{ .Prompt }}", _NO_MODELFILE),
        ignored("options", OLLAMA, {}, _NO_MODELFILE),
    ],
)
_NO_ACCOUNT = "Ollama ignores it."
PULL = FieldTable(
    PullRequest,
    {"model": "hash"},
    [
        *NAMED,
        supported("stream", OLLAMA, False, "Default: true."),
        ignored("insecure", OLLAMA, True, _NO_ACCOUNT),
        ignored("username", OLLAMA, "me", _NO_ACCOUNT),
        ignored("password", OLLAMA, "none", _NO_ACCOUNT),
    ],
)
DELETE = FieldTable(DeleteRequest, {"model": "hash"}, NAMED)
TABLES: Mapping[str, FieldTable[Any]] = {
    "POST /api/chat": CHAT,
    "POST /api/generate": GENERATE,
    "POST /api/embed": EMBED,
    "POST /api/embeddings": EMBEDDINGS,
    "POST /api/show": SHOW,
    "POST /api/pull": PULL,
    "DELETE /api/delete": DELETE,
}
