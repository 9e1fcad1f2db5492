"""Parsers of settings: functions that convert a string or a TOML value to the value of a setting.

Each raises ValueError with a message that continues a sentence about the setting: "must be ...".
"""

import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from urllib.parse import urlsplit

from engine.config import ALL_FREE, MemoryLimit

MAX_GIGABYTES = 100_000  # largest size of a GPU's memory that a setting may state, in GB
MAX_KEY = 512  # maximum length of an API key in characters


def text(value: object) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError("must be a non-empty string")
    return value.strip()


def web_address(value: object) -> str:
    address = text(value).rstrip("/")
    parts = urlsplit(address)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("must be a URL that starts with https:// or http://")
    return address


def text_list(value: object) -> tuple[str, ...]:
    """Parse a list of strings without spaces: a TOML list, or a string with commas or spaces between the items."""
    texts = value.replace(",", " ").split() if isinstance(value, str) else value
    if not isinstance(texts, Sequence) or not all(isinstance(one, str) and one for one in texts):
        raise ValueError("must be a list of strings")
    return tuple(texts)


def key_list(value: object) -> tuple[str, ...]:
    """Parse API keys. Error messages never show a key."""
    keys = text_list(value)
    if not all(_KEY.fullmatch(key) for key in keys):
        raise ValueError(f"must be 1 to {MAX_KEY} printable ASCII characters, without spaces")
    return keys


def origin_list(value: object) -> tuple[str, ...]:
    """Parse origins of web pages, in the form that browsers send."""
    origins = text_list(value)
    for origin in origins:
        if not _ORIGIN.fullmatch(origin):
            raise ValueError(f"must be origins like https://app.example or http://localhost:3000, not {origin!r}")
    return origins


def yes_or_no(value: object) -> bool:
    words = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.strip().lower() in words:
        return words[value.strip().lower()]
    raise ValueError(f"must be yes or no, not {value!r}")


def whole_number(most: int) -> Callable[[object], int]:
    def parse(value: object) -> int:
        problem = f"must be a whole number from 0 to {most}, not {value!r}"
        if isinstance(value, bool) or not isinstance(value, int | str):
            raise ValueError(problem)
        try:
            number = int(value)
        except ValueError:
            raise ValueError(problem) from None
        if not 0 <= number <= most:
            raise ValueError(problem)
        return number

    return parse


def number_or_auto(most: int) -> Callable[[object], float | None]:
    """Return a parser of a number from 0 to `most`, or of auto, which is None."""

    def parse(value: object) -> float | None:
        if value == "auto":
            return None
        problem = f"must be auto or a number from 0 to {most}, not {value!r}"
        if isinstance(value, bool) or not isinstance(value, int | float | str):
            raise ValueError(problem)
        try:
            number = float(value)
        except ValueError:
            raise ValueError(problem) from None
        if not 0 <= number <= most:  # also true for NaN
            raise ValueError(problem)
        return number

    return parse


def one_of(*choices: str) -> Callable[[object], str]:
    def parse(value: object) -> str:
        if value not in choices:
            raise ValueError(f"must be one of {', '.join(choices)}, not {value!r}")
        return str(value)

    return parse


def one_of_numbers(*choices: int) -> Callable[[object], int]:
    def parse(value: object) -> int:
        text = str(value)
        if isinstance(value, bool) or text not in map(str, choices):
            raise ValueError(f"must be one of {', '.join(map(str, choices))}, not {value!r}")
        return int(text)

    return parse


def matching(pattern: str, meaning: str) -> Callable[[object], str]:
    """Return a parser of strings that match `pattern`. `meaning` describes them in errors."""

    def parse(value: object) -> str:
        if not isinstance(value, str) or not re.fullmatch(pattern, value):
            raise ValueError(f"must be {meaning}, not {value!r}")
        return value

    return parse


def names(value: object) -> Mapping[str, str]:
    """Parse a mapping of names: a TOML table, or `name=target` items separated by commas."""
    pairs: Mapping[object, object] = {}
    if isinstance(value, Mapping):
        pairs = value
    elif isinstance(value, str):
        split = [part.partition("=") for part in value.split(",") if part.strip()]
        pairs = {name.strip(): meaning.strip() for name, _, meaning in split}
    known = {name: meaning for name, meaning in pairs.items() if isinstance(name, str) and isinstance(meaning, str)}
    if not isinstance(value, Mapping | str) or len(known) < len(pairs) or not all((*known, *known.values())):
        raise ValueError(f"must be names with their models, such as gpt-4o=smollm2:135m, not {value!r}")
    return MappingProxyType(known)


def memory_limit(value: object) -> MemoryLimit:
    """Parse a memory limit: auto, a size such as 20GB, or a share such as 80%."""
    found = _SIZE.fullmatch(value.strip()) if isinstance(value, str) else None
    if value == "auto":
        return ALL_FREE
    number = float(found[1]) if found else 0.0
    if found is None or not 0 < number <= (100 if found[2] == "%" else MAX_GIGABYTES):
        raise ValueError(f"must be auto, a size like 20GB, or a share like 80%, not {value!r}")
    return MemoryLimit(share=number / 100) if found[2] == "%" else MemoryLimit(num_bytes=round(number * 1e9))


def memory_size(value: object) -> int:
    """Parse a size such as 8GB. Returns bytes."""
    found = _SIZE.fullmatch(value.strip()) if isinstance(value, str) else None
    if found is None or found[2] == "%" or not 0 < float(found[1]) <= MAX_GIGABYTES:
        raise ValueError(f"must be a size like 8GB, not {value!r}")
    return round(float(found[1]) * 1e9)


def duration(value: object) -> float:
    """Parse a duration such as 90s, 30m, or 2h; a number without a unit is in seconds. Returns seconds."""
    found = _DURATION.fullmatch(value.strip()) if isinstance(value, str) else None
    if found is None:
        raise ValueError(f"must be a duration like 90s, 30m, or 2h, not {value!r}")
    return float(found[1]) * _UNIT_SECONDS[found[2]]


def duration_or_auto(value: object) -> float | None:
    """Parse a duration, a number of seconds, or auto, which is None. Returns seconds."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    try:
        return None if value == "auto" else duration(str(value) if is_number else value)
    except ValueError:
        raise ValueError(f"must be auto, or a duration like 90s, 30m, or 2h, not {value!r}") from None


def plain(value: object) -> object:
    """Return the value of a setting in the types of JSON. Tables of models stay as they are."""
    match value:
        case MemoryLimit(share=share, num_bytes=num_bytes):
            return f"{100 * share:g}%" if share else f"{num_bytes / 1e9:g}GB" if num_bytes else "auto"
        case Path():
            return os.fspath(value)
        case tuple():
            return list(value)
        case Mapping():
            return dict(value)
    return value


_DURATION = re.compile(r"(\d{1,9}(?:\.\d{1,6})?) ?([smhd]?)")
_UNIT_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86_400}
_SIZE = re.compile(r"(\d{1,6}(?:\.\d{1,6})?) ?(GB|%)")
_KEY = re.compile(rf"[\x21-\x7e]{{1,{MAX_KEY}}}")
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://(?:[a-z0-9.-]+|\[[0-9a-f:.]+\])(?::[1-9][0-9]{0,4})?")
