"""Default template variables, with the chat templates that llama.cpp collects."""

import copy
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import pytest

from app.errors import TemplateError
from app.generation.conversation import Conversation, Json, Message
from app.generation.prompt_encoder import PromptEncoder
from app.generation.reply_token_cache import ReplyTokenCache
from app.generation.template import ChatTemplateRenderer
from app.text.tokenizer import Tokenizer

USER = [Message("user", "What is today?")]
MORNING, EVENING = datetime(2026, 3, 4, 9, 5, 7), datetime(2026, 3, 4, 21, 30)


class Clock:
    def __init__(self) -> None:
        self.now = MORNING


@pytest.fixture(scope="module")
def clock() -> Clock:
    return Clock()


@pytest.fixture(scope="module")
def timed(clock: Clock) -> Iterator[ChatTemplateRenderer]:
    with ChatTemplateRenderer(seconds=100, clock=lambda: clock.now) as renderer:
        yield renderer


def prompt(template: Path, tokenizer: Tokenizer, renderer: ChatTemplateRenderer, **variables: Json) -> str:
    model = copy.copy(tokenizer)
    model.chat_template = template.read_text(encoding="utf-8")
    encoder = PromptEncoder(model, renderer, ReplyTokenCache())
    return encoder.encode_conversation(Conversation(USER, variables=variables))[1]


@pytest.mark.parametrize(
    ("name", "thinks", "answers"),
    [
        ("deepseek-ai-DeepSeek-R1-Distill-Qwen-32B", "<think>\n", "<think>\n</think>"),
        ("Qwen-QwQ-32B", "<think>\n", "<think>\n</think>"),
        ("CohereForAI-c4ai-command-r7b-12-2024-tool_use", "<|CHATBOT_TOKEN|>", "<|START_THINKING|><|END_THINKING|>"),
        ("google-gemma-4-31B-it", "<|turn>model\n", "<|channel>thought\n<channel|>"),
        ("Qwen-Qwen3-0.6B", "<|im_start|>assistant\n", "<think>\n\n</think>\n\n"),
    ],
)
def test_thinking_is_enabled_by_default(
    llama_cpp_models: Path, tokenizer: Tokenizer, timed: ChatTemplateRenderer, name: str, thinks: str, answers: str
) -> None:
    template = llama_cpp_models / "templates" / f"{name}.jinja"
    silent = prompt(template, tokenizer, timed)
    assert silent.endswith(thinks)
    assert silent == prompt(template, tokenizer, timed, enable_thinking=True)
    assert prompt(template, tokenizer, timed, enable_thinking=False).endswith(answers)


@pytest.mark.parametrize(
    ("name", "day"),
    [
        ("meta-llama-Llama-3.1-8B-Instruct", "Today Date: 04 Mar 2026"),
        ("meta-llama-Llama-3.3-70B-Instruct", "Today Date: 04 Mar 2026"),
        ("fireworks-ai-llama-3-firefunction-v2", "Today is Mar 04 2026."),
    ],
)
def test_templates_get_the_date(
    llama_cpp_models: Path, tokenizer: Tokenizer, timed: ChatTemplateRenderer, name: str, day: str
) -> None:
    assert day in prompt(llama_cpp_models / "templates" / f"{name}.jinja", tokenizer, timed)


def test_request_overrides_the_date(llama_cpp_models: Path, tokenizer: Tokenizer, timed: ChatTemplateRenderer) -> None:
    template = llama_cpp_models / "templates" / "meta-llama-Llama-3.1-8B-Instruct.jinja"
    assert "Today Date: 1 May 1999" in prompt(template, tokenizer, timed, date_string="1 May 1999")


def test_prompts_do_not_depend_on_the_time(
    llama_cpp_models: Path, tokenizer: Tokenizer, timed: ChatTemplateRenderer, clock: Clock
) -> None:
    def prompts(now: datetime) -> dict[str, str]:
        clock.now = now
        found = {}
        for template in sorted((llama_cpp_models / "templates").glob("*.jinja")):
            try:
                found[template.name] = prompt(template, tokenizer, timed)
            except TemplateError:  # some templates refuse a conversation without tools
                found[template.name] = ""
        return found

    morning = prompts(MORNING)
    assert sum(map(bool, morning.values())) > 60
    assert morning == prompts(EVENING)
