"""Fixtures of app tests: tokenizers of the default model and of other real vocabularies, a template child, a TLS
context.
"""

import functools
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from app.generation.template import ChatTemplateRenderer
from app.grammars.frames import GrammarLimits
from app.text.gguf_tokenizer import from_gguf
from app.text.tokenizer import Tokenizer
from quant.gguf import GGUFFile


@pytest.fixture(scope="session", autouse=True)
def _one_tls_context() -> Iterator[None]:
    """Share one TLS context, because httpx loads all certificate authorities for each client, even for loopback
    requests.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("httpx._transports.default.create_ssl_context", functools.cache(httpx.create_ssl_context))
        yield


@pytest.fixture(scope="session", autouse=True)
def _long_compilations() -> Iterator[None]:
    """Allow compilations of grammars that wait for a core of a busy machine. The limit of their CPU time stays."""
    limits = functools.partial(GrammarLimits, compile_wall_seconds=60.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("app.generation.grammars.GrammarLimits", limits)
        yield


@pytest.fixture
def chance(seed: int, request: pytest.FixtureRequest) -> random.Random:
    """The random choices of one test, which `--seed` repeats."""
    return random.Random(f"{seed} {request.node.name}")


@pytest.fixture(scope="session")
def tokenizer(smollm2: Path) -> Tokenizer:
    with GGUFFile(smollm2) as file:
        return from_gguf(file.metadata)


@pytest.fixture(scope="session")
def vocabularies(llama_cpp_models: Path) -> Callable[[str], Tokenizer]:
    """Return a function that loads the tokenizer of one of llama.cpp's vocabularies by name.

    Some tokenizers are cached, because a large one takes seconds to build.
    """

    @functools.lru_cache(maxsize=4)
    def load(name: str) -> Tokenizer:
        with GGUFFile(llama_cpp_models / f"ggml-vocab-{name}.gguf") as file:
            return from_gguf(file.metadata)

    return load


@pytest.fixture(scope="session")
def renderer() -> Iterator[ChatTemplateRenderer]:
    with ChatTemplateRenderer(seconds=100) as renderer:
        yield renderer
