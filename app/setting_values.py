"""What the values of settings can be: functions that make one of a string or of a TOML value.

Each raises ValueError, whose message ends a sentence about the setting: "must be ...". Refuses to know which settings
there are, and the environment.
"""

from collections.abc import Callable
from urllib.parse import urlsplit


def text(value: object) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError("must be a text that is not empty")
    return value.strip()


def web_address(value: object) -> str:
    address = text(value).rstrip("/")
    parts = urlsplit(address)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("must be an address that starts with https:// or http://")
    return address


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
    """None stands for auto."""

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
        if not 0 <= number <= most:  # nor what is not a number
            raise ValueError(problem)
        return number

    return parse


def one_of(*choices: str) -> Callable[[object], str]:
    def parse(value: object) -> str:
        if value not in choices:
            raise ValueError(f"must be one of {', '.join(choices)}, not {value!r}")
        return str(value)

    return parse
