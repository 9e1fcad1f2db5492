"""Start an isolated Python process for one program, with only the libraries that it needs."""

import importlib.util
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO


def start_isolated(
    program: Path,
    options: Mapping[str, object],
    folders: Sequence[str],
    *,
    stdin: int | IO[bytes] = subprocess.PIPE,
    stdout: int | IO[bytes] = subprocess.PIPE,
) -> "subprocess.Popen[bytes]":
    """Start `program`. Its arguments are `options` as JSON and the folders from which it can import.

    The process runs no code of the user's environment, such as site packages. Raises OSError.
    """
    command = [sys.executable, "-I", "-S", str(program), json.dumps(options), *folders]
    return subprocess.Popen(command, stdin=stdin, stdout=stdout, stderr=subprocess.DEVNULL, bufsize=0)


def library_folders(*names: str) -> list[str]:
    """Return the folders of installed libraries, which an isolated Python does not search."""
    specs = (importlib.util.find_spec(name) for name in names)
    return sorted({str(Path(spec.origin).parents[1]) for spec in specs if spec is not None and spec.origin})
