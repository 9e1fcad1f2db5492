"""A kernel that needs no compiler. The processes that compile import only this module."""

import os
import time
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class FakeVariant:
    """A kernel whose code is a file with the id of the process that compiled it."""

    path: Path
    fails: bool = False
    seconds: float = 0.0  # duration of the compilation

    @property
    def name(self) -> str:
        return self.path.name

    def compile(self) -> None:
        if self.fails:
            raise RuntimeError("out of registers")
        time.sleep(self.seconds)
        self.path.write_text(str(os.getpid()))

    def is_cached(self) -> bool:
        return self.path.exists()
