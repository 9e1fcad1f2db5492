"""Docstrings, comments, messages, test names and documents use plain technical English.

Each row of HABITS is a habit of speech with an example that the check must find and the plain sentence that replaces
it. `python -m tests.test_prose PATH...` lists the findings in some files.
"""

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@dataclass(frozen=True)
class Habit:
    name: str
    pattern: re.Pattern[str]
    bad: str
    good: str


def habit(name: str, pattern: str, bad: str, good: str) -> Habit:
    return Habit(name, re.compile(pattern), bad, good)


HABITS = [
    habit(
        "passive is told",
        r"\b(?:is|are|was|were|be|been|being|gets?|getting) told\b|\btelling\b",
        "The caller is told how long it waits.",
        "Returns the expected wait in seconds.",
    ),
    habit(
        "no actor",
        r"\b(?:nobody|somebody|whoever|whomever|whatever|anybody|everybody|no one)\b",
        "Frees blocks that nobody uses.",
        "Frees blocks without a reference.",
    ),
    habit(
        "of ours",
        r"\bof (?:ours|theirs|its own|their own|our own|his|hers|yours)\b",
        "Each test has a folder of its own.",
        "Each test has its own folder.",
    ),
    habit(
        "so many",
        r"\b(?:so many|so much|as many as|as much as|that many|that much)\b",
        "Keeps so many tokens.",
        "Keeps at most n tokens.",
    ),
    habit(
        "spatial verbs",
        r"\b(?:stands|stand for|lies|in front of|becomes? of|came of|comes of)\b"
        r"|\bbehind (?!(?:a|the|your|its) (?:reverse )?(?:proxy|scenes))",
        "The length stands behind the key.",
        "The length follows the key.",
    ),
    habit(
        "begun",
        r"\b(?:begun|began|begins?|beginnings?)\b",
        "A download that was begun is resumed.",
        "A partial download is resumed.",
    ),
    habit(
        "trailing too",
        r", too(?=[.;:,)]|$)",
        "Images are dropped, too.",
        "Images are also dropped.",
    ),
    habit(
        "ritual",
        r"\b[Rr]efuses? to know\b|\b[Kk]nows (?:no|nothing)\b|\bnouns?\b",
        "Refuses to know the wire.",
        "Parses the body of a request.",
    ),
    habit(
        "place, seat, crew",
        r"(?<!in )(?<!In )(?<!takes )(?<!take )\bplaces?\b|\b(?:seats?|crews?|crumbs)\b",
        "The place of a block in its table.",
        "The index of a block in its table.",
    ),
    habit(
        "he for the user",
        r"\b(?:[Hh]e|[Hh]is|[Hh]im|[Hh]imself)\b",
        "The user and his chats.",
        "The user's chats.",
    ),
    habit(
        "British spelling",
        r"\b(?:[Cc]olour|[Bb]ehaviour|[Nn]eighbour|[Ff]avour|[Hh]onour|[Cc]entre|[Ll]icence|[Ss]ummaris|[Nn]ormalis"
        r"|[Qq]uantis|[Rr]ecognis|[Ii]nitialis|[Oo]ptimis|[Gg]rey)\w*|\bfor ever\b",
        "The colour of a normalised row.",
        "The color of a normalized row.",
    ),
    habit(
        "archaic",
        r"\b(?:anew|thereby|whereby|lest|hence|wherein|therein|of late|holds? good|goes on|go on|went on|may well"
        r"|is to be|are to be|be it|looks? on)\b",
        "The engine is started anew and goes on.",
        "The engine restarts and continues.",
    ),
]

# Sentences that start with a clause instead of a subject.
HEADLESS = re.compile(
    r"(?:^|(?<=[.!?] )|(?<=\n))(?:Who|Whom|Whose|Whoever|What|Whatever|That|Of|Where|Wherever|Than|Nor)\b(?![^.]*\?)"
)

# Test names without a subject.
VAGUE_TEST = re.compile(
    r"^test_(?:who|whose|whoever|what|whatever|that|of|where|wherever|nobody|somebody|nothing|none|it|they|this|these"
    r"|those|one|as|to|than|both)_"
    r"|nobody|somebody|whoever|everybody|anybody|_is_told|_are_told|_of_ours|_so_many|_so_much|_too$|_its_own$"
    r"|begun|_began|_anew|(?<!_in)_places?(?:_|$)|_seats?(?:_|$)"
)


@dataclass(frozen=True)
class Piece:
    """A piece of prose: `kind` is docstring, comment, message, test or document."""

    line: int
    kind: str
    text: str


def without_code(text: str) -> str:
    return re.sub(r"`[^`]*`", "x", text)


def pieces_of_document(text: str) -> Iterator[Piece]:
    fenced = False
    for number, line in enumerate(text.split("\n"), 1):
        fenced ^= line.lstrip().startswith("```")
        if not fenced:
            yield Piece(number, "document", without_code(line))


def comments(text: str) -> Iterator[Piece]:
    """Yield each comment as one piece. Consecutive comment lines are one comment."""
    block: list[str] = []
    start = 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type != tokenize.COMMENT:
            continue
        words = token.string.lstrip("#! ")
        if words.startswith(("noqa", "type:", "fmt:", "ruff:")):
            continue
        if block and token.start[0] == start + len(block) and token.line.lstrip().startswith("#"):
            block.append(words)
            continue
        if block:
            yield Piece(start, "comment", without_code(" ".join(block)))
        block, start = [words], token.start[0]
    if block:
        yield Piece(start, "comment", without_code(" ".join(block)))


def is_sentence(value: object) -> bool:
    """Whether a constant is a line of several words."""
    return isinstance(value, str) and len(value.split()) >= 3 and "\n" not in value


def pieces_of_module(text: str, messages: bool) -> Iterator[Piece]:
    documented = set()
    for node in ast.walk(ast.parse(text)):  # a node comes before its children
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            if docstring := ast.get_docstring(node):
                expression = node.body[0]
                assert isinstance(expression, ast.Expr)
                documented.add(expression.value)
                yield Piece(expression.lineno, "docstring", without_code(docstring))
            if getattr(node, "name", "").startswith("test_"):
                yield Piece(getattr(node, "lineno", 0), "test", getattr(node, "name", ""))
        elif messages and isinstance(node, ast.Constant) and node not in documented and is_sentence(node.value):
            yield Piece(node.lineno, "message", without_code(str(node.value)))
    if "#" in text:
        yield from comments(text)


def habits_in(piece: Piece) -> Iterator[str]:
    if piece.kind == "test":
        if VAGUE_TEST.search(piece.text):
            yield "vague test name"
        return
    text = " ".join(piece.text.split())
    yield from (found.name for found in HABITS if found.pattern.search(text))
    if piece.kind in ("docstring", "comment") and HEADLESS.search(piece.text):
        yield "headless sentence"


def findings(path: Path) -> list[str]:
    text = (ROOT / path).read_text(encoding="utf-8")
    if path.suffix == ".md":
        pieces = pieces_of_document(text)
    else:
        pieces = pieces_of_module(text, messages=path.parts[0] != "tests")
    return [f"{path}:{piece.line}: {name}: {piece.text}" for piece in pieces for name in habits_in(piece)]


def prose_files() -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "*.py", "*.md"], cwd=ROOT, capture_output=True, text=True, check=True)
    own = Path(__file__).relative_to(ROOT)
    return [path for name in listed.stdout.splitlines() if (path := Path(name)) != own and (ROOT / path).exists()]


@pytest.mark.parametrize("example", HABITS, ids=lambda example: example.name)
def test_check_finds_the_habit_and_accepts_plain_english(example: Habit) -> None:
    assert example.name in habits_in(Piece(1, "comment", example.bad))
    assert not list(habits_in(Piece(1, "comment", example.good)))


def test_check_finds_headless_sentences_and_vague_test_names() -> None:
    assert list(habits_in(Piece(1, "docstring", "What is known of a file."))) == ["headless sentence"]
    assert not list(habits_in(Piece(1, "docstring", "Metadata of a file. What is missing?")))
    assert list(habits_in(Piece(1, "test", "test_what_is_unknown_is_ignored"))) == ["vague test name"]
    assert not list(habits_in(Piece(1, "test", "test_unknown_fields_are_ignored")))


def test_check_reads_docstrings_comments_messages_and_test_names() -> None:
    module = '"""A."""\n# b\nx = 1  # c\ndef test_d():\n    """E."""\n    raise ValueError("one two three")\n'
    assert {piece.text for piece in pieces_of_module(module, messages=True)} == {
        "A.", "b", "c", "test_d", "E.", "one two three",
    }  # fmt: skip


def test_prose_is_plain_english() -> None:
    found = [line for path in prose_files() for line in findings(path)]
    assert not found, "\n".join(found)


if __name__ == "__main__":
    given = [Path(name) for name in sys.argv[1:]]
    for path in prose_files():
        if not given or any(path.is_relative_to(part) for part in given):
            print(*findings(path), sep="\n", end="\n" if findings(path) else "")
