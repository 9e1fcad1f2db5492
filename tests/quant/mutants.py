"""Test a reader with damaged files. It must read or reject each one, and both must happen."""

import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

from quant.errors import ModelFileError

Refusal = TypeVar("Refusal", bound=ModelFileError)


def assert_read_or_rejected(
    path: Path,
    mutants: Iterable[bytes],
    read: Callable[[bytes], None],
    refusal: type[Refusal],
    check: Callable[[Refusal], None] = lambda error: None,
) -> None:
    """Call `read` for each mutant written to `path`, and `check` with the error if it is rejected.

    A mutant that fails is left at `path`. `pytest -s` shows the counts and the longest time.
    """
    refused = accepted = 0
    slowest = 0.0
    for data in mutants:
        path.write_bytes(data)
        start = time.perf_counter()
        try:
            read(data)
        except refusal as error:
            assert str(error).isprintable()
            check(error)
            refused += 1
        else:
            accepted += 1
        slowest = max(slowest, time.perf_counter() - start)
    print(f"{path.name}: {accepted} read, {refused} rejected, the slowest in {1000 * slowest:.0f} ms")
    assert refused > 0
    assert accepted > 0
