"""Damaged files, one after the other: each is read or refused, and both happen."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

from quant.errors import ModelFileError

Refusal = TypeVar("Refusal", bound=ModelFileError)


def assert_read_or_refused(
    path: Path,
    mutants: Iterable[bytes],
    read: Callable[[bytes], None],
    refusal: type[Refusal],
    check: Callable[[Refusal], None] = lambda error: None,
) -> None:
    """`read` is called with the content of `path`, and `check` with what it is refused by. A mutant that fails is left
    at `path`."""
    refused = accepted = 0
    for data in mutants:
        path.write_bytes(data)
        try:
            read(data)
        except refusal as error:
            assert str(error).isprintable()
            check(error)
            refused += 1
        else:
            accepted += 1
    assert refused > 0
    assert accepted > 0
