"""Random tokens that a grammar of forced calls allows form valid calls, for real templates whose tags are tokens."""

import asyncio
import json
import random
import re
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import numpy as np
import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Library

from app.errors import ToolsUnsupported
from app.generation.conversation import Conversation, Message, Tool, ToolUse
from app.generation.grammars import GrammarCompiler
from app.generation.prompt_encoder import PromptEncoder
from app.generation.reply import ReplyReader
from app.generation.reply_token_cache import ReplyTokenCache
from app.generation.template import ChatTemplateRenderer
from app.generation.tool_parsers.reply_parser import ParsedEvent
from app.text.json_tokenizer import from_json
from app.text.tokenizer import Tokenizer
from engine.grammar import Grammar
from tests.app.generation.tool_parsers.parsed_reply import ParsedReply

TAG = re.compile(r"<[|｜]?[\w/:▁ -]{2,40}[|｜]?>|\[/?[A-Z_]{3,}\]")
END = "<|the_end|>"
SEVERAL_MESSAGES = ("<|flush|>", "<|calls|>")  # with these tokens, `<|end|>` does not end a reply
# length of the longest end mark in tokens, if the mark is not a token itself
LONGEST_END = len("[BEGIN FINAL RESPONSE]")
UNRENDERED = "fireworks-ai-llama-3-firefunction-v2"  # its template needs variables that no chat has
HOW = {"description": "How"}  # some templates fail without a description
SCHEMAS: dict[str, dict[str, Any]] = {
    "find": {
        "type": "object",
        "properties": {
            "city": {"type": "string", "enum": ["Rome", "San José", 'a "b"', "<x>"], "description": "Where"},
            "nights": {"type": "integer", "minimum": 1, "maximum": 30, "description": "How many"},
            "by": {"type": "array", "items": {"enum": ["train", "ship"]}, "minItems": 1, "maxItems": 2} | HOW,
        },
        "required": ["city", "nights", "by"],
        "additionalProperties": False,
    },
    "now": {"type": "object", "properties": {}, "additionalProperties": False},
}
TOOLS = [
    Tool(name, {"type": "function", "function": {"name": name, "description": name, "parameters": schema}}, schema)
    for name, schema in SCHEMAS.items()
]
GENERIC = {  # templates that do not support tools, or do not show the format of calls
    "HuggingFaceTB-SmolLM3-3B", "LFM2-8B-A1B", "LFM2.5-Instruct", "deepseek-ai-DeepSeek-R1-Distill-Llama-8B",
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B", "deepseek-ai-DeepSeek-V3.1", "fireworks-ai-llama-3-firefunction-v2",
    "google-gemma-2-2b-it", "llama-cpp-deepseek-r1", "llama-cpp-rwkv-world", "microsoft-Phi-3.5-mini-instruct",
}  # fmt: skip


def vocabulary(template: str) -> Tokenizer:
    """Return a vocabulary of single bytes and all tags in a template.

    Every second tag is a control token, which is hidden in text.
    """
    letters = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    library = Library(models.BPE(letters, []))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    tags = sorted({END, *SEVERAL_MESSAGES, *TAG.findall(template)})
    library.add_tokens([AddedToken(tag, special=number % 2 == 0 or tag == END) for number, tag in enumerate(tags)])
    tokenizer = from_json(library.to_str().encode(), {"bos_token": END, "eos_token": END, "chat_template": template})
    assert len(tokenizer.control_tokens) > 1
    return tokenizer


def random_walk(grammar: Grammar, tokenizer: Tokenizer, chance: random.Random) -> list[int]:
    """Return random tokens that a grammar allows."""
    constraint, ids = grammar.start(jumps=True), list[int]()
    while not constraint.ended and len(ids) < 5000:
        words = np.zeros(-(-tokenizer.vocab_size // 32), np.int32)
        assert constraint.fill(words)
        allowed = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))
        # prefers marks: they are as likely as all other tokens together
        marks = [token_id for token_id in allowed if token_id >= 256]
        token_id = int(chance.choice(chance.choice([allowed, marks or allowed])))
        ids += [token_id, *constraint.accept(token_id)]
        if ids[-1] in tokenizer.end_of_generation_ids:
            return ids
    return ids


def parse_reply(reader: ReplyReader, ids: list[int], tokenizer: Tokenizer) -> ParsedReply:
    events = [
        event
        for token_id in ids
        for event in reader.push(token_id, None, hidden=token_id in tokenizer.end_of_generation_ids)
    ]
    parsed = ParsedReply()
    for event in (*events, *reader.finish()):
        parsed.add(ParsedEvent(event, 0, 0))
    return parsed


@pytest.mark.parametrize("parallel", [False, True])
def test_forced_grammar_only_allows_valid_calls(
    llama_cpp_models: Path,
    renderer: ChatTemplateRenderer,
    request: pytest.FixtureRequest,
    chance: random.Random,
    parallel: bool,
) -> None:
    templates = {path.stem: path for path in sorted((llama_cpp_models / "templates").glob("*.jinja"))}
    assert templates.keys() > GENERIC
    every = request.config.getoption("--every-case")
    for name in templates if every else chance.sample([*templates], 4):
        tokenizer = vocabulary(templates[name].read_text(encoding="utf-8"))
        encoder = PromptEncoder(tokenizer, renderer, ReplyTokenCache(), generic_tools=False)
        conversation = Conversation(
            [Message("user", "Hello")],
            TOOLS,
            use=ToolUse.FORCED,
            parallel_calls=parallel,
            thinking_budget=8,
            variables={"enable_thinking": True},
        )
        if name in GENERIC:
            with pytest.raises(ToolsUnsupported):
                encoder.encode_conversation(conversation)
            encoder = PromptEncoder(tokenizer, renderer, ReplyTokenCache())
        if name != UNRENDERED:
            check_tools(tokenizer, encoder, conversation, name, chance)


def check_tools(
    tokenizer: Tokenizer, encoder: PromptEncoder, conversation: Conversation, name: str, chance: random.Random
) -> None:
    _, rendered = encoder.encode_conversation(conversation)
    source, _ = encoder.format.grammar(conversation, rendered, None)
    assert source is not None
    grammar = asyncio.run(GrammarCompiler(tokenizer).compile(source))
    limited = encoder.format.with_thinking_budget(conversation, rendered, grammar)
    assert limited is not None
    ids = random_walk(limited, tokenizer, chance)
    reader = ReplyReader(tokenizer, (), encoder.format.parser(conversation, rendered))
    parsed = parse_reply(reader, ids, tokenizer)
    details = (name, [tokenizer.token_bytes(token_id, show_control=True) for token_id in ids])
    assert reader.reasoning_tokens <= 8 + 3 + LONGEST_END, details  # the end may wait for the rest of a character
    assert not parsed.text.strip(), details
    assert parsed.calls, details
    assert conversation.parallel_calls or len(parsed.calls) == 1, details
    for call in parsed.calls:
        assert call.ended, details
        jsonschema.validate(json.loads(call.arguments), SCHEMAS[call.name])
