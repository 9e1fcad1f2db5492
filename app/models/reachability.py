"""Whether a host of the web answers at all, found out within seconds.

Refuses to know what is wanted of it.
"""

import queue
import threading

from app.errors import Offline
from app.models.transfer.transfer import AGAIN, error_text, host_of, tls

PATIENCE = 3.0  # seconds until a host that says nothing counts as unreachable


def check_reachable(address: str) -> None:
    """Raise Offline unless the host of an address answers anything at all within PATIENCE seconds.

    The limit holds for everything together. A connect timeout alone would not do: it counts anew for each address of
    the host, and not at all while the name is looked up. Hence the thread, which is left to itself when time is up.
    """
    answers: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=lambda: answers.put(_probe(address)), daemon=True).start()
    try:
        problem = answers.get(timeout=PATIENCE)
    except queue.Empty:
        problem = f"no answer within {PATIENCE:.0f} s"
    if problem:
        raise Offline(f"{host_of(address)} cannot be reached ({problem})", AGAIN)


def _probe(address: str) -> str:
    """Ask for anything. Returns what went wrong, or nothing."""
    import httpx

    try:
        httpx.head(address, timeout=PATIENCE, verify=tls())
    except (httpx.HTTPError, httpx.InvalidURL, OSError, ImportError, ValueError) as problem:  # incl. proxy settings
        return error_text(problem)
    return ""
