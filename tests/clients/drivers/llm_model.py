"""llm with its plugin llm-ollama, called through its Python API."""

import os
from collections.abc import Iterable, Mapping
from typing import Any

import llm
import ollama

from tests.clients import cases


def get_weather(city: str) -> str:
    """The weather of a city."""
    return f"rain in {city}"


class Model:
    """Uses models that the server lists, with the prefix of llm-ollama. llm itself refuses other names."""

    wrong_model = cases.ExpectedError(llm.UnknownModelError)
    too_long = cases.ExpectedError(ollama.ResponseError)

    def __init__(self, url: str, _dialect: str) -> None:
        os.environ["OLLAMA_HOST"] = url

    def reply(self, model: str, prompt: str) -> str:
        return str(llm.get_model(f"ollama/{model}").prompt(prompt, num_predict=cases.REPLY_TOKENS).text())

    def pieces(self, model: str, prompt: str) -> Iterable[str]:
        yield from llm.get_model(f"ollama/{model}").prompt(prompt, num_predict=cases.REPLY_TOKENS)

    def call(self, model: str, prompt: str) -> tuple[str, Mapping[str, Any]]:
        """llm cannot force a call."""
        reply = llm.get_model(f"ollama/{model}").prompt(prompt, tools=[get_weather], num_predict=cases.TOOL_TOKENS)
        call = cases.first(reply.tool_calls(), "tool call")
        return call.name, call.arguments


if __name__ == "__main__":
    cases.main(Model)
