"""Servers of other programs on this machine: free ports and readiness."""

import socket

import httpx


def free_port() -> int:
    """Return a port of this machine that no process listens on."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
        return port


def answers(url: str) -> bool:
    """Whether a server is ready."""
    try:
        return httpx.get(f"{url}/health", trust_env=False).status_code == httpx.codes.OK
    except httpx.HTTPError:
        return False
