"""The cache of compiled code for the CPU engine, which is compiled once per machine.

The storage format is in `quant.cpu.native`. The cache key covers the sources of this package and of `quant.cpu`.
"""

import contextlib
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import quant.cpu
from engine import config, cpu_threads
from engine.private_folder import private_folder
from quant.cpu.kernel import CORE
from quant.cpu.layouts import Layout
from quant.cpu.native import CODE, CodeFolder, Entry
from quant.cpu.tiers import Target


def is_compiled(cache_dir: Path, target: Target, layouts: Iterable[Layout] = ()) -> bool:
    """Whether the cache holds all machine code for weights of these layouts."""
    return _folder(cache_dir, target).holds(CORE, *(layout.part for layout in layouts))


def why_not_cached(cache_dir: Path, target: Target) -> str:
    """Return why compiled code cannot be stored in `cache_dir`; an empty string if it can."""
    return _folder(cache_dir, target).problem


def load_code(cache_dir: Path | None, target: Target, layouts: Iterable[Layout]) -> Entry:
    """Return the entry point of the interpreter, compiled for `target`, with kernels for weights of these layouts.

    Code is loaded from the cache, or compiled and stored there. With cache_dir None nothing is stored. A process uses
    only one target.
    """
    (entry, _), folder = _load_loops(cache_dir, target), _folder(cache_dir, target)
    for layout in layouts:
        folder.load_kernels(layout.part)
    return entry


def load_draw(cache_dir: Path | None, target: Target) -> Entry:
    """Return the compiled `engine.backends.cpu.token_draw.draw_rows`. The cache is used as in `load_code`."""
    return _load_loops(cache_dir, target)[1]


@cache
def _load_loops(cache_dir: Path | None, target: Target) -> tuple[Entry, Entry]:
    from engine.backends.cpu import interpreter, token_draw

    folder = _folder(cache_dir, target)
    folder.load_kernels()
    entry = folder.load_function(interpreter.enter, interpreter.ENTER_SIGNATURE)
    draw = folder.load_function(token_draw.draw_rows, token_draw.SIGNATURE)
    folder.remove_old_versions()
    return entry, draw


def _folder(cache_dir: Path | None, target: Target) -> CodeFolder:
    if cache_dir is not None:
        with contextlib.suppress(OSError):  # CodeFolder reports the problem
            private_folder(cache_dir / CODE)
    return CodeFolder(cache_dir, _sources(), target)


@cache
def _sources() -> tuple[Path, ...]:
    folders = [Path(__file__).parent, *(Path(folder) for folder in quant.cpu.__path__)]
    shared = Path(config.__file__), Path(cpu_threads.__file__)
    return (*shared, *(path for folder in folders for path in sorted(folder.glob("*.py"))))
