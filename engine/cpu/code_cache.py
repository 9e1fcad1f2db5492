"""The compiled interpreter: compiled once on a machine, then read back.

Knows which sources its code is made of. Refuses to know how code is kept (`quant.cpu.native`).
"""

from functools import cache
from pathlib import Path

import quant.cpu
from engine import config
from quant.cpu.native import CodeFolder, Entry


def is_compiled(cache_dir: Path) -> bool:
    """Whether `load_interpreter` has nothing to compile."""
    return CodeFolder(cache_dir, _sources()).is_filled


@cache
def load_interpreter(cache_dir: Path | None) -> Entry:
    """The interpreter's entry point: read back, or compiled and kept. None keeps nothing."""
    from engine.cpu import interpreter

    folder = CodeFolder(cache_dir, _sources())
    folder.load_kernels()
    entry = folder.load_function(interpreter.enter, interpreter.ENTER_SIGNATURE)
    folder.forget_old()
    return entry


@cache
def _sources() -> tuple[Path, ...]:
    folders = [Path(__file__).parent, *(Path(folder) for folder in quant.cpu.__path__)]
    return (Path(config.__file__), *(path for folder in folders for path in sorted(folder.glob("*.py"))))
