"""Starts a Python that runs one program of ours: isolated, without site packages but those that it is given."""

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
    """The process of `program`, whose arguments are `options` as JSON and the folders to import from.

    No code of the user's environment runs in it. Raises OSError.
    """
    command = [sys.executable, "-I", "-S", str(program), json.dumps(options), *folders]
    return subprocess.Popen(command, stdin=stdin, stdout=stdout, stderr=subprocess.DEVNULL, bufsize=0)


def library_folders(*names: str) -> list[str]:
    """The folders that installed libraries are in, which may be outside an isolated Python's path."""
    specs = (importlib.util.find_spec(name) for name in names)
    return sorted({str(Path(spec.origin).parents[1]) for spec in specs if spec is not None and spec.origin})
