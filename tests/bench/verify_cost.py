"""Measure what verifying drafts costs: `python -m tests.bench.verify_cost MODEL.gguf`, on an idle machine.

A step computes the next m tokens of one request, with a row of logits for each. Rounds alternate between all m. The
report has, for each context, the median milliseconds of a step and the ratio to the step with one token of the same
round: median and quartiles.
"""

import argparse
import itertools
import random
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from engine.backends.cpu.device import CpuStep
from engine.batch import Batch
from engine.config import BLOCK_SIZE, EngineConfig
from tests.engine.backends.cpu.recorded import advance, load_step, sequence
from tests.support.held_request import HeldRequest

TOKENS = (1, 2, 3, 4, 6, 8, 16)
CHUNK = 256  # tokens of the prompt per step
KV_TYPES = {"float16": torch.float16, "int8": torch.int8}


class Bench:
    """One request at a given context, whose next tokens are computed again and again."""

    def __init__(self, step: CpuStep, context: int, threads: int) -> None:
        self._step = step
        self._threads = threads
        self._context = context
        self._vocabulary = step.logits(1).values.shape[1]
        rng = random.Random(context)
        length = context + max(TOKENS)
        ids = [rng.randrange(1, self._vocabulary) for _ in range(length)]
        blocks = list(range(1, 1 - (-length // BLOCK_SIZE)))
        rng.shuffle(blocks)
        self._request: HeldRequest = sequence(1, ids, blocks)
        while self._request.num_computed < context:
            self._compute(self._batch(min(CHUNK, context - self._request.num_computed)))

    def round(self, order: Sequence[int]) -> Mapping[int, float]:
        """Return the seconds of a step by its number of tokens, the median of three steps each."""
        return {count: statistics.median(self._seconds(count) for _ in range(3)) for count in order}

    def _seconds(self, count: int) -> float:
        self._request.num_computed = self._context
        batch = self._batch(count)
        began = time.perf_counter()
        self._compute(batch)
        return time.perf_counter() - began

    def _batch(self, count: int) -> Batch:
        return advance([(self._request, count)], vocab_size=self._vocabulary, num_blocks=len(self._step._kv.pools[0]))

    def _compute(self, batch: Batch) -> None:
        self._step.fill(batch)
        self._step.workers.run(len(batch.token_ids), self._threads)
        self._step.logits(len(batch.logit_rows))


def report(rounds: Sequence[Mapping[int, float]]) -> None:
    for count in TOKENS:
        ratios = [times[count] / times[1] for times in rounds]
        low, middle, high = statistics.quantiles(ratios, n=4)
        milliseconds = 1000 * statistics.median(times[count] for times in rounds)
        print(f"{count:4} tokens {milliseconds:7.2f} ms, ratio {middle:.2f} ({low:.2f} to {high:.2f})", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--contexts", type=int, nargs="*", default=[128, 2000])
    parser.add_argument("--rounds", type=int, default=41)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--kv-type", choices=KV_TYPES, default="float16")
    arguments = parser.parse_args()
    context = max(arguments.contexts) + max(TOKENS)
    config = EngineConfig(
        "cpu", context_length=context, num_blocks=2 + context // BLOCK_SIZE, threads=arguments.threads
    )
    with tempfile.TemporaryDirectory() as code_cache:
        kv_type = KV_TYPES[arguments.kv_type]
        step = load_step(arguments.model, Path(code_cache), config, kv_type=kv_type)
        for context in arguments.contexts:
            bench = Bench(step, context, arguments.threads)
            orders = itertools.islice(itertools.cycle((TOKENS, TOKENS[::-1])), arguments.rounds)
            print(f"context {context}, {arguments.threads} threads, {arguments.kv_type}:")
            report([bench.round(order) for order in orders])


if __name__ == "__main__":
    main()
