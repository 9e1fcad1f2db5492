"""Measure the host's time of a decode step on a card whose driver does nothing.

    python -m tests.engine.backends.cuda.host_step [--steps 2000]

The engine schedules, builds and sends batches, replays graphs, and collects samples, but no kernel runs. The host adds
this time to a step if the step does not overlap with the next one. Calls of a real driver take longer.
"""

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels are imported

import pytest

from engine.loading import ModelEngine
from engine.sampling_params import SamplingParams
from tests.engine.backends.cuda.idle_card import IdleCard, without_compilation
from tests.engine.models.tiny_llama import make

REQUESTS = (1, 8, 32, 128)
WARM_UP = 8  # steps
KINDS = {"greedy": {"temperature": 0}, "drawn": {"temperature": 1.0, "top_k": 20, "top_p": 0.9}}
PROMPT = 16  # tokens


def step_seconds(engine: ModelEngine, requests: int, steps: int, params: SamplingParams) -> float:
    """Return the median CPU seconds of a decode step of several requests. Other programs affect them little."""
    for number in range(requests):
        engine.add(engine.request(tuple((number + it) % 90 for it in range(PROMPT)), params, frozenset()))
    for _ in range(WARM_UP):
        engine.step()
    times = []
    for _ in range(steps):
        start = time.thread_time()
        engine.step()
        times.append(time.thread_time() - start)
    while engine.has_work:
        engine.step()
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the host's time of a decode step.")
    parser.add_argument("--steps", type=int, default=300, help="steps of each measurement")
    given = parser.parse_args()
    context = PROMPT + given.steps + 2 * WARM_UP
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder, without_compilation():
        card = IdleCard()
        card.install(patch)
        path = make(Path(folder), heads=2, kv_heads=1, layers=1).path
        engine = card.engine(path, context_length=context, drafts=False)
        for name, values in KINDS.items():
            params = SamplingParams(max_tokens=given.steps + WARM_UP, ignore_eos=True, **values)  # type: ignore[arg-type]
            for requests in REQUESTS:
                seconds = step_seconds(engine, requests, given.steps, params)
                print(f"{name}, {requests} requests: {1e6 * seconds:.0f} us", flush=True)


if __name__ == "__main__":
    main()
