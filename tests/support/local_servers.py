"""Find free ports for other programs' servers on this machine, and check whether they are ready."""

import socket

import httpx


def free_port() -> int:
    """Return a port on which no process of this machine listens."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
        return port


def answers(url: str) -> bool:
    """Whether a server answers at this URL."""
    try:
        return httpx.get(f"{url}/health", trust_env=False).status_code == httpx.codes.OK
    except httpx.HTTPError:
        return False
