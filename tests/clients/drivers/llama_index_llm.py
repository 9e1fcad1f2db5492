"""LlamaIndex's LLMs for OpenAI-like servers and for Ollama."""

from collections.abc import Iterable, Mapping
from typing import Any

import ollama
import openai
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.ollama import Ollama
from llama_index.llms.openai_like import OpenAILike

from tests.clients import cases


def get_weather(city: str) -> str:
    """Return the weather in a city."""
    return f"rain in {city}"


class Chat:
    """Creates an LLM for each request. LlamaIndex raises the errors of the openai and ollama libraries."""

    def __init__(self, url: str, dialect: str) -> None:
        self._url, self._ollama = url, dialect == "ollama"
        self.wrong_model = cases.ExpectedError(ollama.ResponseError if self._ollama else openai.NotFoundError)
        self.too_long = cases.ExpectedError(ollama.ResponseError if self._ollama else openai.BadRequestError)

    def _llm(self, model: str, tokens: int = cases.REPLY_TOKENS) -> Any:
        if self._ollama:
            options = {"num_predict": tokens}
            return Ollama(model=model, base_url=self._url, context_window=8192, additional_kwargs=options)
        return OpenAILike(
            model=model,
            api_base=f"{self._url}/v1",
            api_key="none",
            is_chat_model=True,
            is_function_calling_model=True,
            max_tokens=tokens,
        )

    def reply(self, model: str, prompt: str) -> str:
        return self._llm(model).chat([ChatMessage(role="user", content=prompt)]).message.content or ""

    def pieces(self, model: str, prompt: str) -> Iterable[str]:
        chunks = self._llm(model).stream_chat([ChatMessage(role="user", content=prompt)])
        return cases.texts(chunks, lambda chunk: chunk.delta)

    def call(self, model: str, prompt: str) -> tuple[str, Mapping[str, Any]]:
        """The Ollama LLM accepts `tool_required` but ignores it."""
        llm, tool = self._llm(model, cases.TOOL_TOKENS), FunctionTool.from_defaults(get_weather)
        reply = llm.chat_with_tools([tool], user_msg=prompt, tool_required=True)
        call = cases.first(llm.get_tool_calls_from_response(reply), "tool call")
        return call.tool_name, call.tool_kwargs


if __name__ == "__main__":
    cases.main(Chat)
