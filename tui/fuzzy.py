"""Fuzzy search: ranks names by how well they match the query."""

from collections.abc import Callable, Iterable
from typing import TypeVar

Item = TypeVar("Item")
_LOOSEST = 4  # each letter of the query may span at most 4 letters of the name


def rank(query: str, items: Iterable[Item], names: Callable[[Item], Iterable[str]], limit: int) -> list[Item]:
    """Return at most `limit` items that match, best first. Items with equal scores keep their order."""
    found = []
    for item in items:
        scores = [one for name in names(item) if (one := score(query.lower(), name.lower())) is not None]
        if scores:
            found.append((min(scores), item))
    return [item for _, item in sorted(found, key=lambda pair: pair[0])[:limit]]


def score(query: str, name: str) -> tuple[int, int] | None:
    """Return a score for a match, or None if there is none. Better matches have lower scores.

    From best to worst: equal, prefix, start of a word, substring, letters in order.
    """
    if name == query:
        return (0, 0)
    at = name.find(query)
    if at >= 0:
        return (1 if at == 0 else 3 if name[at - 1].isalnum() else 2, 0)
    span = _span(query, name)
    return None if span is None or span > _LOOSEST * len(query) else (4, span)


def _span(query: str, name: str) -> int | None:
    """Return the length of the substring of `name` in which the letters of `query` match in order, or None."""
    first = at = name.find(query[0])
    for letter in query[1:]:
        if at < 0:
            return None
        at = name.find(letter, at + 1)
    return None if at < 0 else at - first + 1
