"""Servers for external test suites: a chat model and an embedding model, under the names that the suites use.

Both models only compute digests, so that replies are cheap. The tokenizer and the chat template come from a real model.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from app.generation.embedding_service import EmbeddingService
from app.generation.template import ChatTemplateRenderer
from app.server.application import create_application
from app.text.encoder_tokenizer import from_json
from app.text.gguf_tokenizer import from_gguf
from quant.gguf import GGUFFile
from tests.app.server.dialects.openai.test_embeddings import DigestEmbedder
from tests.app.server.fixed_models import fixed_models
from tests.app.server.live_server import LiveServer, controlled_engine
from tests.app.server.served_application import ServedApplication
from tests.app.text.small_wordpiece import document

CONTEXT = 96  # tokens; small, so that a reply without max_tokens ends soon


@contextmanager
def chat_server(model: Path, aliases: Mapping[str, str]) -> Iterator[str]:
    """Run the server and yield its URL. Only the metadata of the GGUF file `model` is read."""
    with GGUFFile(model) as file:
        tokenizer = from_gguf(file.metadata)
    engine, _ = controlled_engine(tokenizer.vocab_size, context=CONTEXT)
    with ChatTemplateRenderer() as renderer, LiveServer("hash", engine, tokenizer, renderer, aliases=aliases) as server:
        yield server.url


@contextmanager
def embedding_server(aliases: Mapping[str, str]) -> Iterator[str]:
    """Run the server and yield its URL."""
    service = EmbeddingService("digest", from_json(document()), DigestEmbedder())
    with ServedApplication(create_application(fixed_models(service, aliases))) as server:
        yield server.url
