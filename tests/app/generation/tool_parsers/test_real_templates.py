"""Messages rendered by real chat templates are parsed back, however the text is split."""

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest

from app.errors import TemplateError
from app.generation.conversation import Json, Message, ToolCall
from app.generation.template import ChatTemplateRenderer
from app.generation.tool_parsers.detection import DetectedFormat, detect_format
from app.generation.tool_parsers.reply_parser import FormatMarkup, ReplyParser
from tests.app.generation.tool_parsers.parsed_reply import ParsedReply, cut, mutated, parse_pieces, tokens

USER = Message("user", "Hello?")
# Apriel's prompts end with this text, but its template renders replies without it
UNWRITTEN = "Here are my reasoning steps:\n"
VARIABLES: dict[str, Json] = {"bos_token": "<s>", "eos_token": "</s>", "enable_thinking": True}

OBJECT: Mapping[str, Json] = {"type": "object", "additionalProperties": True}
PARAMETERS: Mapping[str, Json] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "description": "A city"},
        "days": {"type": "integer", "description": "How many"},
        "ratio": {"type": "number", "description": "A fraction"},
        "deep": {"type": "boolean", "description": "More"},
        "options": {**OBJECT, "description": "Others"},
        "tags": {"type": "array", "items": {"type": "string"}, "description": "Words"},
        "code": {"type": "string", "description": "A program"},
    },
    "required": ["city"],
}


def tool(name: str, parameters: Mapping[str, Json]) -> dict[str, Json]:
    return {"type": "function", "function": {"name": name, "description": f"Does {name}", "parameters": parameters}}


TOOLS = [tool("get_weather", PARAMETERS), tool("now", {"type": "object", "properties": {}})]
SCHEMAS: Mapping[str, Json] = {"get_weather": PARAMETERS, "now": {"type": "object", "properties": {}}}
FULL: dict[str, Json] = {
    "city": 'Zürich "Süd" 你好 🙂 <b>&amp;</b> it\\s',
    "days": 2,
    "ratio": -0.25,
    "deep": True,
    "options": {"a": {"b": [1, 2, {"c": "d"}]}, "off": False, "none": None},
    "tags": ["x", "y z", "true"],
    "code": "def f(x):\n    return x < 1\n\nprint(f(2))\n",
}
PLAIN: dict[str, Json] = {"city": "Rome"}
CALL, OTHER, EMPTY = (
    ToolCall("get_weather", FULL, "call00001"),
    ToolCall("get_weather", PLAIN, "call00002"),
    ToolCall("now", {}, "call00003"),
)
SAID, THOUGHT = "It is warm there.", 'Let me see.\n\nYes, "this" <way>.'

ASKED_OF_TOOLS = [(CALL,), (EMPTY,), (CALL, OTHER), (OTHER, EMPTY)]
MESSAGES = [
    *(Message("assistant", "", None, calls) for calls in ASKED_OF_TOOLS),
    Message("assistant", SAID, THOUGHT, (OTHER,)),
    Message("assistant", "", THOUGHT, (OTHER,)),
    Message("assistant", SAID, THOUGHT),
]

# Templates whose calls cannot be parsed back, and the reason.
NO_CALLS = {
    "HuggingFaceTB-SmolLM3-3B": "does not support tools",
    "LFM2-8B-A1B": "omits calls",
    "LFM2.5-Instruct": "omits calls",
    "google-gemma-2-2b-it": "does not support tools",
    "ibm-granite-granite-3.3-2B-Instruct": "omits calls",
    "llama-cpp-rwkv-world": "does not support tools",
    "microsoft-Phi-3.5-mini-instruct": "does not support tools",
    "deepseek-ai-DeepSeek-R1-Distill-Llama-8B": "omits calls",
    "Kimi-K2-Instruct": "appends to a list, which transformers refuses as well",
    "Kimi-K2-Thinking": "appends to a list, which transformers refuses as well",
    "fireworks-ai-llama-3-firefunction-v2": "needs variables that no chat has",
    "llama-cpp-deepseek-r1": "passes a generator to tojson, which fails in transformers as well",
}
ONE_CALL = {
    "GigaChat3-10B-A1.8B": "omits all calls but the first",
    "GigaChat3.1-10B-A1.8B": "omits all calls but the first",
    "openai-gpt-oss-120b": "omits all calls but the first",
    "meta-llama-Llama-3.1-8B-Instruct": "refuses several calls",
    "meta-llama-Llama-3.2-3B-Instruct": "refuses several calls",
    "meta-llama-Llama-3.3-70B-Instruct": "refuses several calls",
}
NO_NULL = {"MiniMax-M3": "omits null values"}
NO_TEXT = {"NVIDIA-Nemotron-Nano-v2": "writes the text as reasoning, and the calls in a separate turn"}
# Templates that render no call, but whose format of calls is detected.
WITHOUT_CALLS = {
    "ibm-granite-granite-3.3-2B-Instruct": "granite",
    "deepseek-ai-DeepSeek-R1-Distill-Llama-8B": "deepseek",
    "llama-cpp-deepseek-r1": "deepseek",
    "Kimi-K2-Instruct": "kimi",
    "Kimi-K2-Thinking": "kimi",
    "fireworks-ai-llama-3-firefunction-v2": "functools",
}


@pytest.fixture(scope="module")
def renderer() -> Iterator[ChatTemplateRenderer]:
    with ChatTemplateRenderer(seconds=100) as renderer:
        yield renderer


class Template:
    """A real template, and its detected format."""

    def __init__(self, source: str, renderer: ChatTemplateRenderer) -> None:
        self.source = source
        self.renderer = renderer
        self.replies: DetectedFormat = detect_format(source, VARIABLES, renderer)
        self.markup = FormatMarkup(self.replies.format)
        self.prompt = self.render([USER], prompt=True)
        # rendered now, while the renderer caches the compiled template
        self.written = [self.reply(message) for message in MESSAGES]

    def render(self, messages: Sequence[Message], *, prompt: bool = False) -> str | None:
        try:
            return self.renderer.render(
                self.source,
                messages,
                tools=TOOLS,
                add_generation_prompt=prompt,
                variables=VARIABLES,
                arguments_as_text=self.replies.arguments_as_text,
            )
        except TemplateError:
            return None

    def reply_to(self, message: Message) -> tuple[str, str] | None:
        return self.written[MESSAGES.index(message)]

    def reply(self, message: Message) -> tuple[str, str] | None:
        """Return the text that the template renders after the prompt, and the start of the reply in the prompt."""
        prompt, whole = self.prompt, self.render([USER, message])
        if prompt is None or whole is None:
            return None
        if prompt.endswith(UNWRITTEN) and message.reasoning:
            return whole[len(prompt) - len(UNWRITTEN) :], self.markup.opening(prompt)
        common = next((i for i, (a, b) in enumerate(zip(prompt, whole, strict=False)) if a != b), len(prompt))
        if "<" in whole[:common] and ">" not in whole[(cut := whole.rindex("<", 0, common)) : common]:
            common = cut
        return whole[common:], self.markup.opening(whole[:common])

    def read(self, message: Message, chance: random.Random | None = None) -> ParsedReply | None:
        if (reply := self.reply_to(message)) is None:
            return None
        written, opening = reply
        pieces = list(tokens(written, self.markup))
        if chance is not None:
            pieces = list(cut("".join(pieces), chance))
        return parse_pieces(ReplyParser(self.markup, SCHEMAS, opening=opening), pieces)


@pytest.fixture(scope="module")
def templates(llama_cpp_models: Path, renderer: ChatTemplateRenderer) -> dict[str, Template]:
    paths = sorted((llama_cpp_models / "templates").glob("*.jinja"))
    assert len(paths) == 70
    return {path.stem: Template(path.read_text(encoding="utf-8"), renderer) for path in paths}


def differences(parsed: ParsedReply, calls: Sequence[ToolCall]) -> list[object]:
    """Return the calls of the reply that differ from `calls`. Raises if the arguments of a call are not JSON."""
    heard = [(call.name, json.loads(call.arguments), call.ended) for call in parsed.calls]
    return [
        pair for pair in zip_longest(heard, ((call.name, call.arguments, True) for call in calls)) if pair[0] != pair[1]
    ]


@pytest.mark.parametrize("calls", ASKED_OF_TOOLS, ids=["one", "empty", "two", "both"])
def test_rendered_calls_are_parsed_back(templates: dict[str, Template], calls: tuple[ToolCall, ...]) -> None:
    exceptions = NO_CALLS if len(calls) == 1 else NO_CALLS | ONE_CALL
    for name, template in templates.items():
        if name in exceptions:
            continue
        expected = [
            replace(call, arguments=without_null(call.arguments)) if name in NO_NULL else call for call in calls
        ]
        parsed = template.read(Message("assistant", "", None, calls))
        assert parsed is not None, name
        assert differences(parsed, expected) == [], name
        assert (parsed.text.strip(), parsed.reasoning) == ("", ""), name
        again = template.read(Message("assistant", "", None, calls), random.Random(name))
        assert again is not None
        assert again.contents() == parsed.contents(), name


def test_listed_templates_cannot_be_parsed_back(templates: dict[str, Template]) -> None:
    for name in NO_CALLS:
        parsed = templates[name].read(Message("assistant", "", None, (CALL,)))
        assert parsed is None or not parsed.calls, name
    for name in ONE_CALL:
        parsed = templates[name].read(Message("assistant", "", None, (CALL, OTHER)))
        assert parsed is None or len(parsed.calls) == 1, name
    told = {name: templates[name].replies.format.calls for name in NO_CALLS}
    assert {name: calls.name for name, calls in told.items() if calls is not None} == WITHOUT_CALLS


def test_mutated_replies_parse_the_same_for_any_split(templates: dict[str, Template]) -> None:
    seed = random.randrange(1 << 32)
    chance = random.Random(seed)
    known = [(template, *written) for template in templates.values() for written in template.written if written]
    for _ in range(150):
        template, written, opening = chance.choice(known)
        text = mutated("".join(tokens(written, template.markup)), chance)
        whole, *others = (
            parse_pieces(ReplyParser(template.markup, SCHEMAS, opening=opening), pieces)
            for pieces in ([text], text, cut(text, chance), cut(text[: chance.randrange(len(text) + 1)], chance))
        )
        assert [other.contents() for other in others[:2]] == [whole.contents()] * 2, (seed, text)
        for call in (call for told in (whole, *others) for call in told.calls):
            json.dumps([call.name, call.id, call.arguments], ensure_ascii=False).encode()
            assert not call.ended or isinstance(json.loads(call.arguments), dict), (seed, text)


def test_text_reasoning_and_calls_are_separated(templates: dict[str, Template]) -> None:
    thought = 0
    for name, template in templates.items():
        if name in NO_CALLS or name in NO_TEXT:
            continue
        for message in (Message("assistant", SAID, THOUGHT, (OTHER,)), Message("assistant", "", THOUGHT, (OTHER,))):
            reply = template.reply_to(message)
            if reply is None:
                continue
            parsed = template.read(message)
            assert parsed is not None
            assert differences(parsed, [OTHER]) == [], name
            assert parsed.text.strip() == (SAID if SAID in reply[0] else ""), name
            assert parsed.reasoning == (THOUGHT if THOUGHT in reply[0] else ""), name
            thought += bool(parsed.reasoning)
            again = template.read(message, random.Random(name))
            assert again is not None
            assert again.contents() == parsed.contents(), name
    assert thought > 40


def test_reasoning_without_calls_is_parsed(templates: dict[str, Template]) -> None:
    thought = 0
    for name, template in templates.items():
        reply = template.reply_to(Message("assistant", SAID, THOUGHT))
        parsed = template.read(Message("assistant", SAID, THOUGHT))
        if reply is None or parsed is None or name in NO_TEXT:
            continue
        assert parsed.text.strip() == (SAID if SAID in reply[0] else ""), name
        assert parsed.reasoning == (THOUGHT if THOUGHT in reply[0] else ""), name
        assert parsed.calls == []
        thought += bool(parsed.reasoning)
    assert thought > 25


def test_prompt_with_open_reasoning_is_detected(templates: dict[str, Template]) -> None:
    for name, template in templates.items():
        prompt = template.prompt
        if prompt is None:
            continue
        parsed = parse_pieces(
            ReplyParser(template.markup, SCHEMAS, opening=template.markup.opening(prompt)), ["Well, well"]
        )
        assert (parsed.reasoning or parsed.text) == "Well, well", name
        assert bool(parsed.reasoning) == prompt.rstrip().endswith(THINKING_ENDS), name


THINKING_ENDS = ("<think>", "<|START_THINKING|>", "think<|sep|>", "Here are my reasoning steps:")


def without_null(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: without_null(inner) for key, inner in value.items() if inner is not None}
    return [without_null(inner) for inner in value] if isinstance(value, list) else value
