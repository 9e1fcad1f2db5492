"""Measure ik_llama.cpp, a fork of llama.cpp for CPUs, with its own llama-bench and llama-batched-bench.

Their options and output differ from those of llama.cpp. Several streams are measured without flash attention: with it,
llama-batched-bench of ik-llama-cpp-python 0.1.5 stops at a failed assertion.
"""

from pathlib import Path

from app.bench.competitor import CompetitorFailed
from app.bench.workload import Load
from tests.bench.peers.llama_tools import LlamaTools, parsing_output, slot_tokens

IK_NAME = "ik_llama.cpp"
_FIELDS = ("PP", "T_PP s", "T_TG s")  # columns of the table that llama-batched-bench prints


class IkTools(LlamaTools):
    """The tools of a build of ik_llama.cpp in a folder."""

    name = IK_NAME

    def __init__(self, folder: Path, model: Path, threads: int) -> None:
        super().__init__("native build", lambda tool: _program(folder, tool), model, threads)

    def _decode_test(self, prompt_tokens: int, steps: int) -> tuple[str | int, ...]:
        return "-p", 0, "-n", 0, "-gp", f"{prompt_tokens},{steps}"

    def _batched(self, load: Load, steps: int) -> tuple[float, float]:
        context = load.streams * slot_tokens(load.context) + 256
        output = self._run_batched(load, steps, "-c", context, "-no-fa", with_errors=True)  # prints its table there
        with parsing_output("llama-batched-bench"):
            rows = [[cell.strip() for cell in line.split("|")] for line in output.splitlines() if line.startswith("|")]
            columns = dict(zip(rows[0], rows[-1], strict=True))
            _, prefill, decode = (float(columns[name]) for name in _FIELDS)
            return prefill, decode


def _program(folder: Path, tool: str) -> Path:
    path = folder / tool
    if not path.is_file():
        raise CompetitorFailed(f"{path} does not exist", "Give the folder of the built programs of ik_llama.cpp.")
    return path
