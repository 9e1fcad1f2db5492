"""The prompt of an agent's second turn starts with the ids of its first turn, including reasoning and calls.

The chat template must render reasoning and calls as they were generated.
"""

import copy
import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from app.generation.conversation import Conversation, Json, Message, Tool, ToolCall
from app.generation.events import ToolCallEnd
from app.generation.prompt_encoder import PromptEncoder
from app.generation.recent_prompts import common_prefix_len
from app.generation.remembered_replies import GeneratedReply
from app.generation.reply_token_cache import ReplyTokenCache
from app.generation.template import ChatTemplateRenderer
from app.text.tokenizer import Tokenizer
from tests.app.generation.tool_parsers.parsed_reply import cut, parse_pieces

PARAMETERS: dict[str, Json] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "description": "A city"},
        "days": {"type": "integer", "description": "How many"},
    },
    "required": ["city"],
}
DEFINITION: dict[str, Json] = {"name": "get_weather", "description": "The weather", "parameters": PARAMETERS}
TOOL = Tool("get_weather", {"type": "function", "function": DEFINITION}, PARAMETERS)
QUESTION = Message("user", "How is the weather in Rome?")
ANSWERS = [
    Message(
        "assistant",
        "",
        "They ask for the weather.",
        (ToolCall("get_weather", {"city": "Rome", "days": 2}, "abcdef123"),),
    ),
    Message("assistant", "", None, (ToolCall("get_weather", {"city": "Rome", "days": 2}, "abcdef123"),)),
]
RESULT = Message("tool", "22 degrees", tool_call_id="abcdef123", name="get_weather")
TEMPLATES = (
    "Bielik-11B-v3.0-Instruct", "ByteDance-Seed-OSS", "GLM-4.7-Flash", "MiniMax-M2",
    "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
    "Qwen-Qwen2.5-7B-Instruct", "Qwen-Qwen3-0.6B", "Qwen3-Coder", "Qwen3.5-4B", "deepseek-ai-DeepSeek-V3.2",
    "google-gemma-4-31B-it", "ibm-granite-granite-4.0", "meta-llama-Llama-3.1-8B-Instruct", "openai-gpt-oss-120b",
    "mistralai-Ministral-3-14B-Reasoning-2512", "unsloth-mistral-Devstral-Small-2507", "openbmb-MiniCPM5-1B",
    "Mistral-Small-3.2-24B-Instruct-2506", "moonshotai-Kimi-K2", "LFM2.5-8B-A1B", "upstage-Solar-Open-100B",
)  # fmt: skip


@pytest.fixture(scope="module")
def renderer() -> Iterator[ChatTemplateRenderer]:
    with ChatTemplateRenderer(seconds=100) as renderer:
        yield renderer


def asked(messages: Sequence[Message]) -> Conversation:
    return Conversation(messages, [TOOL], variables={"enable_thinking": True})


def generated(tokenizer: Tokenizer, text: str, chance: random.Random) -> list[int]:
    """Encode text to different tokens than the tokenizer does, as a model may generate it."""
    ids: list[int] = []
    for part in tokenizer.split(text):
        pieces = [part] if isinstance(part, int) else list(cut(part, chance))
        for piece in pieces:
            ids += [piece] if isinstance(piece, int) else tokenizer.encode(piece)
    return ids


def written(encoder: PromptEncoder, messages: Sequence[Message], answer: Message) -> str:
    """Return the start of the rendered answer that is the same with and without a tool result after it."""
    first, *others = (
        encoder.encode_conversation(asked(told))[1]
        for told in ([*messages], [*messages, answer], [*messages, answer, RESULT])
    )
    if not all(other.startswith(first) for other in others):
        return ""
    answered, resulted = (other[len(first) :] for other in others)
    return answered[: common_prefix_len(answered.encode(), resulted.encode())]


@pytest.mark.share(10)
@pytest.mark.parametrize("name", TEMPLATES)
def test_second_turn_starts_with_ids_of_first_turn(
    llama_cpp_models: Path, tokenizer: Tokenizer, renderer: ChatTemplateRenderer, name: str
) -> None:
    chance = random.Random(name)
    model = copy.copy(tokenizer)
    model.chat_template = (llama_cpp_models / "templates" / f"{name}.jinja").read_text(encoding="utf-8")
    reused = 0
    for answer in ANSWERS:
        encoder = PromptEncoder(model, renderer, ReplyTokenCache())
        reply = written(encoder, [QUESTION], answer)
        conversation = asked([QUESTION])
        prompt_ids, rendered = encoder.encode_conversation(conversation)
        heard = encoder.format.parser(conversation, rendered).push(reply)
        ends = [one.end for one in heard if isinstance(one.event, ToolCallEnd)]
        if not ends:
            continue  # the template does not render the call
        reply = reply[: ends[-1]]
        parsed = parse_pieces(encoder.format.parser(conversation, rendered), [reply])
        ids = generated(model, reply, chance)
        encoder.remember(GeneratedReply(prompt_ids, ids, reply, continues_text=False, stored=True))
        call = parsed.calls[0]
        said = Message(
            "assistant",
            parsed.text.strip(),
            parsed.reasoning or None,
            (ToolCall.parse(call.name, call.arguments, answer.tool_calls[0].id),),
        )
        assert json.loads(call.arguments) == answer.tool_calls[0].arguments
        second, _ = encoder.encode_conversation(asked([QUESTION, said, RESULT]))
        assert second[: len(prompt_ids) + len(ids)] == (*prompt_ids, *ids)
        reused += 1
    assert reused
