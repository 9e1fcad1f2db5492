"""Simulates failing system calls that would change the disk, and a clock for the retries."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from io import FileIO

import pytest

from engine.kv.disk import segment_file


@dataclass
class Refusals:
    """Counts system calls that change the disk. Those from number `first` to number `last` raise `error`."""

    first: int
    last: int
    error: int
    calls: int = 0

    def count(self) -> None:
        self.calls += 1
        if self.first <= self.calls <= self.last:
            raise OSError(self.error, os.strerror(self.error))

    def install(self, patch: pytest.MonkeyPatch) -> None:
        refusals, opens = self, os.open

        def open_(path: str, flags: int, mode: int = 0o777) -> int:
            if flags & (os.O_WRONLY | os.O_CREAT):
                refusals.count()
            return opens(path, flags, mode)

        def counted(change: Callable[..., None]) -> Callable[..., None]:
            def call(*arguments: object, **options: object) -> None:
                refusals.count()
                change(*arguments, **options)

            return call

        class Refusing(FileIO):
            def write(self, data: memoryview, /) -> int:  # type: ignore[override]
                if refusals.calls + 1 == refusals.first and len(data) > 1:
                    return super().write(data[: len(data) // 2])  # the part that fits; the next call fails
                refusals.count()
                return super().write(data)

        patch.setattr(os, "open", open_)
        for name in ("mkdir", "chmod", "replace"):
            patch.setattr(os, name, counted(getattr(os, name)))
        patch.setattr(segment_file, "FileIO", Refusing)


@dataclass
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now
