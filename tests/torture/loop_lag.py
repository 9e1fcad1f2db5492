"""Measure how long other requests wait while a server is attacked. Run it on an idle machine.

    python -m tests.torture.loop_lag

This process runs a server whose model takes a fixed time per step, and one client reads a stream from it. Attackers in
separate processes send requests without a pause: prompts of 10 MB in one piece and in very many pieces, schemas that
are hard to compile, and invalid bodies. The report has the lag of the event loop and the time between two tokens of the
stream in milliseconds, with and without an attack, and the status of each attack.
"""

import argparse
import asyncio
import multiprocessing
import time
from collections import Counter
from collections.abc import Callable
from multiprocessing.queues import Queue
from pathlib import Path

from app.generation.template import ChatTemplateRenderer
from app.server import host
from app.text.gguf_tokenizer import from_gguf
from app.text.tokenizer import Tokenizer
from engine.config import EngineConfig
from engine.core import Engine
from engine.step import StepPlan
from quant.gguf import GGUFFile
from tests.app.server.live_server import ControlledRunner, LiveServer
from tests.support.hash_model import HashTicket
from tests.torture.attackers import attack, attacks, read_stream

SAMPLE_SECONDS = 0.002  # interval between two samples of the lag
CONTEXT = 8192


class PacedRunner(ControlledRunner):
    """The hash model, with steps that take at least `seconds` and let other threads run."""

    def __init__(self, config: EngineConfig, seconds: float) -> None:
        super().__init__(config)
        self._seconds = seconds

    def launch(self, plan: StepPlan) -> HashTicket:
        time.sleep(self._seconds)
        return super().launch(plan)


def paced_engine(tokenizer: Tokenizer, seconds: float) -> Engine[HashTicket]:
    config = EngineConfig("hash", CONTEXT, 1 + 8 * CONTEXT // 16, max_step_tokens=256, max_running=32)
    return Engine(config, tokenizer.vocab_size, PacedRunner(config, seconds))


async def sample_lag(seconds: float) -> list[float]:
    """Return the lag of the event loop at each sample, in seconds."""
    late, end = [], time.perf_counter() + seconds
    while (before := time.perf_counter()) < end:
        await asyncio.sleep(SAMPLE_SECONDS)
        late.append(time.perf_counter() - before - SAMPLE_SECONDS)
    return late


def figures(values: list[float]) -> str:
    ordered = sorted(values)
    at = [ordered[min(len(ordered) - 1, round(share * len(ordered)))] * 1000 for share in (0.5, 0.99, 0.999, 1)]
    return "p50 {:6.1f}   p99 {:6.1f}   p99.9 {:6.1f}   worst {:6.1f}".format(*at) + f"   of {len(ordered)}"


def measure_lag(server: LiveServer, seconds: float) -> tuple[list[float], list[float]]:
    """Return the lags of the event loop and the times between two tokens of a stream, in seconds."""
    gaps: Queue[list[float]] = multiprocessing.get_context("spawn").Queue()
    reader = multiprocessing.get_context("spawn").Process(target=read_stream, args=(server.port, seconds, gaps))
    reader.start()
    late = server.call(sample_lag(seconds))
    found = gaps.get()
    reader.join()
    return late, found


def measure_under_attack(
    server: LiveServer, names: list[str], num_attackers: int, measure: Callable[[], object]
) -> Counter[str]:
    """Call `measure` while `num_attackers` attack the server. Return the number of responses by attack and status."""
    context = multiprocessing.get_context("spawn")
    statuses: Queue[tuple[str, int]] = context.Queue()
    turns = [names[start::num_attackers] + names[: start or 0] for start in range(num_attackers)]
    processes = [context.Process(target=attack, args=(server.port, turn, statuses), daemon=True) for turn in turns]
    for process in processes:
        process.start()
    statuses.get()
    measure()
    for process in processes:
        process.kill()
        process.join()
    answers: Counter[str] = Counter()
    while not statuses.empty():
        name, status = statuses.get()
        answers[f"{name}: {status}"] += 1
    return answers


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", type=Path, help="a GGUF file; only its vocabulary and chat template are used")
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--step", type=float, default=0.01, help="duration of a step in seconds (default: 0.01)")
    parser.add_argument("--attackers", type=int, default=2)
    parser.add_argument("--each", action="store_true", help="run each attack separately, each for --seconds")
    given = parser.parse_args()
    with GGUFFile(given.model) as file:
        tokenizer = from_gguf(file.metadata)
    names = list(attacks())
    host.tune_interpreter()
    with (
        ChatTemplateRenderer() as renderer,
        LiveServer("hash", paced_engine(tokenizer, given.step), tokenizer, renderer) as server,
    ):
        server.call(server.service.grammars.prepare())
        rounds = {name: [name] for name in names} if given.each else {"all": names}
        for what, chosen in {"quiet": list[str](), **rounds}.items():

            def measure(what: str = what) -> None:
                late, gaps = measure_lag(server, given.seconds)
                print(f"{what:28}  loop late {figures(late)}\n{'':28}  tokens    {figures(gaps)}", flush=True)

            if chosen:
                for answer, count in measure_under_attack(server, chosen, given.attackers, measure).items():
                    print(f"{'':28}  {count:5} x {answer}")
            else:
                measure()


if __name__ == "__main__":
    main()
