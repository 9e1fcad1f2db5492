"""Texts that a format's grammar allows are parsed as the calls that they contain, in every format."""

import asyncio
import json
import random
from collections.abc import Mapping
from dataclasses import replace

import llguidance
import numpy as np
import pytest

from app.generation.conversation import Json, Tool
from app.generation.grammars import GrammarCompiler, GrammarSource
from app.generation.tool_parsers.formats import CALLS, MESSAGES, THINKING
from app.generation.tool_parsers.reply_format import CallSyntax, MessageSyntax, ReplyFormat, ThinkingSyntax
from app.generation.tool_parsers.reply_grammar import answer_grammar, call_grammar, free_grammar, no_call_grammar
from app.generation.tool_parsers.reply_parser import FormatMarkup, ReplyParser
from app.grammars.compiling import Compiler
from app.grammars.frames import GrammarText
from app.text.tokenizer import Tokenizer
from tests.app.generation.tool_parsers.parsed_reply import parse_pieces, parsed

THINK = ThinkingSyntax(("<think>",), ("</think>",))
BY_NAME = {syntax.name: syntax for syntax in CALLS}
# Schemas of bounded values, so that random texts end.
PARAMETERS: Mapping[str, Json] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "enum": ["Rome", 'San "José"', "x\ny"]},
        "deep": {"type": "boolean"},
        "days": {"enum": [1, 2, 30]},
        "parts": {"type": "array", "items": {"$ref": "#/$defs/part"}, "minItems": 1, "maxItems": 2},
    },
    "required": ["city", "parts"],
    "additionalProperties": False,
    "$defs": {
        "part": {
            "type": "object",
            "properties": {"on": {"type": "boolean"}},
            "required": ["on"],
            "additionalProperties": False,
        }
    },
}
EMPTY: Mapping[str, Json] = {"type": "object", "properties": {}, "additionalProperties": False}
TOOLS = [Tool("get_weather", {}, PARAMETERS), Tool("now", {}, EMPTY)]
SCHEMAS: dict[str, Json] = {tool.name: tool.parameters for tool in TOOLS}


@pytest.fixture(scope="module")
def vocabulary() -> llguidance.LLTokenizer:
    return llguidance.LLTokenizer("byte")


def matcher(grammar: str, vocabulary: llguidance.LLTokenizer) -> llguidance.LLMatcher:
    return Compiler(vocabulary, vocabulary).compile(GrammarText("lark", grammar))


def walk(made: llguidance.LLMatcher, chance: random.Random) -> str:
    """Return a random text that the grammar allows."""
    said = bytearray()
    while not made.is_stopped():
        mask = int.from_bytes(made.compute_bitmask(), "little")
        allowed = [token for token in range(256) if mask >> token & 1]
        if made.is_accepting() and (not allowed or chance.random() < 0.3):
            break
        # Prefer characters that end a part: they are as likely as all other characters together.
        token = chance.choice(chance.choice([allowed, [one for one in allowed if chr(one) in '"<}'] or allowed]))
        assert made.consume_token(token)
        said.append(token)
        assert len(said) < 5000
    return said.decode()


def format_with(syntax: CallSyntax) -> ReplyFormat:
    messages = MESSAGES[0] if syntax.name == "harmony" else MessageSyntax("", ())
    return ReplyFormat(THINKING[0] if syntax.name == "harmony" else THINK, syntax, messages)


@pytest.mark.share(8)
@pytest.mark.parametrize("syntax", CALLS, ids=lambda syntax: syntax.name)
def test_allowed_texts_are_parsed_as_calls(syntax: CallSyntax, vocabulary: llguidance.LLTokenizer) -> None:
    chance = random.Random(f"walk {syntax.name}")
    written = format_with(syntax)
    opening = "<|start|>assistant" if syntax.name == "harmony" else ""
    several = 0
    for parallel in (False, True, True):
        grammar = call_grammar(written, opening, TOOLS, {}, parallel=parallel, thinks=False)
        for _ in range(3):
            text = walk(matcher(grammar, vocabulary), chance)
            told = parsed(text, written, SCHEMAS, opening=opening)
            assert told.text.strip() == "", text
            assert told.calls, text
            assert all(call.ended for call in told.calls), text
            for call in told.calls:
                check(call.name, json.loads(call.arguments))
            assert parallel or len(told.calls) == 1
            several += len(told.calls) > 1
    assert several or syntax.name == "llama"


def check(name: str, arguments: dict[str, Json]) -> None:
    if name == "now":
        assert arguments == {}
        return
    assert arguments.keys() <= {"city", "deep", "days", "parts"}
    assert arguments["city"] in ("Rome", 'San "José"', "x\ny")
    assert arguments.get("deep", True) in (True, False)
    assert arguments.get("days", 1) in (1, 2, 30)
    assert arguments["parts"] in [
        [{"on": a}, {"on": b}][:n] for a in (True, False) for b in (True, False) for n in (1, 2)
    ]


def test_reasoning_is_allowed_only_at_the_start(vocabulary: llguidance.LLTokenizer) -> None:
    hermes = format_with(BY_NAME["hermes"])
    call = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    for opening, thinks, text in (
        ("<think>", True, f"Well,\n<tool_call> no.\n</think>\n\n{call}"),
        ("", True, f"<think>\nhm</think>{call}"),
        ("", True, call),
        ("", False, call),
    ):
        made = matcher(call_grammar(hermes, opening, TOOLS, {}, parallel=True, thinks=thinks), vocabulary)
        assert made.consume_tokens(list(text.encode())), text
        assert made.is_accepting()
    made = matcher(call_grammar(hermes, "", TOOLS, {}, parallel=True, thinks=False), vocabulary)
    assert not made.consume_tokens(list(b"<think>"))


def test_text_argument_may_contain_any_text(vocabulary: llguidance.LLTokenizer) -> None:
    tool = Tool("say", {}, {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]})
    coder = format_with(BY_NAME["qwen-coder"])
    text = '<tool_call>\n<function=say>\n<parameter=text>\nif a < b: "é"\n\n</parameter>\n</function>\n</tool_call>'
    made = matcher(call_grammar(coder, "", [tool], {}, parallel=False, thinks=False), vocabulary)
    assert made.consume_tokens(list(text.encode()))
    assert made.is_accepting()
    told = parse_pieces(ReplyParser(FormatMarkup(coder), {"say": tool.parameters}), [text])
    assert json.loads(told.calls[0].arguments) == {"text": 'if a < b: "é"\n'}


def test_answer_follows_reasoning(vocabulary: llguidance.LLTokenizer) -> None:
    written = ReplyFormat(THINKING[0], None, MESSAGES[0])
    opening, answer = "<|start|>assistant", '%json {"type": "boolean"}'
    thought = "<|channel|>analysis<|message|>Well.<|end|>"
    for text in (f"{thought}<|start|>assistant<|channel|>final<|message|>true", "<|channel|>final<|message|>true"):
        made = matcher(answer_grammar(written, opening, [], {}, answer, parallel=True, thinks=True), vocabulary)
        assert made.consume_tokens(list(text.encode())), text
        assert made.is_accepting()
        told = parsed(text, written, {}, opening=opening)
        assert told.text == "true"
        assert told.reasoning == ("Well." if "Well" in text else "")


def test_calls_may_replace_an_answer(vocabulary: llguidance.LLTokenizer) -> None:
    hermes, answer = format_with(BY_NAME["hermes"]), '%json {"type": "boolean"}'
    call = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    for opening, text in (
        ("", "true"),
        ("", call),
        ("", f"<think>So</think>\n\n{call}\n{call}"),
        ("<think>", "</think>true"),
    ):
        made = matcher(answer_grammar(hermes, opening, TOOLS, {}, answer, parallel=True, thinks=True), vocabulary)
        assert made.consume_tokens(list(text.encode())), text
        assert made.is_accepting()
    for text in ("I", f"true{call}", '<tool_call>\n{"name": "other'):
        made = matcher(answer_grammar(hermes, "", TOOLS, {}, answer, parallel=True, thinks=True), vocabulary)
        assert not made.consume_tokens(list(text.encode())), text


@pytest.mark.share(8)
@pytest.mark.parametrize("syntax", CALLS, ids=lambda syntax: syntax.name)
def test_started_call_must_be_valid(syntax: CallSyntax, vocabulary: llguidance.LLTokenizer) -> None:
    chance = random.Random(f"free {syntax.name}")
    written = format_with(syntax)
    grammar = free_grammar(written, "", TOOLS, {}, parallel=True, thinks=False)
    assert grammar is not None
    forced = walk(matcher(call_grammar(written, "", TOOLS, {}, parallel=True, thinks=False), vocabulary), chance)
    for text in (forced, f"I look, é < 2.\n{forced}", "Nothing <to call>", ""):
        made = matcher(grammar, vocabulary)
        assert made.consume_tokens(list(text.encode())), text
        assert made.is_accepting(), text
    begun, _, _ = forced.partition("get_weather" if "get_weather" in forced else "now")
    assert not matcher(grammar, vocabulary).consume_tokens(list(f"{begun}unknown".encode()))


def test_ambiguous_format_has_no_free_grammar() -> None:
    llama, functionary = (replace(BY_NAME[name], calls=BY_NAME[name].calls[-1:]) for name in ("llama", "functionary"))
    for written, control in (
        (format_with(llama), {}),
        (ReplyFormat(None, functionary, next(one for one in MESSAGES if ">>>all\n" in one.silent)), {}),
        (format_with(BY_NAME["harmony"]), {"<|start|>": 3, "<|channel|>": 4}),
    ):
        assert free_grammar(written, "", TOOLS, control, parallel=True, thinks=False) is None


def test_schema_is_included_once() -> None:
    grammar = call_grammar(format_with(BY_NAME["hermes"]), "", TOOLS, {}, parallel=True, thinks=True)
    assert grammar.count("San ") == 1


def test_no_call_grammar_excludes_calls(tokenizer: Tokenizer) -> None:
    mark = "<repo_name>"
    control = {mark: tokenizer.control_tokens[mark]}
    written = ReplyFormat(None, CallSyntax("control", (f"{mark}{{objects}}</call>",)))
    grammar = no_call_grammar(written, control)
    constraint = asyncio.run(GrammarCompiler(tokenizer).compile(GrammarSource("lark", grammar or ""))).start(jumps=True)
    for token_id in tokenizer.encode("Well <file_sep> é\n<b", parse_special=True):
        assert constraint.accept(token_id) == ()
    words = np.zeros(-(-tokenizer.vocab_size // 32), np.int32)
    assert constraint.fill(words)
    allowed = np.unpackbits(words.view(np.uint8), bitorder="little")[: tokenizer.vocab_size]
    assert np.flatnonzero(allowed == 0).tolist() == [control[mark]]
    assert no_call_grammar(written, {}) is None
    assert no_call_grammar(format_with(BY_NAME["harmony"]), {"<|start|>": 3}) is None


def test_free_grammar_allows_all_other_tokens(tokenizer: Tokenizer) -> None:
    """The vocabulary has no `<tool_call>`, so the test uses another control token."""
    mark = "<repo_name>"
    control = {mark: tokenizer.control_tokens[mark]}
    syntax = CallSyntax("control", (f"{mark}{{objects}}</call>",))
    grammar = free_grammar(ReplyFormat(None, syntax), "", TOOLS, control, parallel=True, thinks=False)
    constraint = asyncio.run(GrammarCompiler(tokenizer).compile(GrammarSource("lark", grammar or ""))).start(jumps=True)
    text = tokenizer.encode("Well <file_sep> é\n<b", parse_special=True)
    for token_id in text:
        assert constraint.accept(token_id) == ()
    forced = constraint.accept(control[mark])
    assert b"".join(map(tokenizer.token_bytes, forced)).startswith(b'{"name": "')
    words = np.zeros(-(-tokenizer.vocab_size // 32), np.int32)
    assert constraint.fill(words)
    assert 0 < np.unpackbits(words.view(np.uint8)).sum() < 20


def test_control_tokens_are_written_as_ids() -> None:
    control = {"<tool_call>": 7, "</think>": 8, "</tool_call>": 9}
    grammar = call_grammar(format_with(BY_NAME["hermes"]), "<think>", TOOLS, control, parallel=False, thinks=True)
    assert "<[7]>" in grammar
    assert "<[8]>" in grammar
    assert 'tool_call>"' not in grammar
