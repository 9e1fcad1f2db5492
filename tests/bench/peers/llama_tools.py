"""Measure llama.cpp with its own tools, llama-bench and llama-batched-bench.

Each measurement is a process that loads the model and warms up. The tools measure the same phases as
`app/bench/sample.py`: prefill up to the last logits, then decode steps of one token per stream, at a context that
starts with the prompt. They use random tokens and do not sample.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from app.bench.competitor import CompetitorFailed
from app.bench.sample import Sample
from app.bench.workload import Load, Prompts, Rate
from tests.bench.peers.programs import output_of

NATIVE_NAME = "llama.cpp"
_SINGLE, _BATCHED = "llama-bench", "llama-batched-bench"
_SLOT_UNIT = 256  # tokens; llama.cpp rounds the cache of each sequence up to a multiple of this


class LlamaTools:
    """The tools of one build of llama.cpp."""

    name = NATIVE_NAME
    pid = None

    def __init__(self, build: str, tool: Callable[[str], Path], model: Path, threads: int) -> None:
        """Store a description of the build, and the function that returns the path of a tool by its name."""
        self.build = build
        self._tool = tool
        self._model = model
        self._threads = threads

    def warm_up(self, load: Load, prompts: Prompts) -> None:
        """Do nothing, because the process of each measurement warms up itself."""

    def measure(self, load: Load, prompts: Prompts) -> Sample:
        measure = self._by_llama_bench if load.streams == 1 else self._by_batched_bench
        return Sample(measure(load), load.streams)

    def _by_llama_bench(self, load: Load) -> Mapping[Rate, float]:
        steps = load.output_tokens - 1  # the prefill produces the first token of a reply
        prefill = decode = 0.0
        if load.rates & {Rate.PREFILL, Rate.END_TO_END}:
            prefill = self._llama_bench("-p", load.prompt_tokens, "-n", 0)
        if load.rates & {Rate.DECODE, Rate.END_TO_END} and steps:
            decode = self._llama_bench(*self._decode_test(load.prompt_tokens, steps))
        return _rates(load, prefill, decode)

    def _decode_test(self, prompt_tokens: int, steps: int) -> tuple[str | int, ...]:
        """Return the arguments of llama-bench for `steps` decode steps after a prompt."""
        return "-p", 0, "-n", steps, "-d", prompt_tokens

    def _llama_bench(self, *test: str | int) -> float:
        """Return the seconds that one test took."""
        output = self._run(_SINGLE, *test, "-r", 1, "-o", "json")
        with parsing_output(_SINGLE):
            [result] = json.loads(output)
            return float(result["avg_ns"]) / 1e9

    def _by_batched_bench(self, load: Load) -> Mapping[Rate, float]:
        prefill, decode = self._batched(load, max(1, load.output_tokens - 1))
        return _rates(load, prefill, decode if load.output_tokens > 1 else 0.0)

    def _batched(self, load: Load, steps: int) -> tuple[float, float]:
        """Return the seconds of prefill and of decode steps of several streams."""
        context = load.streams * slot_tokens(load.context)
        output = self._run_batched(load, steps, "-c", context, "--output-format", "jsonl")
        with parsing_output(_BATCHED):
            [result] = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
            return float(result["t_pp"]), float(result["t_tg"])

    def _run_batched(self, load: Load, steps: int, *options: str | int, with_errors: bool = False) -> str:
        shape = ("-npp", load.prompt_tokens, "-ntg", steps, "-npl", load.streams)
        return self._run(_BATCHED, *shape, "-tb", self._threads, *options, with_errors=with_errors)

    def _run(self, tool: str, *arguments: str | int, with_errors: bool = False) -> str:
        command = [self._tool(tool), "-m", self._model, "-t", self._threads, *arguments]
        return output_of([str(part) for part in command], with_errors=with_errors)


def tools_for(loads: Iterable[Load]) -> list[str]:
    """Return the names of the programs that measure the loads."""
    return sorted({_SINGLE if load.streams == 1 else _BATCHED for load in loads})


def slot_tokens(context: int) -> int:
    """Return the smallest cache size per sequence in llama.cpp that fits a context."""
    return -(-context // _SLOT_UNIT) * _SLOT_UNIT


def _rates(load: Load, prefill: float, decode: float) -> Mapping[Rate, float]:
    """Return the requested rates. `prefill` and `decode` are seconds for all prompts and for all steps; 0: not
    measured.
    """
    tokens = load.streams * load.output_tokens
    rates = {}
    if prefill:
        rates[Rate.PREFILL] = load.streams * load.prompt_tokens / prefill
        rates[Rate.END_TO_END] = tokens / (prefill + decode)
    if decode:
        rates[Rate.DECODE] = (tokens - load.streams) / decode
    return {rate: value for rate, value in rates.items() if rate in load.rates}


@contextmanager
def parsing_output(tool: str) -> Iterator[None]:
    """Raise CompetitorFailed if the body cannot parse the tool's output."""
    try:
        yield
    except (ValueError, LookupError, TypeError) as problem:
        raise CompetitorFailed(
            f"{tool} printed output that this version cannot parse", "Use a newer llama.cpp."
        ) from problem
