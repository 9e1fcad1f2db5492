"""anthropic for Python, with the Messages API."""

from collections.abc import Iterable, Mapping
from typing import Any

import anthropic

from tests.clients import cases


class Messages:
    """`anthropic.Anthropic` with its default settings."""

    wrong_model = cases.ExpectedError(anthropic.NotFoundError)
    too_long = cases.ExpectedError(anthropic.BadRequestError)

    def __init__(self, url: str, _dialect: str = "") -> None:
        self._client = anthropic.Anthropic(base_url=url, api_key="none")

    def reply(self, model: str, prompt: str) -> str:
        reply = self._client.messages.create(
            model=model, messages=[{"role": "user", "content": prompt}], max_tokens=cases.REPLY_TOKENS
        )
        return "".join(block.text for block in reply.content if block.type == "text")

    def pieces(self, model: str, prompt: str) -> Iterable[str]:
        with self._client.messages.stream(
            model=model, messages=[{"role": "user", "content": prompt}], max_tokens=cases.REPLY_TOKENS
        ) as stream:
            yield from stream.text_stream

    def call(self, model: str, prompt: str) -> tuple[str, Mapping[str, Any]]:
        tool: Any = {"name": cases.TOOL_NAME, "input_schema": cases.TOOL_SCHEMA}
        reply = self._client.messages.create(
            model=model,
            messages=[{"role": "user", "content": prompt}],
            max_tokens=cases.TOOL_TOKENS,
            tools=[tool],
            tool_choice={"type": "any"},
        )
        call = cases.first((block for block in reply.content if block.type == "tool_use"), "tool call")
        return call.name, call.input


if __name__ == "__main__":
    cases.main(Messages)
