"""openai for Python, with the Responses API."""

import json
from collections.abc import Iterable, Mapping
from typing import Any

import openai

from tests.clients import cases


class Responses:
    """`openai.OpenAI` with its default settings."""

    wrong_model = cases.ExpectedError(openai.NotFoundError, {"code": "model_not_found"})
    too_long = cases.ExpectedError(openai.BadRequestError, {"code": "context_length_exceeded"})

    def __init__(self, url: str, _dialect: str = "") -> None:
        self._client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")

    def reply(self, model: str, prompt: str) -> str:
        reply = self._client.responses.create(model=model, input=prompt, max_output_tokens=cases.REPLY_TOKENS)
        return reply.output_text

    def pieces(self, model: str, prompt: str) -> Iterable[str]:
        limit = cases.REPLY_TOKENS
        for event in self._client.responses.create(model=model, input=prompt, max_output_tokens=limit, stream=True):
            if event.type == "response.output_text.delta":
                yield event.delta

    def call(self, model: str, prompt: str) -> tuple[str, Mapping[str, Any]]:
        request: Any = self._client.responses.create  # Any, because the type hints accept tools only as literals
        reply = request(
            model=model,
            input=prompt,
            max_output_tokens=cases.TOOL_TOKENS,
            tools=[{"type": "function", "name": cases.TOOL_NAME, "parameters": cases.TOOL_SCHEMA, "strict": True}],
            tool_choice="required",
        )
        call = cases.first((item for item in reply.output if item.type == "function_call"), "tool call")
        return call.name, json.loads(call.arguments)


if __name__ == "__main__":
    cases.main(Responses)
