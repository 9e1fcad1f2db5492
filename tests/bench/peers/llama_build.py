"""Probe a build of llama.cpp: its programs, version, compiler, instruction sets, and server options."""

import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

from app.bench.child import does_not_start
from app.bench.competitor import CompetitorFailed
from tests.bench.peers.programs import output_of

_PROBE_SECONDS = 30.0
_VERSION = re.compile(r"build:? (\d+ \(\w+\) with .*)")
_SYSTEM = re.compile(r"system_info:.*")
_FLAG = re.compile(r"(\w+) = 1\b")


@dataclass(frozen=True, slots=True)
class LlamaBuild:
    """One build of llama.cpp."""

    server: Path
    description: str  # such as "build 1 (0c1e570) with GNU 12.2.0 for Linux x86_64: SSE3 AVX2 ..."
    server_options: frozenset[str]

    def tool(self, name: str) -> Path:
        """Return the path of another program of the build. Raises CompetitorFailed if it was not built."""
        path = self.server.with_name(name + self.server.suffix)
        if not path.is_file():
            raise CompetitorFailed(f"{path} does not exist", f"Build {name}, or compare the servers with --http.")
        return path


def probe(server: Path) -> LlamaBuild:
    """Read the description and the options of a build. Raises CompetitorFailed if the program is not a llama-server."""
    options = frozenset(re.findall(r"--[a-z][a-z-]+", output_of([str(server), "--help"])))
    if "--parallel" not in options:
        raise CompetitorFailed(f"{server} is not a llama-server", "Give the path of the llama-server program.")
    return LlamaBuild(server, describe(_startup_output(server)), options)


def describe(output: str) -> str:
    """Return the version and the instruction sets from llama-server's startup output."""
    version = found[1] if (found := _VERSION.search(output)) else "unknown"
    system = found[0] if (found := _SYSTEM.search(output)) else ""
    return f"build {version}: {' '.join(_FLAG.findall(system))}"


def _startup_output(server: Path) -> str:
    """Return the output that llama-server prints at startup without a model.

    It prints the description of its build before it loads the model, and exits because /dev/null is not a model.
    """
    command = [str(server), "-v", "--port", "0", "-m", os.devnull]
    try:
        result = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=_PROBE_SECONDS,
            check=False,
        )
    except OSError as problem:
        raise does_not_start(command, problem) from problem
    except subprocess.TimeoutExpired as problem:
        raise CompetitorFailed(f"{server} does not exit without a model") from problem
    return result.stdout.decode(errors="replace")
