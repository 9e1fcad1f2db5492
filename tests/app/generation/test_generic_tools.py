"""Tools for models whose chat template does not support them, with the real templates of such models."""

import asyncio
import copy
import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import jsonschema  # type: ignore[import-untyped]
import pytest

from app.generation.conversation import Conversation, Message, ToolCall, ToolUse
from app.generation.generic_tools import ANSWER_MARK, ToolSupport, generic_messages
from app.generation.grammars import GrammarCompiler, GrammarSource
from app.generation.model_format import ChatPrompt
from app.generation.prompt_encoder import PromptEncoder
from app.generation.remembered_replies import GeneratedReply
from app.generation.reply import ReplyReader
from app.generation.reply_token_cache import ReplyTokenCache
from app.generation.template import ChatTemplateRenderer
from app.text.tokenizer import Tokenizer
from tests.app.generation.test_forced_calls import (
    GENERIC,
    SCHEMAS,
    TOOLS,
    UNRENDERED,
    parse_reply,
    random_walk,
    vocabulary,
)
from tests.app.generation.tool_parsers.parsed_reply import ParsedReply, parse_pieces
from tests.app.generation.tool_parsers.test_second_turn import generated

TEMPLATES = sorted(GENERIC - {UNRENDERED})
SYSTEM, QUESTION = Message("system", "Be brief."), Message("user", "How is the weather in Rome?")
CALL = ToolCall("find", {"city": "San José", "nights": 2, "by": ["train"]}, "abcdef123")
CALLED = Message("assistant", "", None, (CALL,))
RESULT = Message("tool", "22 degrees", tool_call_id="abcdef123", name="find")
WRITTEN_CALL = (
    '<tool_call>\n{"name": "find", "arguments": {"city": "San José", "nights": 2, "by": ["train"]}}\n</tool_call>'
)
# Templates that render an earlier reply differently. The first four render reasoning at the start of a reply, and omit
# it later. The last one adds a space before replies.
WRITTEN_OTHERWISE = {
    "deepseek-ai-DeepSeek-R1-Distill-Llama-8B",
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B",
    "deepseek-ai-DeepSeek-V3.1",
    "llama-cpp-deepseek-r1",
    "llama-cpp-rwkv-world",
}


@pytest.fixture(scope="module")
def renderer() -> Iterator[ChatTemplateRenderer]:
    with ChatTemplateRenderer(seconds=100) as renderer:
        yield renderer


@pytest.fixture(params=TEMPLATES)
def template(llama_cpp_models: Path, request: pytest.FixtureRequest) -> str:
    return (llama_cpp_models / "templates" / f"{request.param}.jinja").read_text(encoding="utf-8")


def with_template(tokenizer: Tokenizer, template: str) -> Tokenizer:
    model = copy.copy(tokenizer)
    model.chat_template = template
    return model


def prompt_of(encoder: PromptEncoder, conversation: Conversation) -> ChatPrompt:
    ids, rendered = encoder.encode_conversation(conversation)
    return ChatPrompt(ids, encoder.format, conversation, rendered)


def random_reply(
    tokenizer: Tokenizer, prompt: ChatPrompt, chance: random.Random, asked: GrammarSource | None = None
) -> ParsedReply:
    """Return a reply of random tokens that its grammar allows."""
    source, _ = prompt.grammar(asked)
    assert source is not None
    grammar = prompt.with_thinking_budget(asyncio.run(GrammarCompiler(tokenizer).compile(source)))
    assert grammar is not None
    ids = random_walk(grammar, tokenizer, chance)
    return parse_reply(ReplyReader(tokenizer, (), prompt.new_parser()), ids, tokenizer)


def check_calls(parsed: ParsedReply, most: int = 1000) -> None:
    assert len(parsed.calls) <= most
    for call in parsed.calls:
        assert call.ended
        jsonschema.validate(json.loads(call.arguments), SCHEMAS[call.name])


def test_system_message_includes_tools(template: str, tokenizer: Tokenizer, renderer: ChatTemplateRenderer) -> None:
    encoder = PromptEncoder(with_template(tokenizer, template), renderer, ReplyTokenCache())
    assert encoder.format.tool_support is ToolSupport.GENERIC
    for messages in ([QUESTION], [SYSTEM, QUESTION], [SYSTEM, QUESTION, CALLED, RESULT]):
        _, rendered = encoder.encode_conversation(Conversation(messages, TOOLS))
        for tool in TOOLS:
            assert json.dumps(tool.definition, ensure_ascii=False) in rendered
        told = [SYSTEM.content] if SYSTEM in messages else []
        told += ["<tools>", QUESTION.content]
        told += [WRITTEN_CALL, "<tool_response>\n22 degrees\n</tool_response>"] if RESULT in messages else []
        places = [rendered.index(text) for text in told]
        assert places == sorted(places)
        assert rendered.count("<tools>") == 1


@pytest.mark.share(3)
def test_reply_is_an_answer_or_calls(template: str, renderer: ChatTemplateRenderer, chance: random.Random) -> None:
    tokenizer = vocabulary(template)
    encoder = PromptEncoder(tokenizer, renderer, ReplyTokenCache())
    for parallel, most in ((True, 1000), (None, 1)):
        conversation = Conversation([QUESTION], TOOLS, parallel_calls=parallel, thinking_budget=8)
        kinds = set()
        for _ in range(4):
            parsed = random_reply(tokenizer, prompt_of(encoder, conversation), chance)
            check_calls(parsed, most)
            assert not (parsed.text and parsed.calls)
            kinds.add(bool(parsed.calls))
        assert kinds


@pytest.mark.share(3)
def test_tool_choice_forces_or_forbids_calls(
    template: str, renderer: ChatTemplateRenderer, chance: random.Random
) -> None:
    tokenizer = vocabulary(template)
    encoder = PromptEncoder(tokenizer, renderer, ReplyTokenCache())
    now = [tool for tool in TOOLS if tool.name == "now"]
    named = Conversation([QUESTION], TOOLS, now, ToolUse.FORCED, thinking_budget=8)
    parsed = random_reply(tokenizer, prompt_of(encoder, named), chance)
    assert [(call.name, call.arguments, call.ended) for call in parsed.calls] == [("now", "{}", True)]
    assert parsed.text == ""
    for _ in range(3):
        none = Conversation([QUESTION], TOOLS, [], thinking_budget=8)
        assert random_reply(tokenizer, prompt_of(encoder, none), chance).calls == []
    same = [encoder.encode_conversation(Conversation([QUESTION], TOOLS, allowed))[0] for allowed in (None, now, [])]
    assert same[0] == same[1] == same[2]  # the prompt does not depend on the tool choice, so the KV cache stays valid


@pytest.mark.share(3)
def test_answers_follow_a_schema_unless_tools_are_called(
    template: str, renderer: ChatTemplateRenderer, chance: random.Random
) -> None:
    tokenizer = vocabulary(template)
    encoder = PromptEncoder(tokenizer, renderer, ReplyTokenCache())
    asked = GrammarSource.schema({"type": "integer", "minimum": 0, "maximum": 9})
    for _ in range(4):
        prompt = prompt_of(encoder, Conversation([QUESTION], TOOLS, thinking_budget=8))
        parsed = random_reply(tokenizer, prompt, chance, asked)
        check_calls(parsed)
        assert parsed.calls or parsed.text in list("0123456789")


REPLIES = [
    (WRITTEN_CALL, CALLED),
    (f"{WRITTEN_CALL}\n{WRITTEN_CALL}", Message("assistant", "", None, (CALL, CALL))),
    (f"{ANSWER_MARK}It is warm.\n\nVery.", Message("assistant", "It is warm.\n\nVery.")),
]


@pytest.mark.parametrize(("written", "said"), REPLIES, ids=["call", "calls", "answer"])
def test_second_turn_starts_with_ids_of_first_turn(
    llama_cpp_models: Path, tokenizer: Tokenizer, renderer: ChatTemplateRenderer, written: str, said: Message
) -> None:
    reused = []
    for name in TEMPLATES:
        source = (llama_cpp_models / "templates" / f"{name}.jinja").read_text(encoding="utf-8")
        encoder = PromptEncoder(model := with_template(tokenizer, source), renderer, ReplyTokenCache())
        conversation = Conversation([SYSTEM, QUESTION], TOOLS, parallel_calls=True)
        first = prompt_of(encoder, conversation)
        ids = generated(model, written, random.Random(written))
        encoder.remember(GeneratedReply(first.ids, ids, written, continues_text=False, stored=True))
        following: Sequence[Message] = [RESULT] if said.tool_calls else [Message("user", "Thanks.")]
        second = prompt_of(encoder, Conversation([SYSTEM, QUESTION, said, *following], TOOLS))
        assert written in second._rendered
        if second._rendered.startswith(first._rendered + written):
            assert second.ids[: len(first.ids) + len(ids)] == (*first.ids, *ids)
            parsed = parse_pieces(first.new_parser(), [written])
            assert parsed.text == said.content
            assert [json.loads(call.arguments) for call in parsed.calls] == [call.arguments for call in said.tool_calls]
            reused.append(name)
    assert set(TEMPLATES) - set(reused) == WRITTEN_OTHERWISE


def test_earlier_calls_are_rendered_without_current_tools(
    template: str, tokenizer: Tokenizer, renderer: ChatTemplateRenderer
) -> None:
    encoder = PromptEncoder(with_template(tokenizer, template), renderer, ReplyTokenCache())
    messages = [SYSTEM, QUESTION, CALLED, RESULT, Message("user", "Sum it up.")]
    prompt = prompt_of(encoder, Conversation(messages))
    _, rendered = encoder.encode_conversation(Conversation(messages))
    assert WRITTEN_CALL in rendered
    assert "22 degrees" in rendered
    assert ANSWER_MARK not in rendered
    assert prompt.grammar(None) == (None, False)


def test_user_text_contains_no_markup(renderer: ChatTemplateRenderer, llama_cpp_models: Path) -> None:
    source = (llama_cpp_models / "templates" / "microsoft-Phi-3.5-mini-instruct.jinja").read_text(encoding="utf-8")
    tokenizer = vocabulary(f"{source}{{# <tool_call> #}}")
    mark = tokenizer.control_tokens["<tool_call>"]
    encoder = PromptEncoder(tokenizer, renderer, ReplyTokenCache())

    def marks(*messages: Message) -> int:
        return encoder.encode_conversation(Conversation(messages, TOOLS))[0].count(mark)

    own = marks(QUESTION)
    assert own == 2  # both occurrences are in the instructions
    assert marks(Message("user", "<tool_call>")) == own
    assert marks(QUESTION, Message("tool", "<tool_call>")) == own
    assert marks(QUESTION, CALLED, RESULT) == own + 1


def test_continued_reply_is_an_answer(template: str, tokenizer: Tokenizer, renderer: ChatTemplateRenderer) -> None:
    encoder = PromptEncoder(with_template(tokenizer, template), renderer, ReplyTokenCache())
    prompt = prompt_of(encoder, Conversation([QUESTION], TOOLS, reply_prefix="It is"))
    assert prompt.grammar(None) == (None, False)
    assert parse_pieces(prompt.new_parser(), [" warm: <tool", "_call>"]).text == " warm: <tool_call>"
    _, rendered = encoder.encode_conversation(prompt._conversation)
    assert rendered.endswith(f"{ANSWER_MARK}It is")


def test_tool_results_join_the_next_user_message() -> None:
    messages = [QUESTION, CALLED, RESULT, replace_content(RESULT, "cold"), Message("user", "Well?")]
    *_, last = generic_messages(messages, [])
    assert last == Message(
        "user", "<tool_response>\n22 degrees\n</tool_response>\n<tool_response>\ncold\n</tool_response>\nWell?"
    )


def replace_content(message: Message, content: str) -> Message:
    return message.with_texts(lambda text: content if text == message.content else text)


def test_uncompilable_schemas_are_dropped_unless_calls_are_forced(
    tokenizer: Tokenizer, renderer: ChatTemplateRenderer
) -> None:
    encoder = PromptEncoder(tokenizer, renderer, ReplyTokenCache())
    loose = prompt_of(encoder, Conversation([QUESTION], TOOLS)).loose_grammar(None)
    assert loose is not None
    assert "nights" not in loose.text
    assert '{\\"name\\": \\"find\\"' in loose.text
    assert prompt_of(encoder, Conversation([QUESTION], TOOLS, use=ToolUse.FORCED)).loose_grammar(None) is None
