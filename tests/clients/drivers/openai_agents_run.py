"""OpenAI's Agents SDK, with the Responses API (its default) and with chat completions."""

import asyncio
from collections.abc import Iterable, Mapping
from typing import Any

import agents
import openai

from tests.clients import cases


class Agents:
    """Creates an agent for each request. The SDK raises the errors of the openai library."""

    wrong_model = cases.ExpectedError(openai.NotFoundError, {"code": "model_not_found"})
    too_long = cases.ExpectedError(openai.BadRequestError, {"code": "context_length_exceeded"})

    def __init__(self, url: str, dialect: str) -> None:
        agents.set_tracing_disabled(True)
        self._url = f"{url}/v1"
        self._model = agents.OpenAIResponsesModel if dialect == "responses" else agents.OpenAIChatCompletionsModel

    def _agent(self, model: str, **more: Any) -> Any:
        client = openai.AsyncOpenAI(base_url=self._url, api_key="none")  # each event loop needs a separate client
        # The limit is high, because the SDK treats a reply that reaches it as an error.
        settings = agents.ModelSettings(max_tokens=cases.TOOL_TOKENS, temperature=0)
        return agents.Agent(
            **{"name": "answers", "model": self._model(model, client), "model_settings": settings, **more}
        )

    def reply(self, model: str, prompt: str) -> str:
        return str(agents.Runner.run_sync(self._agent(model), prompt).final_output)

    def pieces(self, model: str, prompt: str) -> Iterable[str]:
        async def run() -> list[str]:
            result = agents.Runner.run_streamed(self._agent(model), prompt)
            events = [event.data async for event in result.stream_events() if event.type == "raw_response_event"]
            return [event.delta for event in events if event.type == "response.output_text.delta"]

        return asyncio.run(run())

    def call(self, model: str, prompt: str) -> tuple[str, Mapping[str, Any]]:
        called: list[Mapping[str, Any]] = []

        def get_weather(city: str) -> str:
            """The weather of a city."""
            called.append({"city": city})
            return f"rain in {city}"

        settings = agents.ModelSettings(max_tokens=cases.TOOL_TOKENS, tool_choice="required")
        agent = self._agent(
            model,
            tools=[agents.function_tool(get_weather)],
            tool_use_behavior="stop_on_first_tool",
            model_settings=settings,
        )
        agents.Runner.run_sync(agent, prompt)
        return cases.TOOL_NAME, cases.first(called, "tool call")


if __name__ == "__main__":
    cases.main(Agents)
