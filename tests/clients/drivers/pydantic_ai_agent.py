"""pydantic-ai's agents with OpenAI's and Anthropic's APIs."""

import asyncio
from collections.abc import Iterable, Mapping
from typing import Any

from anthropic import AsyncAnthropic
from pydantic import BaseModel, Field
from pydantic_ai import Agent, ModelContextWindowExceededError, ModelNotFoundError, ToolOutput
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

from tests.clients import cases


class Weather(BaseModel):
    """A question about the weather of a city."""

    city: str = Field(max_length=20)


class Agents:
    """Creates an agent for each request."""

    wrong_model = cases.ExpectedError(ModelNotFoundError)
    too_long = cases.ExpectedError(ModelContextWindowExceededError)

    def __init__(self, url: str, dialect: str) -> None:
        self._url, self._dialect = url, dialect

    def _model(self, name: str) -> Any:
        if self._dialect == "anthropic":
            client = AsyncAnthropic(base_url=self._url, api_key="none")
            return AnthropicModel(name, provider=AnthropicProvider(anthropic_client=client))
        return OpenAIChatModel(name, provider=OpenAIProvider(base_url=f"{self._url}/v1", api_key="none"))

    def reply(self, model: str, prompt: str) -> str:
        agent = Agent(self._model(model), model_settings={"max_tokens": cases.REPLY_TOKENS})
        return str(agent.run_sync(prompt).output)

    def pieces(self, model: str, prompt: str) -> Iterable[str]:
        agent = Agent(self._model(model), model_settings={"max_tokens": cases.REPLY_TOKENS})

        async def run() -> list[str]:
            async with agent.run_stream(prompt) as result:
                return [text async for text in result.stream_text(delta=True, debounce_by=None)]

        return asyncio.run(run())

    def call(self, model: str, prompt: str) -> tuple[str, Mapping[str, Any]]:
        """pydantic-ai turns the output type into a tool that the model must call."""
        output = ToolOutput(Weather, name=cases.TOOL_NAME)
        agent = Agent(self._model(model), output_type=output, model_settings={"max_tokens": cases.TOOL_TOKENS})
        return cases.TOOL_NAME, agent.run_sync(prompt).output.model_dump()


if __name__ == "__main__":
    cases.main(Agents)
