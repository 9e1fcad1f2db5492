"""Plant faults in a copy of the source, one at a time, and check that a test fails for each.

`planted_faults` and `removed_guards` are tables of faults, and programs that run them.
"""

import argparse
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).parents[2]
COPIED = ("app", "engine", "quant", "tests", "tui", "pyproject.toml")
MEMORY_BYTES = 8 << 30  # address space of each process, since a fault may remove another limit


@dataclass(frozen=True)
class Fault:
    """A replacement in a file, where `old` occurs exactly once, and the tests of which one has to fail."""

    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    def source(self, tree: Path) -> tuple[str, str]:
        """Return the text of the file without the fault, and with it. Raises ValueError if `old` is not unique."""
        whole = (tree / self.file).read_text(encoding="utf-8")
        if whole.count(self.old) != 1:
            raise ValueError(f"{self.file} has {whole.count(self.old)} times {self.old!r}")
        return whole, whole.replace(self.old, self.new)


@contextmanager
def planted(tree: Path, fault: Fault) -> Iterator[None]:
    """Replace the text in the tree while the body runs."""
    path = tree / fault.file
    before, after = fault.source(tree)
    path.write_text(after, encoding="utf-8")
    try:
        yield
    finally:
        path.write_text(before, encoding="utf-8")


def passes(tree: Path, tests: Iterable[str]) -> bool:
    """Whether tests of the tree pass. A crash of Python is a failure. Raises RuntimeError if no test ran."""
    options = ("-q", "-x", "-p", "no:cacheprovider", "--timeout", "300")
    command = [sys.executable, "-B", "-m", "pytest", *options, *tests]
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    ended = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, check=False)
    if ended.returncode > 1:
        raise RuntimeError(ended.stdout + ended.stderr)
    return ended.returncode == 0


def run(faults: Mapping[str, Fault], about: str | None) -> int:
    """Plant the faults that the command line names, or all of them, and return the exit status.

    The status is 1 if the tests do not find a fault. `about` is the help of the program. Raises RuntimeError if the
    tests fail without any fault.
    """
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="a fault to plant; all if none is given")
    names = parser.parse_args().names or list(faults)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    with _copied_tree() as tree:
        if not passes(tree, dict.fromkeys(test for name in names for test in faults[name].tests)):
            raise RuntimeError("the tests fail without any fault")
        print(f"the tests pass without any of the {len(names)} faults", flush=True)
        missed = [name for name in names if not _is_found(tree, name, faults[name])]
    print(f"{len(names) - len(missed)} of {len(names)} faults were found")
    return 1 if missed else 0


@contextmanager
def _copied_tree() -> Iterator[Path]:
    with TemporaryDirectory() as folder:
        tree = Path(folder)
        for name in COPIED:
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(ROOT / name, tree)
        yield tree


def _is_found(tree: Path, name: str, fault: Fault) -> bool:
    with planted(tree, fault):
        found = not passes(tree, fault.tests)
    print(f"{'found ' if found else 'MISSED'} {name}", flush=True)
    return found
