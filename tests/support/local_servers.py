"""Find free ports for other programs' servers on this machine, and check whether they are ready."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager

import httpx


def free_port() -> int:
    """Return a port on which no process of this machine listens."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
        return port


@contextmanager
def refusing_port() -> Iterator[int]:
    """Yield a port that refuses connections, and that no other process can take meanwhile."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield bound.getsockname()[1]


def answers(url: str) -> bool:
    """Whether a server answers at this URL."""
    try:
        return httpx.get(f"{url}/health", trust_env=False).status_code == httpx.codes.OK
    except httpx.HTTPError:
        return False
