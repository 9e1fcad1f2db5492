"""Server fixtures that tests share: the hash model, the default model with its weights, a scripted model, and a code
model.
"""

import copy
from collections.abc import Iterator
from pathlib import Path

import pytest

from app.generation.template import ChatTemplateRenderer
from app.text.gguf_tokenizer import from_gguf
from app.text.tokenizer import Tokenizer
from engine.load_options import LoadOptions
from engine.loading import load_engine, open_checkpoint
from quant.gguf import GGUFFile
from tests.app.server.live_server import LiveServer, controlled_engine
from tests.app.server.loading_server import LoadingServer
from tests.app.server.scripted_server import ScriptedServer


@pytest.fixture(scope="session")
def hash_server(tokenizer: Tokenizer, renderer: ChatTemplateRenderer) -> Iterator[LiveServer]:
    """A server with the hash model, for tests that do not change its state."""
    engine, _ = controlled_engine(tokenizer.vocab_size)
    with LiveServer("hash", engine, tokenizer, renderer) as server:
        yield server
    engine.assert_empty()


@pytest.fixture
def loading_server(tokenizer: Tokenizer, renderer: ChatTemplateRenderer) -> Iterator[LoadingServer]:
    """A server whose models are not loaded yet."""
    with LoadingServer(tokenizer, renderer) as server:
        yield server


@pytest.fixture(scope="session")
def smollm2_server(
    smollm2: Path, cpu_kernels: Path, tokenizer: Tokenizer, renderer: ChatTemplateRenderer
) -> Iterator[LiveServer]:
    with open_checkpoint(smollm2) as checkpoint:
        engine = load_engine(checkpoint, LoadOptions(context_length=512, code_cache=cpu_kernels))
    with LiveServer("smollm2:135m", engine, tokenizer, renderer) as server:
        yield server
    engine.assert_empty()


@pytest.fixture(scope="session")
def scripted_server(
    llama_cpp_models: Path, tokenizer: Tokenizer, renderer: ChatTemplateRenderer
) -> Iterator[ScriptedServer]:
    """A scripted server: the default model's vocabulary, and the template of a model that calls tools and reasons."""
    model = copy.copy(tokenizer)
    model.chat_template = (llama_cpp_models / "templates" / "Qwen-Qwen3-0.6B.jinja").read_text(encoding="utf-8")
    with ScriptedServer(model, renderer) as server:
        yield server


@pytest.fixture(scope="session")
def code_server(llama_cpp_models: Path, renderer: ChatTemplateRenderer) -> Iterator[LiveServer]:
    """A server with the hash model and the vocabulary of a model that has infill tokens."""
    with GGUFFile(llama_cpp_models / "ggml-vocab-starcoder.gguf") as file:
        tokenizer = from_gguf(file.metadata)
    engine, _ = controlled_engine(tokenizer.vocab_size)
    with LiveServer("starcoder", engine, tokenizer, renderer) as server:
        yield server
    engine.assert_empty()
