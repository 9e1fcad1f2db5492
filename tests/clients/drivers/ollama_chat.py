"""ollama for Python, with its chat API."""

from collections.abc import Iterable, Mapping
from typing import Any

import ollama

from tests.clients import cases

OPTIONS = {"num_predict": cases.REPLY_TOKENS}


class Chat:
    """`ollama.Client` with its default settings."""

    wrong_model = cases.ExpectedError(ollama.ResponseError, {"status_code": 404})
    too_long = cases.ExpectedError(ollama.ResponseError, {"status_code": 400})

    def __init__(self, url: str, _dialect: str = "") -> None:
        self._client = ollama.Client(url)

    def reply(self, model: str, prompt: str) -> str:
        reply = self._client.chat(model, [{"role": "user", "content": prompt}], options=OPTIONS)
        return reply.message.content or ""

    def pieces(self, model: str, prompt: str) -> Iterable[str]:
        for chunk in self._client.chat(model, [{"role": "user", "content": prompt}], options=OPTIONS, stream=True):
            yield chunk.message.content or ""

    def call(self, model: str, prompt: str) -> tuple[str, Mapping[str, Any]]:
        """Ollama's API cannot force a call."""
        tool = {"type": "function", "function": {"name": cases.TOOL_NAME, "parameters": cases.TOOL_SCHEMA}}
        reply = self._client.chat(model, [{"role": "user", "content": prompt}], tools=[tool], options=OPTIONS)
        call = cases.first(reply.message.tool_calls or (), "tool call")
        return call.function.name, call.function.arguments


if __name__ == "__main__":
    cases.main(Chat)
