"""Types of columns: which values a column may hold, and how a damaged value is replaced."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from typing import TypeAlias, TypeGuard

import msgspec
from msgspec import Struct

from app.history.records import Attachment, Attachments, ChatSettings, Role, State, StoredUsage, Trim, written

Value: TypeAlias = int | float | str | bytes | None
Row: TypeAlias = tuple[Value, ...]

_LAST_ID = 1 << 53  # far above any id in use


@dataclass(frozen=True, slots=True)
class ColumnType:
    """Checks the values of a column, and repairs invalid ones."""

    holds: Callable[[Value], bool]
    repair: Callable[[Value], Value]  # returns the valid value that is closest to an invalid one

    def repaired(self, value: Value) -> Value:
        return value if self.holds(value) else self.repair(value)


def is_id(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and 0 <= value <= _LAST_ID


def _optional(kind: ColumnType) -> ColumnType:
    return ColumnType(lambda value: value is None or kind.holds(value), lambda value: None)


def _is_number(value: Value) -> bool:
    return isinstance(value, float) and math.isfinite(value)


def _number(value: Value) -> float:
    try:
        number = float(value or 0)
    except ValueError:
        return 0.0
    return number if math.isfinite(number) else 0.0


def _text(value: Value) -> str:
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    return value if isinstance(value, str) else ""


def _word(*words: str, default: str) -> ColumnType:
    def repair(value: Value) -> str:
        return (get_close_matches(_text(value), words, n=1) or [default])[0]

    return ColumnType(lambda value: value in words, repair)


def _part(kind: type[Struct], damaged: Callable[[str], str]) -> ColumnType:
    """Return the type of a column that holds JSON of type `kind`. `damaged` converts an invalid value to JSON."""

    def holds(value: Value) -> bool:
        if not isinstance(value, str):
            return False
        try:
            msgspec.json.decode(value, type=kind)
        except (msgspec.DecodeError, UnicodeError, RecursionError):
            return False
        return True

    def repair(value: Value) -> str:
        text = _text(value)
        return text if holds(text) else damaged(text)

    return ColumnType(holds, repair)


def _attached(text: str) -> str:
    """Return JSON with one attachment, whose text is the damaged JSON, so that the user can still read it."""
    return written(Attachments((Attachment("damaged attachments", text),) if text else ()))


ID = ColumnType(is_id, lambda value: value)
# The id of a chat. A window's new chat has no id yet: its key is NEW minus the number of the window, at most 0 (see
# app/history/inputs.py).
DRAFT_OF = ColumnType(lambda value: isinstance(value, int) and abs(value) <= _LAST_ID, lambda value: value)
REFERENCE = ColumnType(is_id, lambda value: 0)
OPTIONAL_REFERENCE = _optional(REFERENCE)
FLAG = ColumnType(lambda value: value in (0, 1), lambda value: 0)
NUMBER = ColumnType(_is_number, _number)
OPTIONAL_NUMBER = _optional(NUMBER)
TEXT = ColumnType(lambda value: isinstance(value, str), _text)
ROLE = _word(*Role, default=Role.ASSISTANT)
STATE = _word(*State, default=State.WHOLE)
SETTINGS = _part(ChatSettings, lambda text: written(ChatSettings()))
TRIM = _part(Trim, lambda text: written(Trim()))
ATTACHMENTS = _part(Attachments, _attached)
_STATED_USAGE = _part(StoredUsage, lambda text: "")
USAGE = ColumnType(lambda value: value == "" or _STATED_USAGE.holds(value), _STATED_USAGE.repair)
