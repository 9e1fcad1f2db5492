"""What a build of llama.cpp is: where its programs are, its version, compiler and instruction sets, and the options
that its server knows."""

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
    description: str  # "build 1 (0c1e570) with GNU 12.2.0 for Linux x86_64: SSE3 AVX2 ..."
    server_options: frozenset[str]

    def tool(self, name: str) -> Path:
        """Another program of the build, beside the server. Raises CompetitorFailed if it was not built."""
        path = self.server.with_name(name + self.server.suffix)
        if not path.is_file():
            raise CompetitorFailed(f"There is no {path}", f"Build {name} too, or compare the servers with --http.")
        return path


def probe(server: Path) -> LlamaBuild:
    """Ask a llama-server what it is. Raises CompetitorFailed when it is none."""
    options = frozenset(re.findall(r"--[a-z][a-z-]+", output_of([str(server), "--help"])))
    if "--parallel" not in options:
        raise CompetitorFailed(f"{server} is not a llama-server", "Give the path of the llama-server program.")
    return LlamaBuild(server, describe(_told_at_start(server)), options)


def describe(said: str) -> str:
    """Version and instruction sets from what it tells at its start."""
    version = found[1] if (found := _VERSION.search(said)) else "unknown"
    system = found[0] if (found := _SYSTEM.search(said)) else ""
    return f"build {version}: {' '.join(_FLAG.findall(system))}"


def _told_at_start(server: Path) -> str:
    """It describes its build before it looks at the model, and ends when that is none."""
    command = [str(server), "-v", "--port", "0", "-m", os.devnull]
    try:
        done = subprocess.run(
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
        raise CompetitorFailed(f"{server} does not end without a model") from problem
    return done.stdout.decode(errors="replace")
