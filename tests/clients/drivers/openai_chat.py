"""openai for Python, with chat completions."""

import json
from collections.abc import Iterable, Mapping
from typing import Any

import openai

from tests.clients import cases


class Chat:
    """`openai.OpenAI` with its default settings."""

    wrong_model = cases.ExpectedError(openai.NotFoundError, {"code": "model_not_found"})
    too_long = cases.ExpectedError(openai.BadRequestError, {"code": "context_length_exceeded"})

    def __init__(self, url: str, _dialect: str = "") -> None:
        self._client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")

    def reply(self, model: str, prompt: str) -> str:
        reply = self._client.chat.completions.create(
            model=model, messages=[{"role": "user", "content": prompt}], max_tokens=cases.REPLY_TOKENS
        )
        return reply.choices[0].message.content or ""

    def pieces(self, model: str, prompt: str) -> Iterable[str]:
        chunks = self._client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": prompt}],
            max_tokens=cases.REPLY_TOKENS,
            stream=True,
            stream_options={"include_usage": True},
        )
        for chunk in chunks:
            for choice in chunk.choices:
                yield choice.delta.content or ""

    def call(self, model: str, prompt: str) -> tuple[str, Mapping[str, Any]]:
        request: Any = self._client.chat.completions.create  # Any, because the type hints accept tools only as literals
        reply = request(
            model=model,
            messages=[{"role": "user", "content": prompt}],
            max_tokens=cases.TOOL_TOKENS,
            tools=[{"type": "function", "function": {"name": cases.TOOL_NAME, "parameters": cases.TOOL_SCHEMA}}],
            tool_choice="required",
        )
        call = cases.first(reply.choices[0].message.tool_calls or (), "tool call")
        return call.function.name, json.loads(call.function.arguments)


if __name__ == "__main__":
    cases.main(Chat)
