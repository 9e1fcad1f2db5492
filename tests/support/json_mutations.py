"""Random changes of JSON objects: values are replaced, removed, repeated, or moved."""

import copy
import random
from collections.abc import Iterator
from typing import Any

NUMBERS = (0, 1, -1, 3, 2**31, 2**32, 2**53, 2**63 - 1, 2**64 - 1, 10**30, 0.5, -0.0, 1e308, float("nan"), float("inf"))
OTHERS: tuple[Any, ...] = (
    None, True, False, "", "a", "\ud800", "\0", "é\u202e", "x" * 5000, [], {}, [[]], {"type": "x"}, [1, "a"],
)  # fmt: skip

Entry = tuple[Any, Any]  # a list or an object, and an index or a key of it


def mutated(whole: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """Return a copy of an object with one to three changes, at any depth."""
    changed = copy.deepcopy(whole)
    for _ in range(rng.randint(1, 3)):
        if changed:
            change(changed, random_entry(changed, rng), rng)
    return changed


def random_entry(whole: dict[str, Any], rng: random.Random) -> Entry:
    """Return a random entry. Values in a long list are not more likely than the fields beside the list."""
    container: Any = whole
    while True:
        key = rng.choice(keys_of(container))
        if not isinstance(container[key], dict | list) or not container[key] or rng.random() < 0.3:
            return container, key
        container = container[key]


def change(whole: dict[str, Any], entry: Entry, rng: random.Random) -> None:
    """Remove an entry, repeat it, or replace its value by a hostile one or that of another entry."""
    container, key = entry
    kind = rng.randrange(5)
    if kind == 0:
        del container[key]
    elif kind == 1 and isinstance(container, list):
        container.append(copy.deepcopy(container[key]))
    elif kind == 2:
        other, position = rng.choice(list(all_entries(whole)))
        container[key] = copy.deepcopy(other[position])
    elif kind == 3 and isinstance(container[key], int):
        container[key] += rng.choice([1, -1, container[key]])
    else:
        container[key] = copy.deepcopy(rng.choice(NUMBERS + OTHERS))


def all_entries(value: Any) -> Iterator[Entry]:
    if isinstance(value, dict | list):
        for key in keys_of(value):
            yield value, key
            yield from all_entries(value[key])


def keys_of(container: Any) -> list[Any]:
    return list(container) if isinstance(container, dict) else list(range(len(container)))
