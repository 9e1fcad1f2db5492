"""Parts of a reply that can be copied or opened: code, quotations, and http addresses that hide nothing."""

from collections.abc import Iterator
from dataclasses import dataclass
from urllib.parse import unquote, urlsplit

from markdown_it.token import Token

from tui.markdown import parser
from tui.plain_text import sanitize


def is_web_address(address: str) -> bool:
    """Whether a browser may be asked to open it, after the person was."""
    try:
        parts = urlsplit(address)
    except ValueError:
        return False
    plain = address.isprintable() and " " not in address and sanitize(address) == address
    return plain and parts.scheme in ("http", "https") and bool(parts.hostname)


@dataclass(frozen=True, slots=True)
class Code:
    """A block of code."""

    text: str
    language: str  # as the model names it, or ""


@dataclass(frozen=True, slots=True)
class Address:
    """Where a link leads."""

    text: str


Extract = Code | Address


def extracts(text: str) -> list[Extract]:
    """Of a Markdown text, in order; an address that is there several times stands where it comes first."""
    return list(dict.fromkeys(_found(parser().parse(text))))


def _found(tokens: list[Token]) -> Iterator[Extract]:
    for token in tokens:
        if token.type in ("fence", "code_block"):
            yield Code(token.content.rstrip("\n"), token.info.strip().partition(" ")[0])
        for child in token.children or ():
            if child.type == "link_open":
                yield Address(unquote(str(child.attrs["href"])))  # the parser keeps it for one decoding
