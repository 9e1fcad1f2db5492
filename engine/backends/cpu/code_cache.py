"""Compiled code of the CPU engine: compiled once on a machine, then read back.

Knows which sources it is made of. Refuses to know how code is kept (`quant.cpu.native`).
"""

import contextlib
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import quant.cpu
from engine import config
from engine.private_folder import private_folder
from quant.cpu.kernel import CORE
from quant.cpu.layouts import Layout
from quant.cpu.native import CODE, CodeFolder, Entry
from quant.cpu.tiers import Target


def is_compiled(cache_dir: Path, target: Target, layouts: Iterable[Layout] = ()) -> bool:
    """Whether there is nothing to compile for weights of these layouts."""
    return _folder(cache_dir, target).holds(CORE, *(layout.part for layout in layouts))


def why_unkept(cache_dir: Path, target: Target) -> str:
    """Why compiled code cannot be kept there; an empty string where it can."""
    return _folder(cache_dir, target).problem


def load_code(cache_dir: Path | None, target: Target, layouts: Iterable[Layout]) -> Entry:
    """The interpreter's entry point, with kernels for `target` and for weights of these layouts.

    They are read back, or compiled and kept; None keeps nothing. A process has one target.
    """
    (entry, _), folder = _load_loops(cache_dir, target), _folder(cache_dir, target)
    for layout in layouts:
        folder.load_kernels(layout.part)
    return entry


def load_draw(cache_dir: Path | None, target: Target) -> Entry:
    """`engine.backends.cpu.drawing.draw_rows`, in the same way."""
    return _load_loops(cache_dir, target)[1]


@cache
def _load_loops(cache_dir: Path | None, target: Target) -> tuple[Entry, Entry]:
    from engine.backends.cpu import drawing, interpreter

    folder = _folder(cache_dir, target)
    folder.load_kernels()
    entry = folder.load_function(interpreter.enter, interpreter.ENTER_SIGNATURE)
    draw = folder.load_function(drawing.draw_rows, drawing.SIGNATURE)
    folder.remove_old_versions()
    return entry, draw


def _folder(cache_dir: Path | None, target: Target) -> CodeFolder:
    if cache_dir is not None:
        with contextlib.suppress(OSError):  # the folder itself says so
            private_folder(cache_dir / CODE)
    return CodeFolder(cache_dir, _sources(), target)


@cache
def _sources() -> tuple[Path, ...]:
    folders = [Path(__file__).parent, *(Path(folder) for folder in quant.cpu.__path__)]
    return (Path(config.__file__), *(path for folder in folders for path in sorted(folder.glob("*.py"))))
