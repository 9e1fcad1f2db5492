"""How replies are read: as the model's own file states it, where that is understood, or else by its chat template."""

import copy
from pathlib import Path
from typing import Any

import pytest

from app.chat.conversation import Conversation, Tool
from app.chat.messages import Message
from app.chat.model_replies import ModelReplies
from app.chat.template import ChatTemplateRenderer
from app.text.tokenizer import Tokenizer
from tests.app.chat.reply_formats.spoken import heard_of

CONVERSATION = Conversation([Message("user", "Hello")], [Tool("now", {}, {"type": "object"})])
HERMES = '<think>a</think>b<tool_call>{"name": "now", "arguments": {}}</tool_call>'
STATED = {
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "tool_calls": {
            "open_pattern": r"\[call (?P<name>\w+)\]",
            "close": "[/call]",
            "content": "json",
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        }
    },
}


@pytest.mark.parametrize(
    ("stated", "text", "calls"),
    [
        (None, HERMES, ["now"]),
        ({"fields": 5}, HERMES, ["now"]),
        ({"start_anchor": "a", "fields": {"tool_calls": {"open_pattern": "(a+)+$"}}}, HERMES, ["now"]),
        (STATED, "<think>a</think>b[call now]{}[/call]", ["now"]),
        (STATED, "<think>a</think>b", []),
    ],
)  # fmt: skip
def test_what_the_model_states_counts_where_it_is_understood(
    tokenizer: Tokenizer,
    renderer: ChatTemplateRenderer,
    llama_cpp_models: Path,
    stated: Any,
    text: str,
    calls: list[str],
) -> None:
    model = copy.copy(tokenizer)
    model.chat_template = (llama_cpp_models / "templates" / "Qwen-Qwen3-0.6B.jinja").read_text(encoding="utf-8")
    model.response_template = stated
    replies = ModelReplies(model, renderer)
    told = heard_of(replies.parser(CONVERSATION, "<|im_start|>assistant\n"), text)
    assert (told.reasoning, told.text, [call.name for call in told.calls]) == ("a", "b", calls)
