"""A fake build of llama.cpp: small programs with the names of the real ones."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path

PROGRAMS = ("llama-server", "llama-bench", "llama-batched-bench")
SOURCE = Path(__file__).with_name("fake_llama_program.py")


@dataclass(frozen=True)
class FakeLlama:
    folder: Path

    @property
    def server(self) -> Path:
        return self.folder / "llama-server"

    def calls(self, program: str) -> list[list[str]]:
        """Return the arguments of each run of a program so far."""
        lines = (self.folder / "arguments").read_text().splitlines()
        return [arguments for name, *arguments in map(json.loads, lines) if name == program]


def make(folder: Path) -> FakeLlama:
    folder.mkdir()
    for name in PROGRAMS:
        program = folder / name
        program.write_text(f"#!{sys.executable}\n{SOURCE.read_text()}")
        program.chmod(0o755)
    return FakeLlama(folder)
