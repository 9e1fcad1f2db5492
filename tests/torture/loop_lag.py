"""How long other requests wait while a server is attacked. Run it on an idle machine.

    python -m tests.torture.loop_lag

A server of this process has a model that takes a step in a given time, and one client reads a stream of it. Attackers
in processes of their own send one request after the other, without a pause: prompts of 10 MB, in the fewest and in the
most pieces; schemas that are hard to compile; bodies that are bad in many ways. Printed: how late the event loop was,
and the time between two tokens of the stream, quiet and under attack, in milliseconds; and what each attack was told.
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

LOOK_SECONDS = 0.002  # between two looks at the loop's clock
CONTEXT = 8192


class PacedRunner(ControlledRunner):
    """The hash model; each step takes so many seconds, in which the interpreter is free."""

    def __init__(self, config: EngineConfig, seconds: float) -> None:
        super().__init__(config)
        self._seconds = seconds

    def launch(self, plan: StepPlan) -> HashTicket:
        time.sleep(self._seconds)
        return super().launch(plan)


def paced_engine(tokenizer: Tokenizer, seconds: float) -> Engine[HashTicket]:
    config = EngineConfig("hash", CONTEXT, 1 + 8 * CONTEXT // 16, max_step_tokens=256, max_running=32)
    return Engine(config, tokenizer.vocab_size, PacedRunner(config, seconds))


async def watch(seconds: float) -> list[float]:
    """How many seconds late the loop was, at each look."""
    late, end = [], time.perf_counter() + seconds
    while (before := time.perf_counter()) < end:
        await asyncio.sleep(LOOK_SECONDS)
        late.append(time.perf_counter() - before - LOOK_SECONDS)
    return late


def figures(values: list[float]) -> str:
    ordered = sorted(values)
    at = [ordered[min(len(ordered) - 1, round(share * len(ordered)))] * 1000 for share in (0.5, 0.99, 0.999, 1)]
    return "p50 {:6.1f}   p99 {:6.1f}   p99.9 {:6.1f}   worst {:6.1f}".format(*at) + f"   of {len(ordered)}"


def measured(server: LiveServer, seconds: float) -> tuple[list[float], list[float]]:
    """How late the loop was, and the times between tokens."""
    gaps: Queue[list[float]] = multiprocessing.get_context("spawn").Queue()
    reader = multiprocessing.get_context("spawn").Process(target=read_stream, args=(server.port, seconds, gaps))
    reader.start()
    late = server.call(watch(seconds))
    found = gaps.get()
    reader.join()
    return late, found


def attacked(server: LiveServer, names: list[str], number: int, measure: Callable[[], object]) -> Counter[str]:
    """`measure` while so many attackers are at it; what they were told."""
    context = multiprocessing.get_context("spawn")
    told: Queue[tuple[str, int]] = context.Queue()
    turns = [names[start::number] + names[: start or 0] for start in range(number)]
    processes = [context.Process(target=attack, args=(server.port, turn, told), daemon=True) for turn in turns]
    for process in processes:
        process.start()
    told.get()
    measure()
    for process in processes:
        process.kill()
        process.join()
    answers: Counter[str] = Counter()
    while not told.empty():
        name, status = told.get()
        answers[f"{name}: {status}"] += 1
    return answers


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", type=Path, help="a GGUF file, whose vocabulary and template are used")
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--step", type=float, default=0.01, help="seconds that a step takes")
    parser.add_argument("--attackers", type=int, default=2)
    parser.add_argument("--each", action="store_true", help="each attack alone, for as long")
    given = parser.parse_args()
    with GGUFFile(given.model) as file:
        tokenizer = from_gguf(file.metadata)
    names = list(attacks())
    host._tune_interpreter()
    with (
        ChatTemplateRenderer() as renderer,
        LiveServer("hash", paced_engine(tokenizer, given.step), tokenizer, renderer) as server,
    ):
        server.call(server.service.grammars.prepare())
        rounds = {name: [name] for name in names} if given.each else {"all": names}
        for what, chosen in {"quiet": list[str](), **rounds}.items():

            def measure(what: str = what) -> None:
                late, gaps = measured(server, given.seconds)
                print(f"{what:28}  loop late {figures(late)}\n{'':28}  tokens    {figures(gaps)}", flush=True)

            if chosen:
                for answer, count in attacked(server, chosen, given.attackers, measure).items():
                    print(f"{'':28}  {count:5} x {answer}")
            else:
                measure()


if __name__ == "__main__":
    main()
