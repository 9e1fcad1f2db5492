"""A client of a running server."""

import sys

# httpx imports its command line, and with it rich, which takes 40 ms. It ignores the ImportError that None causes.
sys.modules.setdefault("httpx._main", None)  # type: ignore[arg-type]
