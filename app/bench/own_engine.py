"""The engine in this process, driven step by step, without threads, text, or HTTP."""

import os
import time
from typing import Any

from app.bench.competitor import OWN_NAME, UnsuitableLoad, check_context, own_build
from app.bench.sample import Sample, Timeline, sample_of
from app.bench.workload import Load, Prompts
from engine.config import BLOCK_SIZE
from engine.core import Engine
from engine.errors import EngineError
from engine.request import FinishReason, TokenEvent
from engine.sampling_params import SamplingParams


class OwnEngine:
    """A loaded engine that no other program uses."""

    name = OWN_NAME

    def __init__(self, engine: Engine[Any]) -> None:
        self._engine = engine

    @property
    def build(self) -> str:
        return own_build(self._engine.config.backend)

    @property
    def pid(self) -> int:
        return os.getpid()

    def check_load(self, load: Load) -> None:
        """Raise UnsuitableLoad if the load has too many streams, or streams that are too long."""
        config = self._engine.config
        if load.streams > config.max_running:
            raise UnsuitableLoad(
                f"The load has {load.streams} streams, but the engine runs at most {config.max_running} at once",
                f"Use --concurrency {config.max_running} or less.",
            )
        check_context(load, config.context_length)

    def overflows_cache(self, load: Load) -> bool:
        """Whether the streams of the load do not fit the KV cache together, so that some are preempted."""
        return load.streams * -(-load.context // BLOCK_SIZE) > self._engine.config.num_blocks - 1

    def warm_up(self, load: Load, prompts: Prompts) -> None:
        self.measure(load, prompts)

    def measure(self, load: Load, prompts: Prompts) -> Sample:
        # A draft would be right too often: the output for random tokens repeats itself.
        params = SamplingParams(temperature=0, max_tokens=load.output_tokens, ignore_eos=True, drafts=False)
        requests = [self._engine.request(prompt, params, frozenset()) for prompt in prompts]
        arrivals: dict[int, list[float]] = {request.id: [] for request in requests}
        sent = time.perf_counter()
        for request in requests:
            self._engine.add(request)
        while self._engine.has_work:
            events = self._engine.step()
            now = time.perf_counter()
            for event in events:
                _check(event)
                if event.token_id is not None:
                    arrivals[event.request_id].append(now)
        return sample_of(load, [Timeline(sent, times, len(times)) for times in arrivals.values()])


def _check(event: TokenEvent) -> None:
    if event.finish is FinishReason.ERROR:
        remedy = "Run ingle doctor. If it finds nothing, report this as a bug."
        raise EngineError(f"The engine failed: {event.error}", remedy)
