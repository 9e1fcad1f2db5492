"""Create a real ollama client that is connected to a test server."""

from collections.abc import Iterator
from contextlib import closing, contextmanager

import ollama

from tests.app.server.served_application import ServedApplication


@contextmanager
def client(server: ServedApplication) -> Iterator[ollama.Client]:
    with closing(ollama.Client(server.url, trust_env=False)) as api:
        yield api
