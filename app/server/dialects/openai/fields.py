"""The documented fields of the requests of OpenAI's API, as OpenAI, vLLM, llama.cpp's server, LM Studio and Ollama
document them: see `app.server.field_table`."""

from collections.abc import Mapping, Sequence
from typing import Any

from app.server.dialects.openai.chat_requests import ChatCompletionRequest
from app.server.dialects.openai.completion_requests import CompletionRequest
from app.server.dialects.openai.embedding_requests import EmbeddingRequest
from app.server.dialects.openai.generation_fields import GENERATION
from app.server.field_table import Field, FieldTable, alias, ignored, refused, supported

_OPENAI = "OpenAI, vLLM, llama.cpp, Ollama, LM Studio"
_TEXT_ONLY = "This version reads and writes text only; leave it out."
_DEVELOPERS = "Only the render routes of vLLM serve it."

# Both kinds of completions.
REPORTING: Sequence[Field] = (
    supported("prompt_logprobs", "vLLM", 2, "0 to 20, not in a stream."),
    refused("logprob_token_ids", "vLLM", [1], "Leave it out, and ask for up to 20 likely tokens."),
    supported("return_token_ids", "vLLM", True),
    supported("return_tokens_as_token_ids", "vLLM", True),
    supported("request_id", "vLLM", "r-1", "The end of the reply's id."),
    supported("timings_per_token", "llama.cpp", True, "Each chunk of a stream has timings."),
    supported("t_max_predict_ms", "llama.cpp", 5000),
    supported("t_max_prompt_ms", "llama.cpp", 5000),
    refused("post_sampling_probs", "llama.cpp", True, "Probabilities are the model's own.", neutral=[False]),
    ignored(
        "return_tokens", "llama.cpp", True, "llama.cpp's replies on this route have no tokens; send return_token_ids."
    ),
    ignored("response_fields", "llama.cpp", ["content"], "llama.cpp applies it to /completion alone."),
    ignored("routed_experts_prompt_start", "vLLM", 0, "Routed experts are not reported."),
    ignored("return_token_offsets", "vLLM", True, _DEVELOPERS),
    ignored("return_mm_kwargs", "vLLM", True, _DEVELOPERS),
)

CHAT_ALONE: Sequence[Field] = (
    supported("messages", _OPENAI, [{"role": "user", "content": "Hello"}]),
    supported("messages[].role", _OPENAI, "system", "Any name: the chat template decides."),
    supported("messages[].content", _OPENAI, "Hello", "A text, or parts of type text."),
    supported("messages[].name", "OpenAI, vLLM", "me"),
    supported("messages[].tool_calls", _OPENAI, [{"id": "1", "function": {"name": "f", "arguments": "{}"}}]),
    supported("messages[].tool_call_id", _OPENAI, "1"),
    supported("messages[].function_call", "OpenAI", {"name": "f", "arguments": "{}"}),
    supported("messages[].reasoning", "vLLM, Ollama", "So."),
    supported("messages[].reasoning_content", "llama.cpp, vLLM", "So."),
    ignored("messages[].refusal", "OpenAI", "No.", "Replies here have none."),
    ignored("messages[].audio", "OpenAI", {"id": "a"}, "Replies here have none."),
    supported("max_completion_tokens", "OpenAI, vLLM, llama.cpp", 100),
    supported("logprobs", _OPENAI, True),
    supported("top_logprobs", _OPENAI, 2, "With logprobs alone."),
    refused("n_probs", "llama.cpp", 2, "Send logprobs and top_logprobs.", neutral=[0]),
    supported("response_format", _OPENAI, {"type": "json_object"}),
    supported("tools", _OPENAI, [{"type": "function", "function": {"name": "f"}}]),
    supported("tool_choice", "OpenAI, vLLM, llama.cpp, LM Studio", "none"),
    supported("parallel_tool_calls", "OpenAI, vLLM, llama.cpp", False),
    refused("functions", "OpenAI", [{"name": "f"}], "They are called tools now; send tools.", neutral=[[]]),
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
    refused("reasoning_format", "llama.cpp", "none", "Thoughts come apart.", neutral=["auto", "deepseek"]),
    refused("reasoning_in_content", "llama.cpp", True, "Thoughts come apart; leave it out.", neutral=[False]),
    refused("thinking_forced_open", "llama.cpp", True, "The chat template decides.", neutral=[False]),
    refused("parse_tool_calls", "llama.cpp", False, "Send tool_choice none.", neutral=[True]),
    ignored("chat_format", "llama.cpp", 0, "The chat template decides."),
    supported("chat_template_kwargs", "vLLM, llama.cpp", {"enable_thinking": False}),
    refused("chat_template", "vLLM", "{{ messages }}", "The model's own is used; send a prompt to /v1/completions."),
    supported("add_generation_prompt", "vLLM, llama.cpp", False),
    supported("continue_final_message", "vLLM, llama.cpp", True),
    refused("echo", "vLLM", True, "A reply does not repeat its beginning; leave it out.", neutral=[False]),
    refused("add_special_tokens", "vLLM", True, "The chat template writes them.", neutral=[False]),
    refused("documents", "vLLM", [{"text": "a"}], "Put them into a message.", neutral=[[]]),
    refused("truncate_prompt_tokens", "vLLM", 100, "A conversation is never cut; send fewer messages."),
    ignored("truncation_side", "vLLM", "left", "It acts with truncate_prompt_tokens alone."),
    refused("return_prompt_text", "vLLM", True, "Send the request to /apply-template.", neutral=[False]),
    supported("modalities", "OpenAI", ["text"], "Text alone."),
    refused("audio", "OpenAI", {"voice": "alloy", "format": "mp3"}, _TEXT_ONLY),
    refused("web_search_options", "OpenAI", {}, "This server does not search the web; leave it out."),
    refused("moderation", "OpenAI", {"model": "m"}, "Replies are not moderated; leave it out."),
    ignored("prediction", "OpenAI", {"type": "content", "content": "a"}, "It changes the speed of replies alone."),
    ignored("verbosity", "OpenAI", "low", "No chat template has a place for it."),
)

COMPLETION_ALONE: Sequence[Field] = (
    supported("prompt", _OPENAI, ["Hi", [1, 2]]),
    supported("logprobs", "OpenAI, vLLM", 2),
    alias("n_probs", "llama.cpp", 2, of="logprobs"),
    supported("echo", "OpenAI, vLLM", True),
    supported("suffix", "OpenAI, Ollama", " end", "By models that fill in the middle."),
    supported("response_format", "vLLM, llama.cpp", {"type": "json_object"}),
    supported("truncate_prompt_tokens", "vLLM", 100, "-1: as many as leave room for the reply."),
    supported("truncation_side", "vLLM", "right", "left, which keeps the last tokens, by default."),
    refused("add_special_tokens", "vLLM", False, "Send token ids.", neutral=[True]),
    refused("prompt_embeds", "vLLM", "", "Send a text or token ids."),
    refused("thinking_token_budget", "vLLM", 100, "A text completion has no thoughts.", neutral=[-1]),
)

EMBEDDING: Sequence[Field] = (
    supported("input", _OPENAI, ["a", [1, 2]], "A text, token ids, or a list of texts and lists of token ids."),
    alias("content", "llama.cpp", "a text", of="input"),
    supported("model", _OPENAI, "a-model", "Without it, the served model answers."),
    supported("encoding_format", "OpenAI, vLLM, llama.cpp, Ollama", "base64"),
    supported("dimensions", "OpenAI, vLLM, Ollama", 3),
    supported("user", "OpenAI, vLLM", "me", "It is checked and not used."),
    supported("truncate_prompt_tokens", "vLLM", -1),
    refused("truncation_side", "vLLM", "left", "The end of a text is cut.", neutral=["right"]),
    refused("add_special_tokens", "vLLM", False, "Send token ids.", neutral=[True]),
    refused("embd_normalize", "llama.cpp", -1, "Vectors have length 1.", neutral=[2]),
    refused("normalize", "vLLM", False, "Vectors have length 1.", neutral=[True]),
    refused("use_activation", "vLLM", False, "Vectors have length 1.", neutral=[True]),
    refused("embed_dtype", "vLLM", "float16", "Numbers are float32.", neutral=["float32"]),
    refused("endianness", "vLLM", "big", "Bytes are little endian.", neutral=["native", "little"]),
    refused("messages", "vLLM", [{"role": "user", "content": "a"}], "Send input."),
    refused("chat_template", "vLLM", "{{ messages }}", "Send input."),
    ignored("add_generation_prompt", "vLLM", True, "It acts with messages alone."),
    ignored("continue_final_message", "vLLM", True, "It acts with messages alone."),
    ignored("chat_template_kwargs", "vLLM", {"a": 1}, "It acts with messages alone."),
    ignored("mm_processor_kwargs", "vLLM", {"a": 1}, "It is about images, which are refused."),
    ignored("media_io_kwargs", "vLLM", {"video": {}}, "It is about media, which are refused."),
    ignored("priority", "vLLM", 1, "Requests take turns."),
    ignored("request_id", "vLLM", "r-1", "A reply has no id."),
    ignored("cache_salt", "vLLM", "mine", "Nothing is cached."),
)

CHAT = FieldTable(
    ChatCompletionRequest,
    {"messages": [{"role": "user", "content": "Hi"}]},
    [*CHAT_ALONE, *REPORTING, *GENERATION],
)
COMPLETION = FieldTable(CompletionRequest, {"prompt": "Hi"}, [*COMPLETION_ALONE, *REPORTING, *GENERATION])
EMBEDDINGS = FieldTable(EmbeddingRequest, {"input": "Hi"}, EMBEDDING)

TABLES: Mapping[str, FieldTable[Any]] = {
    "POST /v1/chat/completions": CHAT,
    "POST /v1/completions": COMPLETION,
    "POST /v1/embeddings": EMBEDDINGS,
}
