"""Which addresses in a reply may be opened at all: whole ones of the web, in which nothing hides. A pure function."""

from urllib.parse import urlsplit

from tui.plain_text import sanitize


def is_web_address(address: str) -> bool:
    """Whether a browser may be asked to open it, after the person was."""
    try:
        parts = urlsplit(address)
    except ValueError:
        return False
    plain = address.isprintable() and " " not in address and sanitize(address) == address
    return plain and parts.scheme in ("http", "https") and bool(parts.hostname)
