"""Measure how much later the first token of a long prompt arrives because states are kept at the ends of messages.

    python -m tests.bench.mark_cost MODEL.gguf --tokens 4000 --rounds 7

Every round prefills two prompts of random tokens in turn, one with the marks of a chat of ten messages, one without.
"""

import argparse
import random
import statistics
import time
from pathlib import Path

from engine.load_options import LoadOptions
from engine.loading import ModelEngine, load_engine, open_checkpoint
from engine.sampling_params import SamplingParams

MESSAGES = 10


def seconds_to_first_token(engine: ModelEngine, prompt: tuple[int, ...], marks: tuple[int, ...]) -> float:
    began = time.perf_counter()
    engine.add(engine.request(prompt, SamplingParams(temperature=0, max_tokens=1), frozenset(), marks=marks))
    while engine.has_work:
        engine.step()
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    tokens: int = arguments.tokens
    with open_checkpoint(arguments.model) as checkpoint:
        engine = load_engine(checkpoint, LoadOptions(context_length=2 * tokens, threads=arguments.threads))
    chance, ratios = random.Random(1), []
    ends = tuple(tokens * number // MESSAGES - 7 for number in range(1, MESSAGES + 1))
    for number in range(arguments.rounds + 1):
        seconds = {
            marks: seconds_to_first_token(engine, tuple(chance.randrange(100, 2000) for _ in range(tokens)), marks)
            for marks in ((), ends)[:: 1 if number % 2 else -1]
        }
        if number:  # the first round warms up
            ratios.append(seconds[ends] / seconds[()])
            print(f"without {seconds[()]:.2f} s, with marks {seconds[ends]:.2f} s, ratio {ratios[-1]:.3f}", flush=True)
    print(f"median of {len(ratios)}: {statistics.median(ratios):.3f}")


if __name__ == "__main__":
    main()
