"""DSPy's `LM`, whose replies are streamed with `streamify`."""

import asyncio
import json
from collections.abc import Iterable, Mapping
from typing import Any

import dspy
from dspy.utils.exceptions import ContextWindowExceededError, LMError

from tests.clients import cases


class Program:
    """A DSPy program that calls the model once. It has no signature, because SmolLM2 would not follow its format."""

    wrong_model = cases.ExpectedError(LMError)
    too_long = cases.ExpectedError(ContextWindowExceededError)

    def __init__(self, url: str, _dialect: str) -> None:
        self._url = url

    def _lm(self, model: str, tokens: int = cases.REPLY_TOKENS) -> Any:
        return dspy.LM(f"openai/{model}", api_base=f"{self._url}/v1", api_key="none", max_tokens=tokens, cache=False)

    def reply(self, model: str, prompt: str) -> str:
        return str(self._lm(model)(prompt)[0])

    def pieces(self, model: str, prompt: str) -> Iterable[str]:
        async def run() -> list[str]:
            with dspy.context(lm=self._lm(model)):
                items = [item async for item in dspy.streamify(_answer)(question=prompt)]
            return [item.choices[0].delta.content for item in items if not isinstance(item, dspy.Prediction)]

        return asyncio.run(run())

    def call(self, model: str, prompt: str) -> tuple[str, Mapping[str, Any]]:
        tool = {"type": "function", "function": {"name": cases.TOOL_NAME, "parameters": cases.TOOL_SCHEMA}}
        lm = self._lm(model, cases.TOOL_TOKENS)
        [reply] = lm(prompt, tools=[tool], tool_choice="required")
        call = cases.first(reply["tool_calls"], "tool call")
        return call["function"]["name"], json.loads(call["function"]["arguments"])


def _answer(question: str) -> Any:
    return dspy.Prediction(answer=dspy.settings.lm(question)[0])


if __name__ == "__main__":
    cases.main(Program)
