"""The format of replies: from the model's response template if supported, else detected from its chat template."""

import asyncio
import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from app.generation.conversation import Conversation, Message, Tool, ToolUse
from app.generation.grammars import GrammarCompiler
from app.generation.model_format import ModelFormat
from app.generation.template import ChatTemplateRenderer
from app.text.tokenizer import Tokenizer
from engine.grammar import Grammar
from tests.app.generation.tool_parsers.parsed_reply import parse_pieces

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
def test_response_template_overrides_detected_format(
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
    replies = ModelFormat(model, renderer)
    told = parse_pieces(replies.parser(CONVERSATION, "<|im_start|>assistant\n"), text)
    assert (told.reasoning, told.text, [call.name for call in told.calls]) == ("a", "b", calls)


def lets_through(grammar: Grammar, tokenizer: Tokenizer, ids: Sequence[int]) -> bool:
    constraint = grammar.start(jumps=False)
    for token_id in ids:
        words = np.zeros(-(-tokenizer.vocab_size // 32), np.int32)
        assert constraint.fill(words)
        if not np.unpackbits(words.view(np.uint8), bitorder="little")[token_id]:
            return False
        constraint.accept(token_id)
    return True


@pytest.mark.parametrize(
    ("template", "thought"),
    [("openai-gpt-oss-120b", "<|channel|>analysis<|message|><"), ("Qwen-Qwen3-0.6B", "<think><")],
)
@pytest.mark.parametrize("budget", [None, 1, 0])
def test_grammar_excludes_reasoning_when_thinking_is_off(
    tokenizer: Tokenizer,
    renderer: ChatTemplateRenderer,
    llama_cpp_models: Path,
    template: str,
    thought: str,
    budget: int | None,
) -> None:
    model = copy.copy(tokenizer)
    model.chat_template = (llama_cpp_models / "templates" / f"{template}.jinja").read_text(encoding="utf-8")
    forced = Conversation([Message("user", "Hi")], CONVERSATION.tools, use=ToolUse.FORCED, thinking_budget=budget)
    source, _ = ModelFormat(model, renderer).grammar(forced, "assistant", None)
    assert source is not None
    grammar = asyncio.run(GrammarCompiler(model).compile(source))
    assert lets_through(grammar, model, model.encode(thought)) is (budget != 0)
