"""What tests of the chat service and of the server share: the default model's tokenizer, and a template child."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from app.chat.template import ChatTemplateRenderer
from app.text.gguf_tokenizer import from_gguf
from app.text.tokenizer import Tokenizer
from quant.gguf import GGUFFile


@pytest.fixture(scope="session")
def tokenizer(smollm2: Path) -> Tokenizer:
    with GGUFFile(smollm2) as file:
        return from_gguf(file.metadata)


@pytest.fixture(scope="session")
def renderer() -> Iterator[ChatTemplateRenderer]:
    with ChatTemplateRenderer() as renderer:
        yield renderer
