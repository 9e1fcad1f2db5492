"""instructor over the openai library: replies are objects of a pydantic model, which the model calls as a tool."""

from collections.abc import Iterable, Mapping
from typing import Any

import instructor
import openai
from instructor.core.exceptions import InstructorRetryException
from pydantic import BaseModel, Field

from tests.clients import cases


class Answer(BaseModel):
    """An answer in one short sentence."""

    text: str = Field(min_length=20, max_length=60)  # more than one token, so that it can grow


class Weather(BaseModel):
    """A question for the weather of a city."""

    city: str = Field(max_length=20)


class Create:
    """Turns keep to a JSON schema, as they do without tools."""

    # instructor wraps errors after its retries; the client's own is the cause
    wrong_model = cases.Refusal(InstructorRetryException)
    too_long = cases.Refusal(InstructorRetryException)

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
        """The answers that grow, as the differences between them."""
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
        asked = self._tools.create(
            model=model,
            messages=[{"role": "user", "content": prompt}],
            response_model=Weather,
            max_tokens=cases.TOOL_TOKENS,
            max_retries=1,
        )
        return cases.TOOL_NAME, asked.model_dump()


if __name__ == "__main__":
    cases.main(Create)
