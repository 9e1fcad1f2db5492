"""Check within seconds whether a web host responds at all."""

import queue
import threading

from app.errors import Offline
from app.models.transfer.transfer import CHECK_NETWORK, error_text, host_of, tls

PATIENCE = 3.0  # seconds until a silent host counts as unreachable


def check_reachable(address: str) -> None:
    """Raise Offline unless the host of an address responds within PATIENCE seconds.

    The limit covers the name lookup and all addresses of the host. httpx's connect timeout does not: it restarts for
    each address, and does not cover the name lookup. A thread makes the request, and is abandoned when the time is up.
    """
    answers: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=lambda: answers.put(_probe(address)), daemon=True).start()
    try:
        problem = answers.get(timeout=PATIENCE)
    except queue.Empty:
        problem = f"no response within {PATIENCE:.0f} s"
    if problem:
        raise Offline(f"{host_of(address)} cannot be reached ({problem})", CHECK_NETWORK)


def _probe(address: str) -> str:
    """Send a request. Return the error, or an empty string."""
    import httpx

    try:
        httpx.head(address, timeout=PATIENCE, verify=tls())
    # includes errors of proxy settings
    except (httpx.HTTPError, httpx.InvalidURL, OSError, ImportError, ValueError) as problem:
        return error_text(problem)
    return ""
