"""How Markdown of a model is read, and where it is cut."""

import random
from itertools import pairwise

import pytest

from tui.markdown import LONGEST_LINE, PIECE, Pieces, parser


def inline_text(markdown: str) -> str:
    tokens = parser().parse(markdown)
    return "".join(child.content for token in tokens for child in token.children or [])


def pieces(text: str, cuts: list[int]) -> list[str]:
    """The pieces of a text that comes in parts."""
    reader, found = Pieces(), [""]
    for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
        for begins, part in reader.feed(text[start:end]):
            if begins:
                found.append("")
            found[-1] += part
    return found


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
def test_links_say_where_they_go_and_html_is_text(markdown: str, shown: str) -> None:
    assert inline_text(markdown) == shown


def test_html_blocks_are_shown() -> None:
    assert inline_text("<div>\nhidden?\n</div>").replace("\n", "") == "<div>hidden?</div>"


def test_a_long_text_is_cut_where_blocks_begin() -> None:
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
    cuts = sorted(random.sample(range(len(text)), 300))
    found = pieces(text, cuts)
    assert "".join(found) == text
    assert len(found) > len(text) // (3 * PIECE)
    apart = [(token.type, token.content) for piece in found for token in parser().parse(piece)]
    assert apart == [(token.type, token.content) for token in parser().parse(text)]


def test_a_text_that_is_one_block_is_one_piece() -> None:
    assert len(pieces("```\n" + "a line\n\nb\n" * 1000, [5, 5000])) == 1


@pytest.mark.parametrize("word", ["word ", "endless", "[link](javascript:x) "])
def test_a_line_that_nobody_writes_is_cut_behind_a_word_if_it_has_any(word: str) -> None:
    line = word * (20 * LONGEST_LINE // len(word))
    cuts = sorted(random.sample(range(len(line)), 30))
    for found in (pieces(line, cuts), pieces(line, [])):
        assert "".join(found) == line
        assert max(map(len, found)) <= LONGEST_LINE + 2 * PIECE
        assert " " not in word or all(" " in (one[-1], other[0]) for one, other in pairwise(found))
    fenced = f"```\n{line}\n```"
    assert pieces(fenced, [7]) == [fenced]
