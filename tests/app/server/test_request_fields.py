"""The tables of request fields: every row is correct, and every field has a row."""

import copy
import json
from typing import Any

import msgspec
import pytest
from msgspec import Struct

from app.server.http.errors import InvalidRequest
from app.server.request_fields import Field, FieldTable, Handling, alias, ignored, refused, supported
from tests.request_tables import PAGE, TABLES, page


class Options(Struct):
    depth: int | None = None


class Sample(Struct):
    prompt: str
    penalty: float | None = None
    options: Options | None = None


SAMPLE = FieldTable(
    Sample,
    {"prompt": "Hi"},
    [
        supported("prompt", "A", "Hello"),
        supported("penalty", "A", 1.5),
        supported("options", "A", {}),
        supported("options.depth", "A", 3),
        alias("repeat", "B", 1.5, of="penalty"),
        alias("options.levels", "B", 3, of="depth"),
        ignored("user", "A", "me", "It names the user."),
        refused("mirostat", "B", 2, "Leave it out.", neutral=[0]),
        refused("options.mirostat", "B", 2, "Leave it out.", neutral=[0]),
    ],
)
ALL = {"sample": SAMPLE, **TABLES}
ROWS = [(endpoint, field) for endpoint, table in ALL.items() for field in table.fields]


def rows(*handlings: Handling) -> pytest.MarkDecorator:
    cases = [pytest.param(ALL[name], it, id=f"{name}:{it.path}") for name, it in ROWS if it.handling in handlings]
    return pytest.mark.parametrize(("table", "field"), cases)


def with_value(table: FieldTable[Any], path: str, value: Any) -> bytes:
    """Return the table's minimal body with one field set. Lists in its path have one item."""
    body: Any = copy.deepcopy(dict(table.base))
    *steps, last = path.split(".")
    here = body
    for step in steps:
        name, listed = step.removesuffix("[]"), step.endswith("[]")
        here = here.setdefault(name, [{}] if listed else {})
        here = here[0] if listed else here
    here[last] = value
    return json.dumps(body).encode()


@rows(Handling.SUPPORTED)
def test_supported_fields_are_decoded(table: FieldTable[Any], field: Field) -> None:
    table.decode(with_value(table, field.path, field.example))
    if "[]" not in field.path and not field.parent:
        assert field.name in table.kind.__struct_encode_fields__


@rows(Handling.ALIAS)
def test_alias_decodes_as_its_field(table: FieldTable[Any], field: Field) -> None:
    target = f"{field.parent}.{field.target}".lstrip(".")
    given = json.loads(with_value(table, field.path, field.example))
    if not field.parent:
        given.pop(field.target, None)  # remove the field itself, which the minimal body contains if it is required
    decoded = table.decode(json.dumps(given).encode())
    assert decoded == table.decode(with_value(table, target, field.example))
    assert decoded != table.decode(msgspec.json.encode(table.base))


@rows(Handling.IGNORED)
def test_ignored_field_changes_nothing(table: FieldTable[Any], field: Field) -> None:
    given = table.decode(with_value(table, field.path, field.example))
    parent_alone = with_value(table, field.parent, {}) if field.parent and "[]" not in field.path else None
    plain = msgspec.json.encode(table.base) if parent_alone is None else parent_alone
    assert given == table.decode(plain)
    assert field.note, "the reason is missing"


@rows(Handling.REFUSED)
def test_error_names_the_refused_field(table: FieldTable[Any], field: Field) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        table.decode(with_value(table, field.path, field.example))
    assert refusal.value.parameter == field.path
    assert refusal.value.status == 400
    for value in (None, *field.neutral):
        table.decode(with_value(table, field.path, value))


@pytest.mark.parametrize("name", ALL)
def test_every_decoded_field_has_one_row(name: str) -> None:
    table = ALL[name]
    paths = [field.path for field in table.fields]
    assert len(set(paths)) == len(paths)
    assert set(table.kind.__struct_encode_fields__) <= set(paths)


def test_field_wins_over_its_alias() -> None:
    assert SAMPLE.decode(b'{"prompt": "Hi", "repeat": 2, "penalty": 1}').penalty == 1
    assert SAMPLE.decode(b'{"prompt": "Hi", "repeat": 2, "penalty": null}').penalty == 2


def test_invalid_value_is_reported_by_the_name_that_was_sent() -> None:
    with pytest.raises(msgspec.ValidationError, match="repeat"):
        SAMPLE.decode(b'{"prompt": "Hi", "repeat": "much"}')
    with pytest.raises(msgspec.ValidationError, match=r"options\.levels"):
        SAMPLE.decode(b'{"prompt": "Hi", "options": {"levels": "all"}}')


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b'{"a": \xff}', b'"x"', b"[" * 5000])
def test_body_that_is_not_an_object_is_passed_to_the_decoder(body: bytes) -> None:
    assert SAMPLE.rewrite(body) == (body, {})


def test_request_fields_page_lists_the_tables() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(TABLES), "run: python -m tests.request_tables"
