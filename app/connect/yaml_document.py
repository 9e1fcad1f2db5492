"""Edit YAML files: top-level values in one line, and items of a list. Every other byte stays.

PyYAML finds the values. Values in other forms, such as flow lists or texts of several lines, are not edited.
"""

import json
from typing import Any

import yaml

from app.connect.documents import ABSENT, Document, InvalidText, Item, KeyPath, Unwritable, leading_blanks

_INDENTATION = "  "


class YamlDocument(Document):
    """The text of a YAML file. The last one of equal keys in a mapping counts."""

    def _read(self) -> None:
        try:
            self._root: yaml.Node | None = yaml.compose(self.text, Loader=yaml.SafeLoader)
            self._data = {} if self._root is None else _data(self._root)
        except yaml.MarkedYAMLError as problem:
            mark = problem.problem_mark or problem.context_mark
            raise InvalidText(problem.problem or "not YAML", mark.index if mark else 0) from None
        except yaml.reader.ReaderError as problem:
            raise InvalidText("a character that YAML does not allow", problem.position) from None
        except (ValueError, RecursionError):  # such as a date in the 13th month
            raise InvalidText("not YAML", 0) from None

    def get(self, path: KeyPath) -> object:
        node = self._find(path)
        return ABSENT if node is None else _data(node)

    def has(self, path: KeyPath) -> bool:
        return self._find(path) is not None

    def source(self, path: KeyPath) -> str:
        node = self._existing(path)
        return self.text[node.start_mark.index : node.end_mark.index]

    def put_source(self, path: KeyPath, source: str) -> None:
        key, node = self._key_of(path), self._existing(path)
        if not _is_one_line(node) or not key.end_mark.index < node.end_mark.index or "\n" in source:
            raise Unwritable("the value has several lines, or is an alias")
        start = node.start_mark.index
        blank = " " if self.text[start - 1] == ":" else ""
        self.replace(start, node.end_mark.index, f"{blank}{source}")

    def put(self, path: KeyPath, value: object) -> None:
        others = self._others(path)
        match path:
            case (str(key),) if self.depth(path) == 1:
                self.put_source(path, json.dumps(value, ensure_ascii=False))
            case (str(key),):
                self._append([f"{key}: {json.dumps(value, ensure_ascii=False)}"])
            case (str(), Item()) | (Item(),) if isinstance(value, dict):
                self._put_item(path, value)
            case _:
                raise Unwritable("only top-level keys and lists are edited")
        if self._others(path) != others or self.get(path) != value:
            raise Unwritable("the file has an unusual form")

    def remove(self, path: KeyPath) -> None:
        node = self._existing(path)
        if not path:
            self.replace(node.start_mark.index, node.end_mark.index, "")
        elif isinstance(path[-1], str):
            self._remove_lines(self._key_of(path).start_mark.line, _last_line(node))
        else:
            self._remove_lines(node.start_mark.line, _last_line(node))
            if path[:-1] and self.get(path[:-1]) is None:
                self.put_source(path[:-1], "[]")

    def _put_item(self, path: KeyPath, value: dict[str, object]) -> None:
        """Insert an item before the others of its list."""
        if self.depth(path) == len(path):
            raise Unwritable(f"there is already an item with {path[-1]}")
        if self.depth(path) < len(path) - 1:
            key = path[0]
            self._append([f"{key}:", *_item(value, _INDENTATION)] if isinstance(key, str) else _item(value, ""))
            return
        found = self._existing(path[:-1])
        if isinstance(found, yaml.SequenceNode) and found.value and not found.flow_style:
            start = self._start_of_line(found.start_mark.line)
            if self.text[start : found.start_mark.index].strip("\ufeff \t"):
                raise Unwritable("other text precedes the list in its line")
            self.replace(start, start, self._joined(_item(value, leading_blanks(self.text, found.start_mark.index))))
        elif not _data(found) and path[:-1] and _is_one_line(found):
            start = len(self.text[: found.start_mark.index].rstrip(" \t"))
            end = self._start_of_line(found.end_mark.line + 1)
            rest = self.text[found.end_mark.index : end].rstrip("\r\n")  # a comment
            self.replace(start, end, rest + self.line_end + self._joined(_item(value, _INDENTATION)))
        else:
            raise Unwritable("the list is in brackets")

    def _append(self, lines: list[str]) -> None:
        """Append lines at the end of the file."""
        if isinstance(self._root, yaml.CollectionNode) and self._root.flow_style:
            raise Unwritable("the file is in brackets")
        end = len(self.text)
        start = self.line_end if self.text.strip("\ufeff") and not self.text.endswith("\n") else ""
        self.replace(end, end, start + self._joined(lines))

    def _joined(self, lines: list[str]) -> str:
        return "".join(f"{line}{self.line_end}" for line in lines)

    def _remove_lines(self, first: int, last: int) -> None:
        self.replace(self._start_of_line(first), self._start_of_line(last + 1), "")

    def _start_of_line(self, number: int) -> int:
        return sum(len(line) for line in self.text.splitlines(keepends=True)[:number])

    def _others(self, path: KeyPath) -> object:
        """Return what the file contains besides a value."""
        match self._data, path:
            case dict() as members, (str(key),):
                return {name: value for name, value in members.items() if name != key}
            case dict() as members, (str(key), Item() as step):
                return {**members, key: [one for one in members.get(key) or [] if not _is(one, step)]}
            case list() as items, (Item() as step,):
                return [one for one in items if not _is(one, step)]
        return []

    def _find(self, path: KeyPath) -> yaml.Node | None:
        node = self._root
        for step in path:
            if isinstance(step, str) and isinstance(node, yaml.MappingNode):
                node = next((value for key, value in reversed(node.value) if key.value == step), None)
            elif isinstance(step, Item) and isinstance(node, yaml.SequenceNode):
                node = next((one for one in node.value if _is(_data(one), step)), None)
            else:
                return None
        return node

    def _existing(self, path: KeyPath) -> yaml.Node:
        if (node := self._find(path)) is None:
            raise KeyError(path)
        return node

    def _key_of(self, path: KeyPath) -> yaml.Node:
        parent = self._existing(path[:-1])
        return next(key for key, _ in reversed(parent.value) if key.value == path[-1])


def _item(value: dict[str, object], indentation: str) -> list[str]:
    """Return the lines of an item of a list."""
    lines = _members(value, "")
    return [f"{indentation}{'  ' if number else '- '}{line}" for number, line in enumerate(lines)]


def _members(value: dict[str, Any], indentation: str) -> list[str]:
    lines = []
    for key, member in value.items():
        if isinstance(member, dict):
            lines += [f"{indentation}{key}:", *_members(member, indentation + _INDENTATION)]
        else:
            lines.append(f"{indentation}{key}: {json.dumps(member, ensure_ascii=False)}")
    return lines


def _is(value: object, step: Item) -> bool:
    return isinstance(value, dict) and value.get(step.key) == step.value


def _data(node: yaml.Node) -> Any:
    return yaml.SafeLoader("").construct_document(node)


def _is_one_line(node: yaml.Node) -> bool:
    is_text = isinstance(node, yaml.ScalarNode) and node.style in ("|", ">")
    return bool(node.start_mark.line == node.end_mark.line) and not is_text


def _last_line(node: yaml.Node) -> int:
    """Return the number of the last line of a value. The mark at its end may be after comments."""
    if isinstance(node, yaml.MappingNode) and node.value and not node.flow_style:
        return _last_line(node.value[-1][1])
    if isinstance(node, yaml.SequenceNode) and node.value and not node.flow_style:
        return _last_line(node.value[-1])
    return int(node.end_mark.line)
