"""Edit JSON files that may have comments and trailing commas, and keep every byte outside the edited value."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from app.connect.documents import ABSENT, Document, InvalidText, Item, KeyPath, Unwritable, leading_blanks, nested

_COMMENT = r"//[^\r\n]*|/\*[\s\S]*?\*/"
_TRIVIA = re.compile(rf"(?:[ \t\r\n]+|{_COMMENT})*")
_REST_OF_LINE = re.compile(r"(?:[ \t]+|/\*[^\r\n]*?\*/)*(?://[^\r\n]*)?(?=[\r\n]|\Z)")
_TOKENS = re.compile(rf"[ \t\r\n]+|({_COMMENT})")
_LAST_BLANKS = re.compile(r"(?:\r?\n|\r)?[ \t]*\Z")
_END_OF_LINE = re.compile(r"[ \t]*(?:[\r\n]|\Z)")
_SCALAR = re.compile(r'"(?:[^"\\\x00-\x1f]|\\.)*"|-?\d[\d.eE+-]*|true|false|null')
_INDENTATION = "  "
_MOST_LEVELS = 200


@dataclass(slots=True)
class _Node:
    """A value in the text."""

    start: int
    end: int
    data: object
    entries: list["_Entry"] = field(default_factory=list)  # of an object or a list


@dataclass(slots=True)
class _Entry:
    """A member of an object, or an item of a list."""

    start: int
    key: str | None  # None: an item of a list
    node: _Node
    comma: int | None = None  # position of the comma that follows


class JsonWithComments(Document):
    """The text of a JSON file. The last one of equal keys in an object counts."""

    def _read(self) -> None:
        self._root = _Reader(self.text).document()

    def get(self, path: KeyPath) -> object:
        node = self._find(path)
        return ABSENT if node is None else node.data

    def source(self, path: KeyPath) -> str:
        node = self._existing(path)
        return self.text[node.start : node.end]

    def put_source(self, path: KeyPath, source: str) -> None:
        node = self._existing(path)
        self.replace(node.start, node.end, source)

    def put(self, path: KeyPath, value: object) -> None:
        node, depth = self._find(path), self.depth(path)
        if node is not None:
            self.replace(node.start, node.end, self._dumped(value, leading_blanks(self.text, node.start)))
        elif depth < 0:
            self._append(nested(value, path))
        else:
            self._insert(self._existing(path[:depth]), path[depth], nested(value, path[depth + 1 :]))

    def remove(self, path: KeyPath) -> None:
        node = self._existing(path)
        if not path:
            self.replace(node.start, node.end, "")
            return
        parent = self._existing(path[:-1])
        self._remove_entry(parent, next(n for n, entry in enumerate(parent.entries) if entry.node is node))

    def _find(self, path: KeyPath) -> _Node | None:
        node = self._root
        for step in path:
            if node is None:
                return None
            node = next((entry.node for entry in reversed(node.entries) if _is_at(entry, step)), None)
        return node

    def _existing(self, path: KeyPath) -> _Node:
        if (node := self._find(path)) is None:
            raise KeyError(path)
        return node

    def _append(self, value: object) -> None:
        """Write the root of a file without content."""
        end = len(self.text)
        start = self.line_end if self.text.strip("\ufeff \t\r\n") and not self.text.endswith("\n") else ""
        self.replace(end, end, f"{start}{self._dumped(value, '')}{self.line_end}")

    def _insert(self, parent: _Node, step: str | Item, value: object) -> None:
        if not isinstance(parent.data, dict if isinstance(step, str) else list):
            raise Unwritable("an object or a list was expected" if isinstance(step, Item) else "an object was expected")
        key = f"{json.dumps(step, ensure_ascii=False)}: " if isinstance(step, str) else ""
        if parent.entries:
            self._insert_last(parent, key, value)
            return
        outer = leading_blanks(self.text, parent.start)
        line = f"{self.line_end}{outer}{self._unit}{key}{self._dumped(value, outer + self._unit)}"
        if self.text[parent.start + 1 : parent.end - 1].strip():  # comments
            self.replace(parent.start + 1, parent.start + 1, line)
        else:
            self.replace(parent.start + 1, parent.end - 1, f"{line}{self.line_end}{outer}")

    def _insert_last(self, parent: _Node, key: str, value: object) -> None:
        last, first = parent.entries[-1], parent.entries[0]
        at = end = _end_of(last)
        if "\n" in self.text[parent.start : first.start]:
            indentation = leading_blanks(self.text, last.start)
            piece = f"{self.line_end}{indentation}{key}{self._dumped(value, indentation)}"
            if (rest := _REST_OF_LINE.match(self.text, end)) is not None:
                at = rest.end()
        else:
            piece = f" {key}{json.dumps(value, ensure_ascii=False)}"
        if last.comma is None:
            self.replace(end, at, f",{self.text[end:at]}{piece}")
        else:
            self.replace(at, at, f"{piece},")

    def _remove_entry(self, parent: _Node, number: int) -> None:
        entry = parent.entries[number]
        end = _end_of(entry)
        previous = parent.entries[number - 1] if number else None
        comma = previous.comma if previous is not None and entry.comma is None else None
        start = self._start_of_gap(parent.start + 1 if previous is None else _end_of(previous), entry.start, end)
        kept = self.text[:start] if comma is None else self.text[:comma] + self.text[comma + 1 : start]
        rest = self.text[end:]
        if len(parent.entries) == 1 and not (kept[parent.start + 1 :] + rest[: parent.end - 1 - end]).strip():
            kept, rest = self.text[: parent.start + 1], self.text[parent.end - 1 :]
        self.text = kept + rest
        self._read()

    def _start_of_gap(self, least: int, start: int, end: int) -> int:
        """Return the start of the blanks that are removed with the entry from `start` to `end`: at most one line end.

        Comments stay. `least`: end of the previous entry, or of the bracket.
        """
        comments = [token for token in _TOKENS.finditer(self.text, least, start) if token[1]]
        after = comments[-1].end() if comments else least
        blanks = _LAST_BLANKS.search(self.text, after, start)
        begin = blanks.start() if blanks else start
        is_in_comment = comments and comments[-1][1].startswith("//") and begin == after
        return start if is_in_comment and not _END_OF_LINE.match(self.text, end) else begin

    def _dumped(self, value: object, indentation: str) -> str:
        lines = json.dumps(value, ensure_ascii=False, indent=self._unit).split("\n")
        return f"{self.line_end}{indentation}".join(lines)

    @property
    def _unit(self) -> str:
        """The indentation of one level."""
        if self._root is not None and self._root.entries:
            first = self._root.entries[0].start
            if "\n" in self.text[self._root.start : first]:
                return leading_blanks(self.text, first) or _INDENTATION
        return _INDENTATION


def _is_at(entry: _Entry, step: str | Item) -> bool:
    if isinstance(step, str):
        return entry.key == step
    data = entry.node.data
    return entry.key is None and isinstance(data, dict) and data.get(step.key) == step.value


def _end_of(entry: _Entry) -> int:
    return entry.node.end if entry.comma is None else entry.comma + 1


class _Reader:
    """Reads the values of a text, with their positions."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 1 if text.startswith("\ufeff") else 0

    def document(self) -> _Node | None:
        """Return the root; None: the text has only blanks and comments. Raises InvalidText."""
        self._skip()
        root = self._value(0) if self._at < len(self._text) else None
        self._skip()
        if self._at < len(self._text):
            raise InvalidText("nothing may follow the value", self._at)
        return root

    def _skip(self) -> None:
        found = _TRIVIA.match(self._text, self._at)
        self._at = found.end() if found else self._at

    def _value(self, level: int) -> _Node:
        start = self._at
        opening = self._text[start : start + 1]
        if level > _MOST_LEVELS:
            raise InvalidText(f"more than {_MOST_LEVELS} levels", start)
        if opening in ("{", "["):
            entries = list(self._entries("}" if opening == "{" else "]", level))
            data: object = [entry.node.data for entry in entries]
            if opening == "{":
                data = {entry.key: entry.node.data for entry in entries}
            return _Node(start, self._at, data, entries)
        data = self._scalar()
        return _Node(start, self._at, data)

    def _scalar(self) -> object:
        found = _SCALAR.match(self._text, self._at)
        if found is None:
            raise InvalidText("a value was expected", self._at)
        try:
            data: object = json.loads(found[0])
        except ValueError:
            raise InvalidText("not a JSON value", self._at) from None
        self._at = found.end()
        return data

    def _entries(self, closing: str, level: int) -> Iterator[_Entry]:
        """Yield the entries of an object or a list, from its bracket to the one that closes it."""
        self._at += 1
        self._skip()
        while not self._text.startswith(closing, self._at):
            start, key = self._at, self._key() if closing == "}" else None
            entry = _Entry(start, key, self._value(level + 1))
            self._skip()
            if self._text.startswith(",", self._at):
                entry.comma = self._at
                self._at += 1
                self._skip()
            elif not self._text.startswith(closing, self._at):
                raise InvalidText(f"a comma or {closing} was expected", self._at)
            yield entry
        self._at += 1

    def _key(self) -> str:
        start = self._at
        key = self._scalar() if self._text.startswith('"', start) else None
        self._skip()
        if not isinstance(key, str):
            raise InvalidText("a key in quotes was expected", start)
        if not self._text.startswith(":", self._at):
            raise InvalidText("a colon was expected", self._at)
        self._at += 1
        self._skip()
        return key
