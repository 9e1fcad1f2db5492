"""smolagents' model class for OpenAI-compatible servers, called as by its ToolCallingAgent."""

import json
from collections.abc import Iterable, Mapping
from typing import Any

import openai
import smolagents

from tests.clients import cases


def get_weather(city: str) -> str:
    """The weather of a city.

    Args:
        city: name of the city
    """
    return f"rain in {city}"


class Model:
    """Creates a model for each request. smolagents raises the errors of the openai library."""

    wrong_model = cases.ExpectedError(openai.NotFoundError, {"code": "model_not_found"})
    too_long = cases.ExpectedError(openai.BadRequestError, {"code": "context_length_exceeded"})

    def __init__(self, url: str, _dialect: str) -> None:
        self._url = url

    def _model(self, name: str, tokens: int = cases.REPLY_TOKENS) -> Any:
        return smolagents.OpenAIModel(name, api_base=f"{self._url}/v1", api_key="none", max_tokens=tokens)

    def reply(self, model: str, prompt: str) -> str:
        return self._model(model).generate([_message(prompt)]).content or ""

    def pieces(self, model: str, prompt: str) -> Iterable[str]:
        return cases.texts(self._model(model).generate_stream([_message(prompt)]), lambda delta: delta.content)

    def call(self, model: str, prompt: str) -> tuple[str, Mapping[str, Any]]:
        """Send the same request as ToolCallingAgent, which requires a call and stops at the first observation."""
        reply = self._model(model, cases.TOOL_TOKENS).generate(
            [_message(prompt)],
            stop_sequences=["Observation:", "Calling tools:"],
            tools_to_call_from=[smolagents.tool(get_weather)],
        )
        call = cases.first(reply.tool_calls or (), "tool call")
        return call.function.name, json.loads(call.function.arguments)


def _message(prompt: str) -> Mapping[str, Any]:
    return {"role": "user", "content": [{"type": "text", "text": prompt}]}


if __name__ == "__main__":
    cases.main(Model)
