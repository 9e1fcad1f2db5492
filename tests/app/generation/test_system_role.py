"""System messages under chat templates that refuse or drop them."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from app.generation.conversation import Conversation, Message, merge_system_messages
from app.generation.prompt_encoder import PromptEncoder
from app.generation.reply_token_cache import ReplyTokenCache
from app.generation.template import ChatTemplateRenderer
from app.text.tokenizer import Tokenizer
from tests.app.generation.test_generic_tools import with_template

SYSTEM, OTHER = Message("system", "Be brief."), Message("system", "Be kind.")
ASKED, SAID = Message("user", "Hello"), Message("assistant", "Hi")


@pytest.mark.parametrize(
    ("messages", "told"),
    [
        ([ASKED, SAID], [ASKED, SAID]),
        ([SYSTEM, ASKED, SAID], [Message("user", "Be brief.\n\nHello"), SAID]),
        ([SYSTEM, OTHER, ASKED], [Message("user", "Be brief.\n\nBe kind.\n\nHello")]),
        ([ASKED, SAID, OTHER, ASKED], [ASKED, SAID, Message("user", "Be kind.\n\nHello")]),
        ([SYSTEM], [Message("user", "Be brief.")]),
    ],
)
def test_system_messages_join_the_next_user_message(messages: Sequence[Message], told: Sequence[Message]) -> None:
    assert [*merge_system_messages(messages)] == told


@pytest.mark.parametrize("dropped", [False, True])
def test_template_without_system_role_gets_system_text_in_the_user_message(
    tokenizer: Tokenizer, renderer: ChatTemplateRenderer, llama_cpp_models: Path, dropped: bool
) -> None:
    source = (llama_cpp_models / "templates" / "google-gemma-2-2b-it.jinja").read_text(encoding="utf-8")
    if dropped:
        source = "{% for m in messages if m.role != 'system' %}<start_of_turn>{{ m.role }}\n{{ m.content }}{% endfor %}"
    encoder = PromptEncoder(with_template(tokenizer, source), renderer, ReplyTokenCache())
    _, rendered = encoder.encode_conversation(Conversation([SYSTEM, ASKED]))
    assert "<start_of_turn>user\nBe brief.\n\nHello" in rendered


def test_template_with_system_role_gets_system_messages(tokenizer: Tokenizer, renderer: ChatTemplateRenderer) -> None:
    _, rendered = PromptEncoder(tokenizer, renderer, ReplyTokenCache()).encode_conversation(
        Conversation([SYSTEM, ASKED])
    )
    assert "<|im_start|>system\nBe brief.<|im_end|>" in rendered
    assert "<|im_start|>user\nHello<|im_end|>" in rendered
