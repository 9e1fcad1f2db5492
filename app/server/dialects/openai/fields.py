"""The documented fields of requests to OpenAI's API: see `app.server.request_fields`.

The documentation is that of OpenAI, vLLM, llama.cpp's server, LM Studio, and Ollama.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from app.server.dialects.openai.chat_requests import ChatCompletionRequest
from app.server.dialects.openai.completion_requests import CompletionRequest
from app.server.dialects.openai.embedding_requests import EmbeddingRequest
from app.server.request_fields import Field, FieldTable, alias, ignored, refused, supported

_OPENAI = "OpenAI, vLLM, llama.cpp, Ollama, LM Studio"
_ENGINES = "vLLM, llama.cpp, LM Studio"
TTL = supported(
    "ttl", "LM Studio", 300, "Seconds after the last request until the model is unloaded. Below 0: no limit."
)
_NO_MEDIA = "This version reads text only. Leave it out."
_NO_SAMPLER = "This version does not have this sampler. Leave it out, or send top_p or min_p."
_ONE_PROMPT = "Every prompt is cached, with or without this field."

SAMPLING: Sequence[Field] = (
    supported("temperature", _OPENAI, 0.7, "0 to 100."),
    supported("top_p", _OPENAI, 0.9),
    supported("top_k", _ENGINES, 40, "0 and -1: no limit."),
    supported("min_p", "vLLM, llama.cpp", 0.05),
    supported("seed", _OPENAI, 7, "With n, the seed grows by 1 per choice. -1: random."),
    supported("presence_penalty", _OPENAI, 0.5, "-2 to 2."),
    supported("frequency_penalty", _OPENAI, 0.5, "-2 to 2."),
    supported("repetition_penalty", "vLLM", 1.1),
    alias("repeat_penalty", "llama.cpp, LM Studio", 1.1, of="repetition_penalty"),
    supported(
        "repeat_last_n", "llama.cpp", 0, "0 turns repetition_penalty off. Any other value applies it to all tokens."
    ),
    supported(
        "logit_bias",
        _OPENAI,
        {"5": -100},
        "An object with token ids as keys, or llama.cpp's pairs of a token id and a bias.",
    ),
    supported("xtc_probability", "llama.cpp", 0.5),
    supported("xtc_threshold", "llama.cpp", 0.1),
    supported("dry_multiplier", "llama.cpp", 0.8),
    supported("dry_base", "llama.cpp", 1.75),
    supported("dry_allowed_length", "llama.cpp", 2),
    supported("dry_penalty_last_n", "llama.cpp", 64),
    supported("dry_sequence_breakers", "llama.cpp", ["\n"]),
    supported("samplers", "llama.cpp", ["top_k", "temperature"], "Samplers that are not in the list are off."),
    supported("allowed_token_ids", "vLLM", [1, 2]),
    supported("bad_words", "vLLM", ["maybe"]),
    refused("typical_p", "llama.cpp", 0.9, _NO_SAMPLER, neutral=[1]),
    refused("top_n_sigma", "llama.cpp", 1.5, _NO_SAMPLER, neutral=[-1, 0]),
    refused("min_keep", "llama.cpp", 3, _NO_SAMPLER, neutral=[0, 1]),
    refused("mirostat", "llama.cpp", 2, _NO_SAMPLER, neutral=[0]),
    ignored("mirostat_tau", "llama.cpp", 5.0, "It has an effect only with mirostat."),
    ignored("mirostat_eta", "llama.cpp", 0.1, "It has an effect only with mirostat."),
    refused("dynatemp_range", "llama.cpp", 0.5, "The temperature is constant. Leave it out.", neutral=[0]),
    ignored("dynatemp_exponent", "llama.cpp", 1.0, "It has an effect only with dynatemp_range."),
    refused("adaptive_target", "llama.cpp", 0.5, _NO_SAMPLER, neutral=[-1]),
    ignored("adaptive_decay", "llama.cpp", 0.9, "It has an effect only with adaptive_target."),
    ignored(
        "backend_sampling", "llama.cpp", True, "It selects the device that the sampler runs on, and changes no tokens."
    ),
    refused("watermarking", "vLLM", True, "Replies have no watermark. Leave it out.", neutral=[False]),
    refused("logits_processors", "vLLM", ["a.b"], "A request cannot contain code. Leave it out.", neutral=[[]]),
    refused(
        "repetition_detection", "vLLM", {"max_pattern_size": 8}, "Not supported. Leave it out, or send dry_multiplier."
    ),
)

LENGTH: Sequence[Field] = (
    supported("max_tokens", _OPENAI, 100, "-1 and -2: generate until the context is full."),
    alias("n_predict", "llama.cpp", 100, of="max_tokens"),
    supported("min_tokens", "vLLM", 2),
    supported("stop", _OPENAI, ["\n"]),
    supported("stop_token_ids", "vLLM", [7]),
    supported("include_stop_str_in_output", "vLLM", True),
    supported("ignore_eos", "vLLM, llama.cpp", True),
    supported("num_ctx", "Inglenook", 4096, "Limit of prompt and reply together. The model is not reloaded."),
    supported("options", "Inglenook", {"num_ctx": 4096}, "Of Ollama's options, only num_ctx is supported."),
    supported("options.num_ctx", "Inglenook", 4096),
    refused("n_indent", "llama.cpp", 4, "Not supported. Leave it out, or send a grammar.", neutral=[0]),
    ignored("n_keep", "llama.cpp", 32, "Prompts are not truncated."),
    ignored("n_discard", "llama.cpp", 32, "Prompts are not truncated."),
)

GRAMMARS: Sequence[Field] = (
    supported("structured_outputs", "vLLM", {"choice": ["a"]}),
    supported("structured_outputs.json", "vLLM", {"type": "integer"}),
    supported("structured_outputs.json_object", "vLLM", True),
    supported("structured_outputs.regex", "vLLM", "a+"),
    supported("structured_outputs.choice", "vLLM", ["a", "b"]),
    supported("structured_outputs.grammar", "vLLM", 'root ::= "a"'),
    refused("structured_outputs.structural_tag", "vLLM", "{}", "Send json, regex, choice, or grammar."),
    supported(
        "structured_outputs.whitespace_pattern", "vLLM", " ?", "Pattern of the white space between the parts of JSON."
    ),
    supported("structured_outputs.disable_any_whitespace", "vLLM", True),
    ignored("structured_outputs.disable_additional_properties", "vLLM", True, "Objects are closed by default."),
    ignored("structured_outputs.disable_fallback", "vLLM", True, "This server has only one grammar compiler."),
    ignored("structured_outputs.backend", "vLLM", "xgrammar", "This server has only one grammar compiler."),
    supported("guided_json", "vLLM", {"type": "integer"}),
    supported("guided_regex", "vLLM", "a+"),
    supported("guided_choice", "vLLM", ["a", "b"]),
    supported("guided_grammar", "vLLM", 'root ::= "a"'),
    refused("guided_whitespace_pattern", "vLLM", " ?", "White space is already limited. Leave it out."),
    ignored("guided_decoding_backend", "vLLM", "xgrammar", "This server has only one grammar compiler."),
    supported("grammar", "llama.cpp", 'root ::= "a"', "GBNF."),
    supported("json_schema", "llama.cpp", {"type": "integer"}),
    refused(
        "grammar_lazy", "llama.cpp", True, "A grammar applies from the first token. Leave it out.", neutral=[False]
    ),
    refused(
        "grammar_triggers",
        "llama.cpp",
        [{"type": 0}],
        "A grammar applies from the first token. Leave it out.",
        neutral=[[]],
    ),
    ignored("preserved_tokens", "llama.cpp", ["<tool>"], "The server keeps all tokens that a format needs."),
)

CHOICES: Sequence[Field] = (
    supported("n", "OpenAI, vLLM, llama.cpp", 2),
    alias("n_cmpl", "llama.cpp", 2, of="n"),
    supported("best_of", "OpenAI, vLLM", 2),
    supported("use_beam_search", "vLLM", True),
    supported("length_penalty", "vLLM", 1.2),
    supported("early_stopping", "vLLM", True),
)

STREAM: Sequence[Field] = (
    supported("stream", _OPENAI, True),
    supported("stream_options", _OPENAI, {"include_usage": True}, "It has an effect only with stream."),
    supported("stream_options.include_usage", _OPENAI, True),
    supported("stream_options.continuous_usage_stats", "vLLM", True),
    supported("stream_options.interval_ms", "Inglenook", 100, "Minimum interval between two chunks, in ms."),
    ignored(
        "stream_options.include_obfuscation",
        "OpenAI",
        False,
        "It would pad the chunks of a stream; this server does not pad them.",
    ),
    ignored("stream_interval", "vLLM", 4, "A chunk always has all tokens that are ready."),
    ignored("sse_ping_interval", "llama.cpp", 30, "The interval is fixed: a silent stream sends a comment every 5 s."),
    supported("return_progress", "llama.cpp", True, "A stream of chat completions also reports the load."),
)

SERVICE: Sequence[Field] = (
    supported("model", _OPENAI, "a-model", "Default: the served model."),
    supported("user", "OpenAI, vLLM", "me", "Validated, but not used."),
    supported("store", "OpenAI", False, "false: the request is not written to disk."),
    supported(
        "service_tier", "OpenAI", "flex", "flex sets the service class background, and priority sets interactive."
    ),
    supported("service_class", "Inglenook", "background"),
    supported("drafts", "Inglenook", False, "false turns speculative decoding off. The reply is the same."),
    supported("priority", "vLLM", 3, "The highest value is served first, unlike in vLLM."),
    supported("cache_salt", "vLLM", "mine"),
    ignored("metadata", "OpenAI", {"a": "b"}, "It labels stored completions, which this server does not have."),
    ignored("safety_identifier", "OpenAI", "me", "It only identifies the user."),
    ignored("session_id", "vLLM", "s1", "It only identifies the session."),
    ignored("prompt_cache_key", "OpenAI", "k", f"It only names a cache. {_ONE_PROMPT}"),
    ignored("prompt_cache_retention", "OpenAI", "24h", f"It only sets the lifetime of a cache. {_ONE_PROMPT}"),
    ignored("prompt_cache_options", "OpenAI", {"ttl": "24h"}, f"It only sets the lifetime of a cache. {_ONE_PROMPT}"),
    ignored("cache_prompt", "llama.cpp", False, "The reply is the same with and without the cache."),
    ignored("n_cache_reuse", "llama.cpp", 256, "The reply is the same with and without the cache."),
    ignored("id_slot", "llama.cpp", 0, "Every request can run in every slot."),
    TTL,
    ignored("draft_model", "LM Studio", "small", "A draft model changes only the speed."),
    ignored("speculative.n_max", "llama.cpp", 8, "A draft model changes only the speed."),
    ignored("speculative.n_min", "llama.cpp", 1, "A draft model changes only the speed."),
    ignored("speculative.p_min", "llama.cpp", 0.5, "A draft model changes only the speed."),
    refused(
        "lora",
        "llama.cpp",
        [{"id": 0, "scale": 1}],
        "This version has no adapters. Serve a merged model.",
        neutral=[[]],
    ),
    refused("image_data", "llama.cpp", [{"data": "", "id": 1}], _NO_MEDIA, neutral=[[]]),
    refused("multimodal_data", "llama.cpp", ["aa"], _NO_MEDIA, neutral=[[]]),
    ignored("mm_processor_kwargs", "vLLM", {"num_crops": 4}, "It applies to images, which no model here can see."),
    ignored("media_io_kwargs", "vLLM", {"video": {}}, "It applies to media, which no model here can read."),
    ignored("kv_transfer_params", "vLLM", {"do_remote_prefill": False}, "One server computes the whole request."),
    ignored("ec_transfer_params", "vLLM", {"a": 1}, "One server computes the whole request."),
    refused("vllm_xargs", "vLLM", {"a": 1}, "This server has no extensions. Leave it out.", neutral=[{}]),
)

TEXT: Sequence[Field] = (
    supported("skip_special_tokens", "vLLM", False, "false: control tokens are shown."),
    ignored("spaces_between_special_tokens", "vLLM", False, "No spaces are added between tokens."),
)

GENERATION: Sequence[Field] = (*SAMPLING, *LENGTH, *GRAMMARS, *CHOICES, *STREAM, *SERVICE, *TEXT)

_TEXT_ONLY = "This version reads and writes text only. Leave it out."
_DEVELOPERS = "Only vLLM's rendering routes use it."

# Fields that both chat completions and text completions have.
REPORTING: Sequence[Field] = (
    supported("prompt_logprobs", "vLLM", 2, "0 to 20; not supported in a stream."),
    refused("logprob_token_ids", "vLLM", [1], "Leave it out, or send logprobs for up to 20 tokens."),
    supported("return_token_ids", "vLLM", True),
    supported("return_tokens_as_token_ids", "vLLM", True),
    supported("request_id", "vLLM", "r-1", "It becomes the end of the reply's id."),
    supported("timings_per_token", "llama.cpp", True, "Each chunk of a stream has timings."),
    supported("t_max_predict_ms", "llama.cpp", 5000),
    supported("t_max_prompt_ms", "llama.cpp", 5000),
    refused(
        "post_sampling_probs",
        "llama.cpp",
        True,
        "Probabilities are reported as before sampling. Leave it out.",
        neutral=[False],
    ),
    ignored(
        "return_tokens",
        "llama.cpp",
        True,
        "llama.cpp's replies on this route have no token ids; send return_token_ids.",
    ),
    ignored("response_fields", "llama.cpp", ["content"], "llama.cpp applies it only to /completion."),
    ignored("routed_experts_prompt_start", "vLLM", 0, "Routed experts are not reported."),
    ignored("return_token_offsets", "vLLM", True, _DEVELOPERS),
    ignored("return_mm_kwargs", "vLLM", True, _DEVELOPERS),
)

CHAT_ONLY: Sequence[Field] = (
    supported("messages", _OPENAI, [{"role": "user", "content": "Hello"}]),
    supported("messages[].role", _OPENAI, "system", "Any name. The chat template determines its meaning."),
    supported("messages[].content", _OPENAI, "Hello", "A string, or a list of parts. Words replace images and files."),
    supported("messages[].name", "OpenAI, vLLM", "me"),
    supported("messages[].tool_calls", _OPENAI, [{"id": "1", "function": {"name": "f", "arguments": "{}"}}]),
    supported("messages[].tool_call_id", _OPENAI, "1"),
    supported("messages[].function_call", "OpenAI", {"name": "f", "arguments": "{}"}),
    supported("messages[].reasoning", "vLLM, Ollama", "So."),
    supported("messages[].reasoning_content", "llama.cpp, vLLM", "So."),
    ignored("messages[].refusal", "OpenAI", "No.", "Replies from this server have none."),
    ignored("messages[].audio", "OpenAI", {"id": "a"}, "Replies from this server have none."),
    supported("max_completion_tokens", "OpenAI, vLLM, llama.cpp", 100),
    supported("logprobs", _OPENAI, True),
    supported("top_logprobs", _OPENAI, 2, "It has an effect only with logprobs."),
    refused("n_probs", "llama.cpp", 2, "Send logprobs and top_logprobs.", neutral=[0]),
    supported("response_format", _OPENAI, {"type": "json_object"}),
    supported("tools", _OPENAI, [{"type": "function", "function": {"name": "f"}}]),
    supported("tool_choice", "OpenAI, vLLM, llama.cpp, LM Studio", "none"),
    supported("parallel_tool_calls", "OpenAI, vLLM, llama.cpp", False),
    refused("functions", "OpenAI", [{"name": "f"}], "Deprecated. Send tools.", neutral=[[]]),
    refused("function_call", "OpenAI", {"name": "f"}, "Send tool_choice.", neutral=["none", "auto"]),
    supported("reasoning", "Ollama, OpenRouter", {"effort": "low"}),
    supported("reasoning.effort", "Ollama, OpenRouter", "low"),
    supported("reasoning.max_tokens", "OpenRouter", 100),
    supported("reasoning.enabled", "OpenRouter", False),
    supported("reasoning.exclude", "OpenRouter", True),
    supported("reasoning_effort", "OpenAI, vLLM, llama.cpp, Ollama", "low"),
    supported("include_reasoning", "vLLM", False),
    supported("thinking_token_budget", "vLLM", 100),
    alias("thinking_budget", "Inglenook", 100, of="thinking_token_budget"),
    alias("thinking_budget_tokens", "llama.cpp", 100, of="thinking_token_budget"),
    alias("reasoning_budget_tokens", "llama.cpp", 100, of="thinking_token_budget"),
    refused(
        "reasoning_format",
        "llama.cpp",
        "none",
        "Reasoning has its own field. Leave it out.",
        neutral=["auto", "deepseek"],
    ),
    refused("reasoning_in_content", "llama.cpp", True, "Reasoning has its own field. Leave it out.", neutral=[False]),
    refused("thinking_forced_open", "llama.cpp", True, "The chat template decides.", neutral=[False]),
    refused("parse_tool_calls", "llama.cpp", False, "Send tool_choice none.", neutral=[True]),
    ignored("chat_format", "llama.cpp", 0, "The chat template decides."),
    supported("chat_template_kwargs", "vLLM, llama.cpp", {"enable_thinking": False}),
    refused(
        "chat_template",
        "vLLM",
        "{{ messages }}",
        "The model's template is used. Send a rendered prompt to /v1/completions.",
    ),
    supported("add_generation_prompt", "vLLM, llama.cpp", False),
    supported("continue_final_message", "vLLM, llama.cpp", True),
    refused("echo", "vLLM", True, "A reply does not repeat the continued message. Leave it out.", neutral=[False]),
    refused("add_special_tokens", "vLLM", True, "The chat template adds them. Leave it out.", neutral=[False]),
    refused("documents", "vLLM", [{"text": "a"}], "Not supported. Include them in a message.", neutral=[[]]),
    refused("truncate_prompt_tokens", "vLLM", 100, "Conversations are not truncated. Send fewer messages."),
    ignored("truncation_side", "vLLM", "left", "It has an effect only with truncate_prompt_tokens."),
    refused("return_prompt_text", "vLLM", True, "Not supported. Send the request to /apply-template.", neutral=[False]),
    supported("modalities", "OpenAI", ["text"], "Only `text` is supported."),
    refused("audio", "OpenAI", {"voice": "alloy", "format": "mp3"}, _TEXT_ONLY),
    refused("web_search_options", "OpenAI", {}, "This server does not search the web. Leave it out."),
    refused("moderation", "OpenAI", {"model": "m"}, "Replies are not moderated. Leave it out."),
    supported(
        "prediction", "OpenAI", {"type": "content", "content": "a"}, "Its tokens are drafts. It changes only the speed."
    ),
    ignored("verbosity", "OpenAI", "low", "No chat template uses it."),
)

COMPLETION_ONLY: Sequence[Field] = (
    supported("prompt", _OPENAI, ["Hi", [1, 2]]),
    supported("logprobs", "OpenAI, vLLM", 2),
    alias("n_probs", "llama.cpp", 2, of="logprobs"),
    supported("echo", "OpenAI, vLLM", True),
    supported("suffix", "OpenAI, Ollama", " end", "Needs a model with infill tokens."),
    supported("response_format", "vLLM, llama.cpp", {"type": "json_object"}),
    supported(
        "truncate_prompt_tokens",
        "vLLM",
        100,
        "Number of tokens to keep; -1: the maximum that leaves space for the reply.",
    ),
    supported("truncation_side", "vLLM", "right", "Default: left, which keeps the last tokens."),
    refused("add_special_tokens", "vLLM", False, "Send token ids.", neutral=[True]),
    refused("prompt_embeds", "vLLM", "", "Send text or token ids."),
    refused("thinking_token_budget", "vLLM", 100, "Text completions have no reasoning. Leave it out.", neutral=[-1]),
)

EMBEDDING: Sequence[Field] = (
    supported("input", _OPENAI, ["a", [1, 2]], "A string, token ids, or a list of strings and lists of token ids."),
    alias("content", "llama.cpp", "some text", of="input"),
    supported("model", _OPENAI, "a-model", "Default: the served model."),
    supported("encoding_format", "OpenAI, vLLM, llama.cpp, Ollama", "base64"),
    supported("dimensions", "OpenAI, vLLM, Ollama", 3),
    supported("user", "OpenAI, vLLM", "me", "Validated, but not used."),
    supported("truncate_prompt_tokens", "vLLM", -1),
    TTL,
    refused("truncation_side", "vLLM", "left", "Inputs are always cut at the end.", neutral=["right"]),
    refused("add_special_tokens", "vLLM", False, "Send token ids.", neutral=[True]),
    refused("embd_normalize", "llama.cpp", -1, "Vectors have length 1.", neutral=[2]),
    refused("normalize", "vLLM", False, "Vectors have length 1.", neutral=[True]),
    refused("use_activation", "vLLM", False, "Vectors have length 1.", neutral=[True]),
    refused("embed_dtype", "vLLM", "float16", "Vector elements are always float32.", neutral=["float32"]),
    refused("endianness", "vLLM", "big", "Vectors are always little-endian.", neutral=["native", "little"]),
    refused("messages", "vLLM", [{"role": "user", "content": "a"}], "Send input."),
    refused("chat_template", "vLLM", "{{ messages }}", "Send input."),
    ignored("add_generation_prompt", "vLLM", True, "It has an effect only with messages."),
    ignored("continue_final_message", "vLLM", True, "It has an effect only with messages."),
    ignored("chat_template_kwargs", "vLLM", {"a": 1}, "It has an effect only with messages."),
    ignored("mm_processor_kwargs", "vLLM", {"a": 1}, "It applies to images, which no model here can see."),
    ignored("media_io_kwargs", "vLLM", {"video": {}}, "It applies to media, which no model here can read."),
    ignored("priority", "vLLM", 1, "Requests are served in order of arrival."),
    ignored("request_id", "vLLM", "r-1", "Replies have no id."),
    ignored("cache_salt", "vLLM", "mine", "Nothing is cached."),
)

CHAT = FieldTable(
    ChatCompletionRequest,
    {"messages": [{"role": "user", "content": "Hi"}]},
    [*CHAT_ONLY, *REPORTING, *GENERATION],
)
COMPLETION = FieldTable(CompletionRequest, {"prompt": "Hi"}, [*COMPLETION_ONLY, *REPORTING, *GENERATION])
EMBEDDINGS = FieldTable(EmbeddingRequest, {"input": "Hi"}, EMBEDDING)

TABLES: Mapping[str, FieldTable[Any]] = {
    "POST /v1/chat/completions": CHAT,
    "POST /v1/completions": COMPLETION,
    "POST /v1/embeddings": EMBEDDINGS,
}
