"""Finds the code blocks and links of a reply, which can be copied or opened."""

from collections.abc import Iterator
from dataclasses import dataclass
from urllib.parse import unquote

from markdown_it.token import Token

from tui.markdown import parser


@dataclass(frozen=True, slots=True)
class Code:
    """A block of code."""

    text: str
    language: str  # the language as the model wrote it, or ""


@dataclass(frozen=True, slots=True)
class Address:
    """The target of a link."""

    text: str


Extract = Code | Address


def extracts(text: str) -> list[Extract]:
    """Return the code blocks and links of a Markdown text in order, without duplicates."""
    return list(dict.fromkeys(_found(parser().parse(text))))


def _found(tokens: list[Token]) -> Iterator[Extract]:
    for token in tokens:
        if token.type in ("fence", "code_block"):
            yield Code(token.content.rstrip("\n"), token.info.strip().partition(" ")[0])
        for child in token.children or ():
            if child.type == "link_open":
                # `_keep_address` in markdown.py has encoded the address once
                yield Address(unquote(str(child.attrs["href"])))
