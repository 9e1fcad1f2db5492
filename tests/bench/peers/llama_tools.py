"""llama.cpp by its own measuring tools, llama-bench and llama-batched-bench: each figure is a process that loads the
model, warms up, and tells it.

What they count is what `app/bench/sample.py` counts: a prompt until the logits behind it, then steps of one token a
stream at a context that begins with the prompt. They feed random tokens of their own and sample none.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from app.bench.competitor import CompetitorFailed
from app.bench.sample import Sample
from app.bench.workload import Load, Prompts, Rate
from tests.bench.peers.llama_build import LlamaBuild
from tests.bench.peers.programs import output_of

NATIVE_NAME = "llama.cpp"
_SINGLE, _BATCHED = "llama-bench", "llama-batched-bench"
_SLOT_UNIT = 256  # tokens: a sequence's share of llama.cpp's cache is a multiple of it


class LlamaTools:
    """The tools of one build of llama.cpp."""

    name = NATIVE_NAME
    pid = None

    def __init__(self, build: LlamaBuild, model: Path, threads: int) -> None:
        self.build = build.description
        self._tool = build.tool
        self._model = model
        self._threads = threads

    def warm_up(self, load: Load, prompts: Prompts) -> None:
        """Each process warms itself up."""

    def measure(self, load: Load, prompts: Prompts) -> Sample:
        measure = self._by_llama_bench if load.streams == 1 else self._by_batched_bench
        return Sample(measure(load), load.streams)

    def _by_llama_bench(self, load: Load) -> Mapping[Rate, float]:
        steps = load.output_tokens - 1  # a reply's first token comes of the prompt
        reading = decoding = 0.0
        if load.rates & {Rate.PREFILL, Rate.END_TO_END}:
            reading = self._llama_bench("-p", load.prompt_tokens, "-n", 0)
        if load.rates & {Rate.DECODE, Rate.END_TO_END} and steps:
            decoding = self._llama_bench("-p", 0, "-n", steps, "-d", load.prompt_tokens)
        return _rates(load, reading, decoding)

    def _llama_bench(self, *test: str | int) -> float:
        """The seconds that one test took."""
        said = self._run(_SINGLE, *test, "-r", 1, "-o", "json")
        with _as_agreed(_SINGLE):
            [result] = json.loads(said)
            return float(result["avg_ns"]) / 1e9

    def _by_batched_bench(self, load: Load) -> Mapping[Rate, float]:
        steps = max(1, load.output_tokens - 1)
        shape = ("-npp", load.prompt_tokens, "-ntg", steps, "-npl", load.streams)
        room = ("-c", load.streams * slot_tokens(load.context))
        said = self._run(_BATCHED, *shape, *room, "-tb", self._threads, "--output-format", "jsonl")
        with _as_agreed(_BATCHED):
            [result] = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
            reading, decoding = float(result["t_pp"]), float(result["t_tg"])
        return _rates(load, reading, decoding if load.output_tokens > 1 else 0.0)

    def _run(self, tool: str, *arguments: str | int) -> str:
        command = [self._tool(tool), "-m", self._model, "-t", self._threads, *arguments]
        return output_of([str(part) for part in command])


def tools_for(loads: Iterable[Load]) -> list[str]:
    """The programs that measure the loads."""
    return sorted({_SINGLE if load.streams == 1 else _BATCHED for load in loads})


def slot_tokens(context: int) -> int:
    """The least size of a sequence's cache in llama.cpp that holds a context."""
    return -(-context // _SLOT_UNIT) * _SLOT_UNIT


def _rates(load: Load, reading: float, decoding: float) -> Mapping[Rate, float]:
    """The figures that are wanted, from the seconds of all prompts and those of all steps; 0: not measured."""
    tokens = load.streams * load.output_tokens
    rates = {}
    if reading:
        rates[Rate.PREFILL] = load.streams * load.prompt_tokens / reading
        rates[Rate.END_TO_END] = tokens / (reading + decoding)
    if decoding:
        rates[Rate.DECODE] = (tokens - load.streams) / decoding
    return {rate: value for rate, value in rates.items() if rate in load.rates}


@contextmanager
def _as_agreed(tool: str) -> Iterator[None]:
    """Reading inside fails with CompetitorFailed where a tool did not say what it was asked for."""
    try:
        yield
    except (ValueError, KeyError, TypeError) as problem:
        raise CompetitorFailed(
            f"{tool} says what this version does not understand", "Use a newer llama.cpp."
        ) from problem
