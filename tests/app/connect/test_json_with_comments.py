"""Edits of JSON files, byte by byte."""

import pytest

from app.connect.documents import ABSENT, InvalidText, Item, KeyPath
from app.connect.json_with_comments import JsonWithComments

PUT = [
    ("{}", ("k",), 1, '{\n  "k": 1\n}'),
    ("", ("k",), 1, '{\n  "k": 1\n}\n'),
    ("// nothing yet\r\n", ("k",), 1, '// nothing yet\r\n{\r\n  "k": 1\r\n}\r\n'),
    ('{"a":1}', ("k",), {"b": [1]}, '{"a":1, "k": {"b": [1]}}'),
    ('{"a":1,}', ("k",), 1, '{"a":1, "k": 1,}'),
    ('{\n\t"a": 1\n}', ("k", "b"), 1, '{\n\t"a": 1,\n\t"k": {\n\t\t"b": 1\n\t}\n}'),
    ('{\n  "a": 1, // x\n}', ("k",), 1, '{\n  "a": 1, // x\n  "k": 1,\n}'),
    ('{\n  "a": 1 /* x */ // y  \r\n}', ("k",), 1, '{\n  "a": 1, /* x */ // y  \n  "k": 1\r\n}'),
    ('{"a": 1 // x\n}', ("k",), 1, '{"a": 1, "k": 1 // x\n}'),
    ("{ // x\n}", ("k",), 1, '{\n  "k": 1 // x\n}'),
    ('{"k": 1, "k": 2}', ("k",), 3, '{"k": 1, "k": 3}'),
    ('{"K": 1, "k ": 2}', ("k",), 3, '{"K": 1, "k ": 2, "k": 3}'),
    ('{"a.b": 1}', ("a", "b"), 3, '{"a.b": 1, "a": {"b": 3}}'),
    ('\ufeff{"k": 1}', ("k",), "ü", '\ufeff{"k": "ü"}'),
    ('[{"n": "x"}, 7]', (Item("n", "x"),), {"n": "x", "m": 1}, None),
    ('[{"n": "y"}, 7]', (Item("n", "x"),), {"n": "x"}, '[{"n": "y"}, 7, {"n": "x"}]'),
]  # fmt: skip

REMOVE = [
    ('{"a": 1, "k": 2}', '{"a": 1}'),
    ('{"k": 2, "a": 1}', '{ "a": 1}'),
    ('{"a": 1, "k": 2,}', '{"a": 1,}'),
    ('{\n  "a": 1, // a\n  "k": 2, // k\n  "b": 3\n}', '{\n  "a": 1, // a\n   // k\n  "b": 3\n}'),
    ('{\n  "a": 1, // a  \n  "k": 2\n}', '{\n  "a": 1 // a  \n}'),
    ('{\n  "a": 1,\n  // about k\n  "k": 2\n}', '{\n  "a": 1\n  // about k\n}'),
    ('{"a": 1, // a\n"k": 2, "b": 3}', '{"a": 1, // a\n "b": 3}'),
    ('{"a": 1, // a\n"k": 2}', '{"a": 1 // a\n}'),
    ('{\n\n  "k": 2\n\n}', "{}"),
    ('{\n  // only a comment\n  "k": 2\n}', "{\n  // only a comment\n}"),
]


@pytest.mark.parametrize(("text", "path", "value", "expected"), PUT)
def test_put_changes_only_the_value(text: str, path: KeyPath, value: object, expected: str | None) -> None:
    document = JsonWithComments(text)
    document.put(path, value)
    assert document.get(path) == value
    assert document.text == expected or (expected is None and document.text.endswith("}, 7]"))


@pytest.mark.parametrize(("text", "expected"), REMOVE)
def test_remove_keeps_comments_and_separators(text: str, expected: str) -> None:
    document = JsonWithComments(text)
    document.remove(("k",))
    assert document.text == expected
    assert document.get(("k",)) is ABSENT


def test_source_has_the_text_of_the_file() -> None:
    document = JsonWithComments('{"k": [1.50, /* x */ "\\u00e9"]}')
    assert document.source(("k",)) == '[1.50, /* x */ "\\u00e9"]'
    assert document.get(("k",)) == [1.5, "é"]
    document.put_source(("k",), "1e3")
    assert document.text == '{"k": 1e3}'


@pytest.mark.parametrize(
    "text",
    ["{", '{"a"}', "[1 2]", "[,]", "{,}", "nul", '"a\nb"', "'a'", "01", "-", "/* open", "{} x", "NaN", '{"a": 1,,}'],
)
def test_invalid_text_is_refused(text: str) -> None:
    with pytest.raises(InvalidText):
        JsonWithComments(text)
