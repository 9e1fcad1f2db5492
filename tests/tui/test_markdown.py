"""Tests for parsing and splitting Markdown."""

import random
from itertools import pairwise

import pytest
from markdown_it.token import Token

from tui.markdown import LONGEST_LINE, PIECE, Pieces, parser


def inline_text(markdown: str) -> str:
    tokens = parser().parse(markdown)
    return "".join(child.content for token in tokens for child in token.children or [])


def pieces(text: str, cuts: list[int]) -> list[str]:
    """Return the pieces of a text that is fed in parts."""
    reader, found, whole = Pieces(), [""], ""
    for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
        for part in reader.feed(text[start:end]):
            whole += part.text
            if part.begins:
                found.append(part.head)
            found[-1] += part.text
    assert whole == text
    return found


def some_cuts(text: str, count: int) -> list[int]:
    return sorted(random.sample(range(len(text)), count))


def without_lists(markdown: str) -> list[tuple[str, str]]:
    """Return the rendered text without the boundaries of lists, because lists are split between items."""
    tokens = parser().parse(markdown)
    return [(it.type, it.content) for it in tokens if not it.type.endswith(("list_open", "list_close"))]


@pytest.mark.parametrize(
    ("markdown", "shown"),
    [
        ("[here](https://a.example/x?y=%20)", "here (https://a.example/x?y=%20)"),
        ("https://a.example", "https://a.example"),
        ("[a.example](https://a.example)", "a.example"),
        ("[a.example](https://b.example)", "a.example (https://b.example)"),
        ("![cat](https://a.example/c.png)", "cat (https://a.example/c.png)"),
        ("<b>bold</b>", "<b>bold</b>"),
        ("&#8238;x &#x200b; &#27; `&#8238;`", "‹U+202E›x ‹U+200B› \ufffd &#8238;"),
    ],
)
def test_links_show_their_address_and_html_is_text(markdown: str, shown: str) -> None:
    assert inline_text(markdown) == shown


def test_html_blocks_are_shown_as_text() -> None:
    assert inline_text("<div>\nhidden?\n</div>").replace("\n", "") == "<div>hidden?</div>"


def test_long_text_is_split_between_blocks() -> None:
    blocks = []
    for number in range(200):
        kind = random.randrange(5)
        if kind == 0:
            blocks.append(f"```python\nprint({number})\n\nnot_a_block_of_its_own()\n```")
        elif kind == 1:
            blocks.append(f"- item {number}\n\n  more of it\n- another")
        elif kind == 2:
            blocks.append(f"| a | b |\n|---|---|\n| {number} | 2 |")
        elif kind == 3:
            blocks.append(f"1. first\n\n2. second {number}")
        else:
            blocks.append(f"Paragraph {number} " + "word " * random.randrange(60))
    text = "\n\n".join(blocks)
    found = pieces(text, some_cuts(text, 300))
    assert len(found) > len(text) // (3 * PIECE)
    assert [token for piece in found for token in without_lists(piece)] == without_lists(text)


def test_code_block_below_the_limit_is_one_piece() -> None:
    assert len(pieces("```\n" + "a line\n\nb\n" * 1000, [5, 5000])) == 1


@pytest.mark.parametrize("between", ["\n", "\n\n"])
@pytest.mark.parametrize("mark", ["-", "*", "+", ".", ")"])
def test_long_list_is_split_between_items(mark: str, between: str) -> None:
    first, count = random.randrange(1, 50), 200
    bullets = [f"{first + place}{mark}" if mark in ".)" else mark for place in range(count)]
    insides = [
        "",
        "\n     - inside\n     - of it",
        "\n\n      a second paragraph",
        "\n\n      ```\n      1. code\n      ```",
    ]
    text = between.join(f"{bullet} an **item**, {bullet} to read{random.choice(insides)}" for bullet in bullets)
    found = pieces(text, some_cuts(text, 100))
    assert len(found) > len(text) // (3 * PIECE)
    whole, shown = items(parser().parse(text)), [one for piece in found for one in items(parser().parse(piece))]
    assert shown == whole
    numbers = {number for number, depth, _ in shown if depth == 0}
    assert numbers == ({*range(first, first + count)} if mark in ".)" else {0})


def items(tokens: list[Token]) -> list[tuple[int, int, str]]:
    """Return (number or 0, depth, text) of each list item."""
    found, numbers = [], []
    for token in tokens:
        if token.type.endswith("list_open"):
            numbers.append(int(token.attrs.get("start", 1)) if token.type == "ordered_list_open" else 0)
        elif token.type.endswith("list_close"):
            numbers.pop()
        elif token.type == "list_item_close":
            numbers[-1] += numbers[-1] > 0
        elif token.content:
            found.append((numbers[-1], len(numbers) - 1, token.content))
    return found


def test_long_table_is_split_between_rows_with_repeated_header() -> None:
    header = "| name | what it is |\n|:---|---:|\n"
    rows = "".join(f"| {number} | a `row` of it, |\n" for number in range(290))
    text = f"Before it.\n\n{header}{rows}\nBehind it, | not a row |\n"
    found = pieces(text, some_cuts(text, 100))
    assert len(found) > len(rows) // (3 * PIECE)
    assert all(piece.startswith(header) for piece in found[1:])
    types = [{token.type for token in parser().parse(piece)} for piece in found]
    assert all("table_open" in here for here in types)
    assert all("paragraph_open" not in here for here in types[1:-1])


@pytest.mark.parametrize(
    "text",
    [
        "| no | table |\n| here |\n" * 200,
        "a line\n7. of text\n8. in a paragraph\n" * 200,
        "1. an item that the reader numbers\n" * 200,
        "- - -\n" * 900,
    ],
)
def test_text_is_not_split_if_its_meaning_would_change(text: str) -> None:
    assert pieces(text, some_cuts(text, 20)) == [text]


@pytest.mark.parametrize("word", ["word ", "endless", "[link](javascript:x) "])
def test_very_long_line_is_split_after_a_word(word: str) -> None:
    line = word * (20 * LONGEST_LINE // len(word))
    for found in (pieces(line, some_cuts(line, 30)), pieces(line, [])):
        assert max(map(len, found)) <= LONGEST_LINE + 2 * PIECE
        assert " " not in word or all(" " in (one[-1], other[0]) for one, other in pairwise(found))
    fenced = f"```\n{line}\n```"
    assert pieces(fenced, [7]) == [fenced]


def test_single_line_breaks_are_kept() -> None:
    tokens = parser().parse("an old pond\na frog leaps in\nthe sound of water")
    kinds = [child.type for token in tokens for child in token.children or []]
    assert kinds == ["text", "hardbreak", "text", "hardbreak", "text"]


@pytest.mark.parametrize(
    ("markdown", "shown"),
    [
        ("- [ ] open\n- [x] done\n- [y] other", "☐ open☑ done[y] other"),
        ("not [x] here", "not [x] here"),
        (r"area $\pi r^2$, and \(a_1\)", "area π r², and a₁"),
        ("\\[\nx^2\n\\]", "x²"),
        ("$$x^2$$", "x²"),
        ("It costs $5 or $6.", "It costs $5 or $6."),
        ("`$x^2$`", "$x^2$"),
        (r"\[not closed", "[not closed"),
        ("17*3 = 51, 17*3 + 1", "17*3 = 51, 17*3 + 1"),
        ("2**8 and 2**9, **17** and *3*", "2**8 and 2**9, 17 and 3"),
    ],
)
def test_tasks_and_math_are_shown_as_symbols(markdown: str, shown: str) -> None:
    assert inline_text(markdown) == shown
