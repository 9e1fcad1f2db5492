"""Response templates are parsed as in transformers, and their markup is found in streamed replies."""

import json
import random
from collections.abc import Mapping
from typing import Any

import pytest
from transformers.utils.chat_parsing import parse_response

from app.generation.conversation import Json
from app.generation.tool_parsers.anchor_pattern import MAX_PATTERN, UnsupportedPattern, markup_of
from app.generation.tool_parsers.reply_parser import FormatMarkup, ReplyParser
from app.generation.tool_parsers.response_template import parse_response_template
from tests.app.generation.tool_parsers.parsed_reply import ParsedReply, cut, parse_pieces

NAMED = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
THOUGHT = {"open": "<think>", "close": "</think>"}
CALLS = {"open": "<tool_call>", "close": "</tool_call>", "repeats": True, "content": "json"}
TAGS = {
    "tag_pattern": r"<parameter=(?P<key>\w+)>\s*(?P<value>.*?)\s*</parameter>",
    "value_parser": {"name": "json", "args": {"allow_non_json": True}},
}
COMMAND = {"type": "function", "function": {"name": "{tool_name}", "arguments": "{parameters}"}}
DOTTED = {"type": "function", "function": {"name": "{content.name}", "arguments": "{content.args}"}}
TEMPLATES: dict[str, dict[str, Any]] = {
    "chatml": {
        "start_anchor": "<|im_start|>assistant\n",
        "fields": {
            "thinking": THOUGHT,
            "tool_calls": {**CALLS, "transform": {"type": "function", "function": "{content}"}},
            "content": {"close": "<|im_end|>"},
        },
    },
    "tags": {
        "defaults": {"role": "assistant"},
        "start_anchor": "<|im_start|>assistant\n",
        "fields": {
            "reasoning_content": THOUGHT,
            "tool_calls": {
                "open_pattern": r"<tool_call>\s*<function=(?P<name>\w+)>",
                "close": "</tool_call>",
                "repeats": True,
                "content": "xml-inline",
                "content_args": TAGS,
                "transform": NAMED,
            },
            "content": {"close": ["<|im_end|>", "<|endoftext|>"]},
        },
    },
    "channels": {
        "start_anchor": "<|start|>assistant",
        "fields": {
            "thinking": {"open": "<|channel|>analysis<|message|>", "close": "<|end|>"},
            "content": {"open": "<|channel|>final<|message|>", "close": "<|end|>"},
            "tool_calls": {
                "open_pattern": r"<\|channel\|>commentary to=functions\.(?P<name>\w+).*?<\|message\|>",
                "close": "<|call|>",
                "repeats": True,
                "content": "json",
                "transform": NAMED,
            },
        },
    },
    "actions": {
        "start_anchor": "<|CHATBOT_TOKEN|>",
        "fields": {
            "content": {"open": "<|START_RESPONSE|>", "close": "<|END_RESPONSE|>"},
            "thinking": {"open": "<|START_THINKING|>", "close": "<|END_THINKING|>"},
            "tool_calls": {
                "open": "<|START_ACTION|>",
                "close": "<|END_ACTION|>",
                "content": "json",
                "transform_each": True,
                "transform": COMMAND,
            },
        },
    },
    "quotes": {
        "start_anchor": ["<|turn>model\n", "<tool_response|>"],
        "fields": {
            "thinking": {"open": "<|channel>thought\n", "close": "<channel|>"},
            "tool_calls": {
                "open_pattern": r"<\|tool_call>call:(?P<name>\w+)",
                "close": "<tool_call|>",
                "repeats": True,
                "content": "json",
                "content_args": {"unquoted_keys": True, "string_delims": [['<|"|>', '<|"|>']]},
                "transform": NAMED,
            },
            "content": {"close": ["<turn|>", "<|tool_response>"]},
        },
    },
    "blocks": {
        "start_anchor": "<|message_model|>",
        "fields": {
            kind: {
                "open_pattern": rf"(?:<\|message_model\|>)?[^<]*<\|content_{kind}\|>",
                "close": "<|end_message|>",
                "repeats": True,
                **more,
            }
            for kind, more in (
                ("thinking", {"join": ""}),
                ("content", {"join": ""}),
                ("tool_calls", {"content": "json", "transform": DOTTED}),
            )
        },
    },
}
TOOLS: Mapping[str, Json] = {
    "find": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
}
CITIES = ("Rome", "San José", "a<b", "x\ny", "{x}")


def reply(name: str, chance: random.Random) -> str:
    """Return a reply as a model with this format writes it: reasoning, text, and calls, each optional."""
    thought = chance.choice(("", "Well.", "1 < 2\n\nso <b>"))
    text = chance.choice(("", "It is warm.", "a\n\n* b <i>"))
    calls: list[Any] = [
        {"name": "find", "arguments": {"city": chance.choice(CITIES), "days": chance.randrange(99)}}
        for _ in range(chance.choice((0, 1, 2)))
    ]
    match name:
        case "chatml":
            written = [f"<tool_call>\n{json.dumps(call)}\n</tool_call>" for call in calls]
            return (f"<think>\n{thought}\n</think>\n\n" if thought else "") + text + "".join(written) + "<|im_end|>"
        case "tags":
            written = [
                "<tool_call>\n<function=find>\n"
                + "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in call["arguments"].items())
                + "</function>\n</tool_call>"
                for call in calls
            ]
            return (f"<think>\n{thought}\n</think>\n\n" if thought else "") + text + "".join(written)
        case "channels":
            head = "<|start|>assistant<|channel|>"
            parts = [f"{head}analysis<|message|>{thought}<|end|>"] if thought else []
            parts += [f"{head}final<|message|>{text}<|end|>"] if text else []
            parts += [
                f"{head}commentary to=functions.find <|constrain|>json<|message|>{dumped(call)}<|call|>"
                for call in calls
            ]
            return "".join(parts).removeprefix("<|start|>assistant")
        case "actions":
            acts = [{"tool_call_id": "0", "tool_name": "find", "parameters": call["arguments"]} for call in calls]
            return (
                (f"<|START_THINKING|>{thought}<|END_THINKING|>" if thought else "")
                + (f"<|START_RESPONSE|>{text}<|END_RESPONSE|>" if text else "")
                + (f"<|START_ACTION|>{json.dumps(acts, indent=4)}<|END_ACTION|>" if acts else "")
            )
        case "quotes":
            written = [
                f'<|tool_call>call:find{{city:<|"|>{call["arguments"]["city"]}<|"|>,days:{call["arguments"]["days"]}}}'
                "<tool_call|>"
                for call in calls
            ]
            return (f"<|channel>thought\n{thought}<channel|>" if thought else "") + text + "".join(written) + "<turn|>"
        case _:
            blocks = [("<|content_thinking|>", thought)] if thought else []
            blocks += [("<|content_content|>", text)] if text else []
            blocks += [
                ("find<|content_tool_calls|>", json.dumps({"name": "find", "args": call["arguments"]}))
                for call in calls
            ]
            written = [f"<|message_model|>{head}{body}<|end_message|>" for head, body in blocks]
            return "".join(written).removeprefix("<|message_model|>")


def dumped(call: dict[str, Any]) -> str:
    return json.dumps(call["arguments"])


def told(parsed: ParsedReply) -> tuple[str, str, list[Any]]:
    assert all(call.ended for call in parsed.calls)
    calls = [(call.name, json.loads(call.arguments)) for call in parsed.calls]
    return parsed.text.strip(), parsed.reasoning.strip(), calls


def expected(text: str, template: dict[str, Any]) -> tuple[str, str, list[Any]]:
    """Return the reply as transformers parses it."""
    message = parse_response(text, template, prefix="")
    thought = next((message[name] for name in ("thinking", "reasoning_content") if name in message), "")
    functions = [call["function"] for call in message.get("tool_calls", ())]
    return message.get("content", ""), thought, [(one["name"], one["arguments"]) for one in functions]


@pytest.mark.parametrize("name", TEMPLATES)
def test_replies_are_parsed_like_transformers(name: str) -> None:
    chance = random.Random(name)
    markup = FormatMarkup(parse_response_template(TEMPLATES[name]))
    opening = markup.opening("<|message_model|>" if name == "blocks" else "<|start|>assistant")
    calls = 0
    for _ in range(30):
        text = reply(name, chance)
        wanted = expected(text, TEMPLATES[name])
        assert told(parse_pieces(ReplyParser(markup, TOOLS, opening=opening), [text])) == wanted, text
        assert told(parse_pieces(ReplyParser(markup, TOOLS, opening=opening), cut(text, chance))) == wanted, text
        calls += len(wanted[2])
    assert calls > 10


def test_patterns_become_markup() -> None:
    for pattern, written in {
        r"<\|tool_call>call:(?P<name>\w+)": ["<|tool_call>call:{name}"],
        r"<a>\s*<f=(?P<name>[^>]+?)>": ["<a>\n<f={name}>"],
        r"(?:^|<think>\s*)": ["<think>\n"],
        r"\n?</response>|</r>": ["\n</response>", "</r>"],
        r"to=(?P<name>\w+).*?<\|m\|>": ["to={name}{any}<|m|>"],
        r"(?:<h>)?[^<]*<c>": ["<h><c>", "<c>", "<h>{word}<c>"],
    }.items():
        assert list(markup_of(pattern)) == written


@pytest.mark.parametrize(
    "pattern",
    [
        *("(a+)+b", "(?=a)", "a*", "[ab]", "a{3}", r"(a)\1", ".*", "", "^", "(a", "a)", r"\bword", "[a", "+", "\\"),
        *(r"a.*?x.*?y", "(?:a|b|c|d|e)(?:a|b|c|d|e)", r"\{name}", "(?P<key>a)(?P<key>b)", "a" * (MAX_PATTERN + 1)),
    ],
)
def test_unsupported_patterns_are_refused(pattern: str) -> None:
    with pytest.raises(UnsupportedPattern):
        markup_of(pattern)


@pytest.mark.parametrize(
    "change",
    [
        {"version": 2},
        {"more": 1},
        {"fields": {}, "start_anchor": []},
        {"fields": {"tool_calls": {"open": "<a>", "content": "kv-lines"}}},
        {"fields": {"tool_calls": {"content": "json"}}},
        {"fields": {"tool_calls": {**CALLS, "transform": {"function": {"name": "{x.y}", "arguments": "{content}"}}}}},
        {"fields": {"tool_calls": {**CALLS, "content": "xml-inline", "transform": NAMED}}},
        {"fields": {"thinking": {"open": "<think>"}}},
        {"fields": {"thinking": {"open": "{name}", "close": "</think>"}}},
        {"fields": {"thinking": {**THOUGHT, "open_pattern": "(a+)+"}}},
        {"fields": {"image": THOUGHT}},
        {"fields": {"thinking": 5}},
    ],
)  # fmt: skip
def test_unsupported_templates_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedPattern):
        parse_response_template({**TEMPLATES["chatml"], **change})
