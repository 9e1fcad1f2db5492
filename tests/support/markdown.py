"""Extract headings, contents lists, links, and code from Markdown documents, by GitHub's rules."""

import re
from collections.abc import Iterator, Sequence

_FENCE = re.compile(r"^ *```")
_HEADING = re.compile(r"^(#{1,6}) (.+)$")
_ENTRY = re.compile(r"^- \[(.+)\]\(#(.+)\)$")
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_INLINE = re.compile(r"`([^`\n]+)`")


def slug(heading: str) -> str:
    """Return the anchor of a heading: lower case, without punctuation, spaces as hyphens."""
    return re.sub(r"[^\w\- ]", "", heading.replace("`", "").lower()).replace(" ", "-")


def lines_outside_fences(text: str) -> Iterator[str]:
    is_fenced = False
    for line in text.splitlines():
        if _FENCE.match(line):
            is_fenced = not is_fenced
        elif not is_fenced:
            yield line


def fenced_blocks(text: str) -> list[tuple[str, str]]:
    """Return (language, content) of each fenced block. The language is empty if the fence names none."""
    return re.findall(r"^ *```(\w*)\n(.*?)^ *```$", text, re.MULTILINE | re.DOTALL)


def headings(text: str) -> list[tuple[int, str]]:
    """Return (level, text) of each heading, in order."""
    found = (_HEADING.match(line) for line in lines_outside_fences(text))
    return [(len(match[1]), match[2]) for match in found if match]


def anchors(text: str) -> set[str]:
    return {slug(heading) for _, heading in headings(text)}


def contents_entries(text: str) -> list[str]:
    """Return the entries of the contents list: the links within the page that come before the first section."""
    found: list[str] = []
    for line in lines_outside_fences(text):
        if line.startswith("## "):
            break
        if (entry := _ENTRY.match(line)) and entry[2] == slug(entry[1]):
            found.append(entry[1])
    return found


def contents_list(sections: Sequence[str]) -> list[str]:
    """Return the lines of a contents list with a link for each section."""
    return [f"- [{section}](#{slug(section)})" for section in sections]


def links(text: str) -> list[str]:
    """Return the targets of all links and images."""
    return [target for line in lines_outside_fences(text) for target in _LINK.findall(re.sub(_INLINE, "", line))]


def inline_code(text: str) -> list[str]:
    return [code for line in lines_outside_fences(text) for code in _INLINE.findall(line)]


def table_rows(text: str) -> list[list[str]]:
    """Return the cells of each row of each table. The separator line below the header is left out."""
    rows = [line.strip().strip("|") for line in lines_outside_fences(text) if line.startswith("|")]
    cells = [[cell.strip() for cell in re.split(r"(?<!\\)\|", row)] for row in rows]
    return [row for row in cells if set("".join(row)) - set("-: ")]
