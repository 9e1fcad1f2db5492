"""The compiled interpreter: compiled once on a machine, then read back.

Knows which sources its code is made of. Refuses to know how code is kept (`quant.cpu.native`).
"""

from functools import cache
from pathlib import Path

import quant.cpu
from engine import config
from quant.cpu.native import CodeFolder, Entry
from quant.cpu.tiers import Target


def is_compiled(cache_dir: Path, target: Target) -> bool:
    """Whether `load_interpreter` has nothing to compile."""
    return CodeFolder(cache_dir, _sources(), target).is_filled


@cache
def load_interpreter(cache_dir: Path | None, target: Target) -> Entry:
    """The interpreter's entry point, with kernels for `target`: read back, or compiled and kept. None keeps nothing.

    A process has one target.
    """
    from engine.cpu import interpreter

    folder = CodeFolder(cache_dir, _sources(), target)
    folder.load_kernels()
    entry = folder.load_function(interpreter.enter, interpreter.ENTER_SIGNATURE)
    folder.forget_old()
    return entry


@cache
def _sources() -> tuple[Path, ...]:
    folders = [Path(__file__).parent, *(Path(folder) for folder in quant.cpu.__path__)]
    return (Path(config.__file__), *(path for folder in folders for path in sorted(folder.glob("*.py"))))
