"""LiteLLM's `completion` with its providers for three dialects."""

import json
from collections.abc import Iterable, Mapping
from typing import Any

import litellm

from tests.clients import cases

PROVIDERS = {"openai": ("openai", "/v1"), "anthropic": ("anthropic", ""), "ollama": ("ollama_chat", "")}


class Completion:
    """`litellm.completion` with its default settings."""

    wrong_model = cases.ExpectedError(litellm.NotFoundError)

    def __init__(self, url: str, dialect: str) -> None:
        self._provider, path = PROVIDERS[dialect]
        self._url = url + path
        # LiteLLM's Ollama providers do not parse the error message, so they raise BadRequestError for every cause.
        of_length = litellm.BadRequestError if dialect == "ollama" else litellm.ContextWindowExceededError
        self.too_long = cases.ExpectedError(of_length)
        litellm.suppress_debug_info = True

    def _request(self, model: str, prompt: str, **more: Any) -> Any:
        return litellm.completion(
            model=f"{self._provider}/{model}",
            messages=[{"role": "user", "content": prompt}],
            api_base=self._url,
            api_key="none",
            **{"max_tokens": cases.REPLY_TOKENS, **more},
        )

    def reply(self, model: str, prompt: str) -> str:
        return self._request(model, prompt).choices[0].message.content or ""

    def pieces(self, model: str, prompt: str) -> Iterable[str]:
        return cases.texts(self._request(model, prompt, stream=True), lambda chunk: chunk.choices[0].delta.content)

    def call(self, model: str, prompt: str) -> tuple[str, Mapping[str, Any]]:
        """The Ollama provider does not support `tool_choice`."""
        tool = {"type": "function", "function": {"name": cases.TOOL_NAME, "parameters": cases.TOOL_SCHEMA}}
        forced = {} if self._provider == "ollama_chat" else {"tool_choice": "required"}
        reply = self._request(model, prompt, tools=[tool], max_tokens=cases.TOOL_TOKENS, **forced)
        call = cases.first(reply.choices[0].message.tool_calls or (), "tool call")
        return call.function.name, json.loads(call.function.arguments)


if __name__ == "__main__":
    cases.main(Completion)
