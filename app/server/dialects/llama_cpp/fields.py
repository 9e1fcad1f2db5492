"""The documented fields of requests to llama.cpp's server, and to vLLM's server on the same paths."""

from collections.abc import Mapping, Sequence
from typing import Any

from app.server.dialects.llama_cpp.requests import CompletionRequest, InfillRequest, RoutedModel
from app.server.dialects.llama_cpp.token_requests import (
    DetokenizeRequest,
    EmbeddingRequest,
    TemplateRequest,
    TokenizeRequest,
)
from app.server.request_fields import Field, FieldTable, alias, ignored, refused, supported

LLAMA, VLLM, BOTH, OPENAI = "llama.cpp", "vLLM", "llama.cpp, vLLM", "OpenAI, llama.cpp"
_NO_SLOTS = "All slots share one cache."
_NO_DRAFTS = "A draft model changes only the speed."
_WITH_SAMPLER = "It has an effect only with a sampler that is refused."
_PARSED_CHAT = "The text of completions is not parsed."

MODEL = supported("model", LLAMA, "", "Default: the served model.")
DRY: Sequence[Field] = (
    supported("dry_multiplier", LLAMA, 0.8),
    supported("dry_base", LLAMA, 1.75),
    supported("dry_allowed_length", LLAMA, 2),
    supported("dry_penalty_last_n", LLAMA, -1),
    supported("dry_sequence_breakers", LLAMA, ["\n"]),
)
SAMPLING: Sequence[Field] = (
    *DRY,
    supported("seed", OPENAI, 42, "Below 0, or 4294967295: random."),
    supported("temperature", OPENAI, 0.8),
    supported("top_k", LLAMA, 40),
    supported("top_p", OPENAI, 0.95),
    supported("min_p", LLAMA, 0.05),
    supported("repeat_penalty", LLAMA, 1.1),
    supported("repeat_last_n", LLAMA, 64, "0 turns the penalty off. Any other value applies it to all tokens."),
    supported("presence_penalty", OPENAI, 0.5),
    supported("frequency_penalty", OPENAI, 0.5),
    supported("xtc_probability", LLAMA, 0.5),
    supported("xtc_threshold", LLAMA, 0.1),
    supported(
        "samplers", LLAMA, ["top_k", "temperature"], "Samplers that are not in the list are off. The order is fixed."
    ),
    supported(
        "logit_bias",
        OPENAI,
        [[15043, -1.0], [" the ", False]],
        "Pairs or an object, with token ids or strings as keys.",
    ),
    supported("ignore_eos", LLAMA, True),
    supported("stop", OPENAI, ["\n"]),
    refused("typical_p", LLAMA, 0.7, "Send top_p or min_p.", neutral=[1]),
    refused("top_n_sigma", LLAMA, 1.5, "Send top_p or min_p.", neutral=[-1, 0]),
    refused("dynatemp_range", LLAMA, 0.5, "Send a temperature.", neutral=[0]),
    ignored("dynatemp_exponent", LLAMA, 1.0, _WITH_SAMPLER),
    refused("mirostat", LLAMA, 2, "Send a temperature and top_p.", neutral=[0]),
    ignored("mirostat_tau", LLAMA, 5.0, _WITH_SAMPLER),
    ignored("mirostat_eta", LLAMA, 0.1, _WITH_SAMPLER),
    refused("adaptive_target", LLAMA, 0.5, "Send a temperature.", neutral=[-1]),
    ignored("adaptive_decay", LLAMA, 0.9, _WITH_SAMPLER),
    refused("min_keep", LLAMA, 2, "Send a larger top_k or top_p.", neutral=[0]),
    ignored("backend_sampling", LLAMA, True, "It selects the device that the sampler runs on, and changes no tokens."),
)
GENERATING: Sequence[Field] = (
    MODEL,
    *SAMPLING,
    supported("stream", OPENAI, True),
    supported("n_predict", LLAMA, 128, "Below 0: generate until the context is full. 0: only prefill the prompt."),
    alias("max_tokens", OPENAI, 128, of="n_predict"),
    alias("max_completion_tokens", OPENAI, 128, of="n_predict"),
    supported("n_cmpl", LLAMA, 2, "Number of replies to each prompt."),
    alias("n", OPENAI, 2, of="n_cmpl"),
    supported("n_probs", LLAMA, 5),
    alias("logprobs", OPENAI, 5, of="n_probs"),
    supported("post_sampling_probs", LLAMA, True),
    supported("grammar", LLAMA, 'root ::= "a"'),
    supported("json_schema", LLAMA, {"type": "object"}),
    refused("grammar_lazy", LLAMA, True, "Send only grammar.", neutral=[False]),
    refused("grammar_triggers", LLAMA, [{"type": 0, "value": "<"}], "Send only grammar.", neutral=[[]]),
    ignored("preserved_tokens", LLAMA, ["<tool_call>"], _PARSED_CHAT),
    supported("t_max_prompt_ms", LLAMA, 500),
    supported("t_max_predict_ms", LLAMA, 1000),
    supported("return_tokens", LLAMA, True),
    supported("return_progress", LLAMA, True, "Only in a stream."),
    supported("timings_per_token", LLAMA, True, "Only in a stream."),
    supported("response_fields", LLAMA, ["content", "generation_settings/n_predict"]),
    refused("lora", LLAMA, [{"id": 0, "scale": 0.5}], "Serve a model with the adapter merged.", neutral=[[]]),
    refused("image_data", LLAMA, [{"id": 1, "data": ""}], "This version reads text only.", neutral=[[]]),
    ignored(
        "n_indent",
        LLAMA,
        4,
        "It would end a reply at a less indented line. Clients that send it remove such lines themselves.",
    ),
    ignored("n_keep", LLAMA, 8, "Prompts are not truncated. A prompt that exceeds the context is refused."),
    ignored("n_discard", LLAMA, 8, "Prompts are not truncated. A prompt that exceeds the context is refused."),
    ignored("n_cache_reuse", LLAMA, 256, "Cached prefixes are reused without it."),
    ignored("cache_prompt", LLAMA, False, "The reply is the same with and without the cache."),
    ignored("id_slot", LLAMA, 0, _NO_SLOTS),
    ignored("sse_ping_interval", LLAMA, 30, "Pings are comments, which clients ignore."),
    ignored("stream_options", OPENAI, {"include_usage": True}, "The last chunk always has the counts."),
    ignored("chat_format", LLAMA, 0, _PARSED_CHAT),
    ignored("reasoning_format", LLAMA, "none", _PARSED_CHAT),
    ignored("parse_tool_calls", LLAMA, False, _PARSED_CHAT),
    ignored("speculative.n_max", LLAMA, 16, _NO_DRAFTS),
    ignored("speculative.n_min", LLAMA, 0, _NO_DRAFTS),
    ignored("speculative.p_min", LLAMA, 0.75, _NO_DRAFTS),
    ignored("speculative.type", LLAMA, "none", _NO_DRAFTS),
    ignored("speculative.ngram_size_n", LLAMA, 12, _NO_DRAFTS),
    ignored("speculative.ngram_size_m", LLAMA, 48, _NO_DRAFTS),
    ignored("speculative.ngram_m_hits", LLAMA, 1, _NO_DRAFTS),
)
COMPLETION = FieldTable(
    CompletionRequest,
    {"prompt": "Hi"},
    [
        supported(
            "prompt",
            OPENAI,
            [["Hi", 12], {"prompt_string": "Hi"}],
            "A string, token ids, a list of both, an object with `prompt_string`, or a list of these. An object's "
            "`multimodal_data` is refused.",
        ),
        *GENERATING,
    ],
)
INFILL = FieldTable(
    InfillRequest,
    {"input_prefix": "def "},
    [
        supported("input_prefix", LLAMA, "def "),
        supported("input_suffix", LLAMA, "\n"),
        supported("input_extra", LLAMA, [{"filename": "a.py", "text": "a = 1"}]),
        supported("prompt", LLAMA, "    ret", "The start of the missing text."),
        *GENERATING,
    ],
)

_IMAGES = "This version reads text only."
PROMPT_OPTIONS: Sequence[Field] = (
    supported("model", BOTH, ""),
    supported("tools", BOTH, [{"type": "function", "function": {"name": "f"}}]),
    supported("tool_choice", LLAMA, "auto"),
    supported("reasoning_effort", LLAMA, "low"),
    supported("chat_template_kwargs", BOTH, {"enable_thinking": False}),
    supported("add_generation_prompt", BOTH, False),
    supported("continue_final_message", BOTH, True),
    refused("chat_template", VLLM, "{{ messages }}", "The model's template is used. Leave it out.", neutral=[""]),
    ignored("mm_processor_kwargs", VLLM, {}, _IMAGES),
    ignored("media_io_kwargs", VLLM, {}, _IMAGES),
)
TOKENIZE = FieldTable(
    TokenizeRequest,
    {"content": "Hi"},
    [
        *PROMPT_OPTIONS,
        supported("content", LLAMA, "Hi", "Send one of content, prompt, and messages."),
        supported("add_special", LLAMA, True),
        supported("parse_special", LLAMA, False),
        supported("with_pieces", LLAMA, True),
        supported("prompt", VLLM, "Hi"),
        supported("messages", VLLM, [{"role": "user", "content": "Hi"}]),
        supported(
            "add_special_tokens", VLLM, True, "It applies only to a prompt: for messages, the template adds them."
        ),
        supported("return_token_strs", VLLM, True),
    ],
)
DETOKENIZE = FieldTable(
    DetokenizeRequest,
    {"tokens": [1]},
    [
        supported("tokens", BOTH, [1, 2]),
        supported("model", VLLM, "", "With a model, the reply has vLLM's `prompt` instead of `content`."),
    ],
)
TEMPLATE = FieldTable(
    TemplateRequest,
    {"messages": [{"role": "user", "content": "Hi"}]},
    [*PROMPT_OPTIONS, supported("messages", OPENAI, [{"role": "user", "content": "Hi"}])],
)
EMBEDDING = FieldTable(
    EmbeddingRequest,
    {"input": "Hi"},
    [
        MODEL,
        supported("content", LLAMA, ["Hi", [1, 2]]),
        alias("input", LLAMA, ["Hi", [1, 2]], of="content"),
        supported("embd_normalize", LLAMA, 1, "-1 is refused: all vectors are normalized."),
    ],
)
LOAD = FieldTable(RoutedModel, {"model": "hash"}, [supported("model", LLAMA, "hash")])
UNLOAD = FieldTable(RoutedModel, {"model": "hash"}, [supported("model", LLAMA, "hash")])
TABLES: Mapping[str, FieldTable[Any]] = {
    "POST /completion": COMPLETION,
    "POST /infill": INFILL,
    "POST /tokenize": TOKENIZE,
    "POST /detokenize": DETOKENIZE,
    "POST /apply-template": TEMPLATE,
    "POST /embedding": EMBEDDING,
    "POST /models/load": LOAD,
    "POST /models/unload": UNLOAD,
}
