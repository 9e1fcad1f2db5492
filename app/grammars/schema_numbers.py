"""Rewrites bounds of numbers so that the grammar library enforces them.

The library parses bounds as 64-bit floats, and fails on very large and very small ones. A bound that it would not keep
exactly is moved inward to the nearest one that it keeps. A reply may then use fewer numbers, but never others.
"""

import math
from fractions import Fraction
from typing import Final, NamedTuple

from app.grammars.frames import GrammarProblem
from app.grammars.schema_keywords import Json, Schema, number_in

LARGEST_INTEGER: Final = 2**63 - 1024  # the largest float below 2**63
MAX_MULTIPLE: Final = 10_000  # maximum number of digits of multipleOf as an integer; the library takes quadratic time
_POWERS_OF_TEN: Final = frozenset(10**power for power in range(10))  # multiples that the library handles fast
_LARGEST: Final = 10**18
_SMALLEST: Final = 1e-15  # smallest positive bound that the library supports
_EXACT: Final = 2**53
_LARGEST_FLOAT: Final = 2**1023

Number = int | float


class _Bound(NamedTuple):
    """A bound, and whether it is exclusive."""

    value: Number
    is_excluded: bool


def integer_bounds(schema: Schema) -> dict[str, Json]:
    """Return `minimum` and `maximum` of a schema of integers. Raises GrammarProblem if no integer matches."""
    least, most = _bound(schema, "minimum", "exclusiveMinimum", 1), _bound(schema, "maximum", "exclusiveMaximum", -1)
    low = None if least is None else math.floor(least.value) + 1 if least.is_excluded else math.ceil(least.value)
    high = None if most is None else math.ceil(most.value) - 1 if most.is_excluded else math.floor(most.value)
    low = None if low is None else max(_inwards(low, 1), -LARGEST_INTEGER)
    high = None if high is None else min(_inwards(high, -1), LARGEST_INTEGER)
    if low is not None and high is None and low >= _LARGEST:
        high = LARGEST_INTEGER
    if high is not None and low is None and high <= -_LARGEST:
        low = -LARGEST_INTEGER
    if low is not None and high is not None and low > high:
        raise GrammarProblem("There is no integer between its bounds, or none below 2**63.")
    return {key: bound for key, bound in (("minimum", low), ("maximum", high)) if bound is not None}


def number_bounds(schema: Schema) -> dict[str, Json]:
    """Return the bounds of a schema of numbers. Raises GrammarProblem if no number matches."""
    low, high = _bound(schema, "minimum", "exclusiveMinimum", 1), _bound(schema, "maximum", "exclusiveMaximum", -1)
    low = None if low is None else _handled(low, 1)
    high = None if high is None else _handled(high, -1)
    if low is not None and high is None and low.value >= _LARGEST // 10:
        high = _Bound(_LARGEST, is_excluded=False)
    if high is not None and low is None and high.value <= -_LARGEST // 10:
        low = _Bound(-_LARGEST, is_excluded=False)
    if low is not None and high is not None:
        excluded = low.is_excluded or high.is_excluded
        if low.value > high.value or (low.value == high.value and excluded):
            raise GrammarProblem("There is no number between its bounds, or none from 1e-15 to 1e18.")
    named = (("Minimum", low), ("Maximum", high))
    return {_key(side, bound): bound.value for side, bound in named if bound is not None}


def multiple(value: Number) -> Number:
    """Return a `multipleOf` that the library can enforce. Raises GrammarProblem."""
    whole = abs(Fraction(str(value)))
    while whole.denominator != 1:
        whole *= 10
    if whole > MAX_MULTIPLE and whole not in _POWERS_OF_TEN:
        raise GrammarProblem(
            f"{value} has too many digits: without its decimal point it may be at most {MAX_MULTIPLE:,}."
        )
    return abs(value)


def is_exact(value: Number) -> bool:
    """Whether the library keeps a constant number exactly."""
    if isinstance(value, float) or abs(value) <= _EXACT:
        return True
    return abs(value) < _LARGEST_FLOAT and int(float(value)) == value


def _bound(schema: Schema, inclusive_key: str, exclusive_key: str, sign: int) -> _Bound | None:
    """Return the tighter of two bounds. `sign` is 1 for lower bounds, -1 for upper bounds."""
    inclusive, exclusive = number_in(schema, inclusive_key), number_in(schema, exclusive_key)
    if schema.get(exclusive_key) is True:  # as in draft 4
        exclusive = inclusive
    if exclusive is not None and (inclusive is None or sign * exclusive >= sign * inclusive):
        return _Bound(exclusive, is_excluded=True)
    return None if inclusive is None else _Bound(inclusive, is_excluded=False)


def _handled(bound: _Bound, sign: int) -> _Bound:
    """Move a bound inward to a number that the library supports. `sign` is 1 for lower bounds, -1 for upper bounds."""
    value = sign * bound.value
    if value < -_LARGEST:
        return _Bound(sign * -_LARGEST, is_excluded=False)
    if 0 < value < _SMALLEST:
        return _Bound(sign * _SMALLEST, is_excluded=False)
    if -_SMALLEST < value < 0:
        return _Bound(0, is_excluded=False)
    return bound


def _key(side: str, bound: _Bound) -> str:
    return f"exclusive{side}" if bound.is_excluded else side.lower()


def _inwards(bound: int, sign: int) -> int:
    """Return the nearest integer that a float can represent: upward if `sign` is 1, else downward."""
    if abs(bound) <= _EXACT or abs(bound) > _LARGEST_FLOAT:
        return bound
    near = float(bound)
    if sign * int(near) >= sign * bound:
        return int(near)
    return int(math.nextafter(near, sign * math.inf))
