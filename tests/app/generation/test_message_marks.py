"""Message marks are at the ends of the first message and of questions, with real vocabularies and templates."""

import copy
from collections.abc import Callable
from pathlib import Path

import pytest

from app.generation.conversation import Conversation, Message
from app.generation.message_marks import message_marks
from app.generation.prompt_encoder import PromptEncoder
from app.generation.reply_token_cache import ReplyTokenCache
from app.generation.template import ChatTemplateRenderer
from app.text.tokenizer import Tokenizer
from engine.request import message_ends

# keys: vocabularies; values: templates
TEMPLATES = {
    "qwen2": "Qwen-Qwen3-0.6B",
    "llama-bpe": "meta-llama-Llama-3.1-8B-Instruct",
    "phi-3": "microsoft-Phi-3.5-mini-instruct",
}
SYSTEM = Message("system", "Say ok. <|im_end|>")
FIRST, SECOND = Message("user", " What is ok? "), Message("user", "ok")
CHAT = (SYSTEM, FIRST, Message("assistant", "ok is short"), SECOND, Message("assistant", "ok"))


@pytest.fixture(params=TEMPLATES)
def encoder_and_tokenizer(
    request: pytest.FixtureRequest,
    llama_cpp_models: Path,
    vocabularies: Callable[[str], Tokenizer],
    renderer: ChatTemplateRenderer,
) -> tuple[PromptEncoder, Tokenizer]:
    tokenizer = copy.copy(vocabularies(request.param))
    path = llama_cpp_models / "templates" / f"{TEMPLATES[request.param]}.jinja"
    tokenizer.chat_template = path.read_text("utf-8")
    return PromptEncoder(tokenizer, renderer, ReplyTokenCache()), tokenizer


def test_marks_are_at_the_ends_of_the_first_message_and_of_questions(
    encoder_and_tokenizer: tuple[PromptEncoder, Tokenizer],
) -> None:
    encoder, tokenizer = encoder_and_tokenizer
    messages = (*CHAT, Message("user", "Why?"), Message("assistant", "So."), Message("tool", "ok"))
    ids, rendered = encoder.encode_conversation(Conversation(messages))
    marks = message_marks(messages, rendered, ids, tokenizer)
    ends = [tokenizer.decode(ids[: mark - 1]).rstrip() for mark in marks]
    assert {ids[mark - 1] for mark in marks} <= tokenizer.end_of_generation_ids
    assert len(marks) == 4
    for end, text in zip(ends[1:], ("What is ok?", "ok", "Why?"), strict=True):
        assert end.endswith(text)
    assert "What" not in ends[0]
    assert marks[-1] < message_ends(ids, tokenizer.end_of_generation_ids)[-1]


def test_other_text_than_that_of_the_prompt_marks_all_messages(
    encoder_and_tokenizer: tuple[PromptEncoder, Tokenizer],
) -> None:
    encoder, tokenizer = encoder_and_tokenizer
    ids, _ = encoder.encode_conversation(Conversation(CHAT))
    marks = message_marks(CHAT, "another text", ids, tokenizer)
    assert marks == message_ends(ids, tokenizer.end_of_generation_ids)
    assert len(marks) >= 4
