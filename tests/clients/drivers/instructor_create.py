"""instructor with the openai library. It returns instances of pydantic models, through a JSON schema or a tool call."""

from collections.abc import Iterable, Mapping
from typing import Any

import instructor
import openai
from instructor.core.exceptions import InstructorRetryException
from pydantic import BaseModel, Field

from tests.clients import cases


class Answer(BaseModel):
    """An answer in one short sentence."""

    text: str = Field(min_length=20, max_length=60)  # a minimum of several tokens, so that partial answers grow


class Weather(BaseModel):
    """A question about the weather of a city."""

    city: str = Field(max_length=20)


class Create:
    """A client that uses a JSON schema for replies without tools."""

    # instructor raises this after its retries, with the client's error as the cause
    wrong_model = cases.ExpectedError(InstructorRetryException)
    too_long = cases.ExpectedError(InstructorRetryException)

    def __init__(self, url: str, _dialect: str) -> None:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
        self._schema = instructor.from_openai(client, mode=instructor.Mode.JSON_SCHEMA)
        self._tools = instructor.from_openai(client, mode=instructor.Mode.TOOLS)

    def reply(self, model: str, prompt: str) -> str:
        answer = self._schema.create(
            model=model,
            messages=[{"role": "user", "content": prompt}],
            response_model=Answer,
            max_tokens=cases.TOOL_TOKENS,
            max_retries=1,
        )
        return str(answer.text)

    def pieces(self, model: str, prompt: str) -> Iterable[str]:
        """Yield the text that each partial answer adds to the previous one."""
        seen = ""
        for answer in self._schema.create_partial(
            model=model,
            messages=[{"role": "user", "content": prompt}],
            response_model=Answer,
            max_tokens=cases.TOOL_TOKENS,
        ):
            text = answer.text or ""
            yield text.removeprefix(seen)
            seen = text

    def call(self, model: str, prompt: str) -> tuple[str, Mapping[str, Any]]:
        weather = self._tools.create(
            model=model,
            messages=[{"role": "user", "content": prompt}],
            response_model=Weather,
            max_tokens=cases.TOOL_TOKENS,
            max_retries=1,
        )
        return cases.TOOL_NAME, weather.model_dump()


if __name__ == "__main__":
    cases.main(Create)
