"""Parse a JSON object or list from an untrusted file.

Python's parser turns eight bytes into up to 240 bytes of objects, so values are counted before it runs. It also accepts
a repeated key and keeps only the last value; here a repeated key is an error.
"""

import json

from quant.errors import printable

# Limit on the number of brackets and commas, which is at least the number of values. Those inside strings are counted
# as well. The header of a file of 131,072 matrices has one million. Parsing takes at most ten times the bytes of the
# text, and VALUE_BYTES for each value.
MAX_VALUES = 1 << 21
VALUE_BYTES = 128


class JSONProblem(Exception):
    """The text is not usable JSON. The message says why, for the error that the caller raises."""


def parse_object(raw: bytes) -> dict[str, object]:
    """Parse a JSON object. Raises JSONProblem, and nothing else, if `raw` is not one object in UTF-8."""
    value = _parse(raw)
    if not isinstance(value, dict):
        raise JSONProblem("it is not an object")
    return value


def parse_list(raw: bytes) -> list[object]:
    """Parse a JSON list. Raises JSONProblem, and nothing else, if `raw` is not one list in UTF-8."""
    value = _parse(raw)
    if not isinstance(value, list):
        raise JSONProblem("it is not a list")
    return value


def _parse(raw: bytes) -> object:
    if raw.count(b",") + raw.count(b"[") + raw.count(b"{") > MAX_VALUES:
        raise JSONProblem(f"it has more than {MAX_VALUES} values")
    try:
        value: object = json.loads(
            raw.decode("utf-8"), object_pairs_hook=_reject_duplicate_keys, parse_constant=_refuse
        )
    except UnicodeDecodeError as error:
        raise JSONProblem(f"byte {error.start} of its text is not UTF-8") from None
    except json.JSONDecodeError as error:
        raise JSONProblem(f"it is not JSON: {error.msg} at character {error.pos}") from None
    except RecursionError:
        raise JSONProblem("it is nested too deeply") from None
    except ValueError:  # Python limits integers to 4,300 digits
        raise JSONProblem("a number has too many digits") from None
    return value


def _reject_duplicate_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    values = dict(pairs)
    if len(values) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise JSONProblem(f"{printable(key)} appears twice")
            seen.add(key)
    return values


def _refuse(constant: str) -> object:
    raise JSONProblem(f"{constant} is not a number")
