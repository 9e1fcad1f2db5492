"""LangChain's chat models for three dialects."""

from collections.abc import Iterable, Mapping
from typing import Any

import ollama
from langchain_anthropic import ChatAnthropic
from langchain_core.exceptions import ContextOverflowError, ModelNotFoundError
from langchain_ollama import ChatOllama
from langchain_openai import ChatOpenAI

from tests.clients import cases


class Chat:
    """Creates a chat model for each request."""

    def __init__(self, url: str, dialect: str) -> None:
        self._url, self._dialect = url, dialect
        own = dialect != "ollama"  # langchain-ollama raises the errors of the ollama library
        self.wrong_model = cases.ExpectedError(ModelNotFoundError if own else ollama.ResponseError)
        self.too_long = cases.ExpectedError(ContextOverflowError if own else ollama.ResponseError)

    def _model(self, name: str, tokens: int = cases.REPLY_TOKENS) -> Any:
        if self._dialect == "openai":
            return ChatOpenAI(model=name, base_url=f"{self._url}/v1", api_key="none", max_tokens=tokens)
        if self._dialect == "anthropic":
            return ChatAnthropic(model=name, base_url=self._url, api_key="none", max_tokens=tokens)
        return ChatOllama(model=name, base_url=self._url, num_predict=tokens)

    def reply(self, model: str, prompt: str) -> str:
        return str(self._model(model).invoke(prompt).text)

    def pieces(self, model: str, prompt: str) -> Iterable[str]:
        return cases.texts(self._model(model).stream(prompt), lambda chunk: str(chunk.text))

    def call(self, model: str, prompt: str) -> tuple[str, Mapping[str, Any]]:
        """langchain-ollama accepts `tool_choice` but ignores it."""
        tool = {"name": cases.TOOL_NAME, "description": cases.TOOL_DESCRIPTION, "parameters": cases.TOOL_SCHEMA}
        bound = self._model(model, cases.TOOL_TOKENS).bind_tools([tool], tool_choice="any")
        call = cases.first(bound.invoke(prompt).tool_calls, "tool call")
        return call["name"], call["args"]


if __name__ == "__main__":
    cases.main(Chat)
