"""A real server that serves a chat model, with an engine whose steps a test can hold back."""

import os
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from app.generation.options import API_DEFAULTS, DefaultSampling
from app.generation.service import ChatService
from app.generation.template import ChatTemplateRenderer
from app.generation.token_streams import TokenStreams
from app.models.details import ModelDetails
from app.server.application import AccessPolicy, ServerContext, create_application
from app.server.boxes import Boxes
from app.server.dialects.ollama.store import ModelPulls
from app.text.tokenizer import Tokenizer
from engine.config import EngineConfig
from engine.core import Engine
from engine.step import SampledToken, StepPlan
from tests.app.server.fixed_models import fixed_models
from tests.app.server.served_application import ServedApplication
from tests.support.hash_model import HashRunner, HashTicket
from tests.support.processes import until


class Clock:
    """A clock that only a test advances."""

    def __init__(self) -> None:
        self.seconds = 1000.0

    def __call__(self) -> float:
        return self.seconds


class ControlledRunner(HashRunner):
    """The hash model, whose steps a test can hold back or make fail."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config, random.Random(0))
        self.failures = 0  # number of steps that will fail, counted from the next one
        self.steps_allowed: threading.Semaphore | None = None  # None: steps run without waiting
        self.plans = 0

    @contextmanager
    def held(self) -> Iterator[threading.Semaphore]:
        """Make each step wait for one release while the body runs."""
        self.steps_allowed = steps = threading.Semaphore(0)
        try:
            yield steps
        finally:
            self.steps_allowed = None
            steps.release(1000)

    def launch(self, plan: StepPlan) -> HashTicket:
        self.plans += 1
        if self.steps_allowed is not None:
            self.steps_allowed.acquire()
        return super().launch(plan)

    def collect(self, ticket: HashTicket) -> list[SampledToken]:
        sampled = super().collect(ticket)
        if self.failures:
            self.failures -= 1
            raise RuntimeError("injected")
        return sampled


def controlled_engine(
    vocab_size: int, *, context: int = 2048, running: int = 32, budget: int = 256, contexts: int = 4
) -> tuple[Engine[HashTicket], ControlledRunner]:
    """Return a hash engine for a vocabulary, whose KV pool holds the given number of whole contexts."""
    num_blocks = 1 + contexts * context // 16
    config = EngineConfig("hash", context, num_blocks, max_step_tokens=budget, max_running=running)
    runner = ControlledRunner(config)
    return Engine(config, vocab_size, runner), runner


class LiveServer(ServedApplication):
    """Serves one engine inside a `with` block. `clock` returns seconds."""

    def __init__(
        self,
        name: str,
        engine: Engine[Any],
        tokenizer: Tokenizer,
        renderer: ChatTemplateRenderer,
        clock: Callable[[], float] = time.monotonic,
        policy: AccessPolicy | None = None,
        aliases: Mapping[str, str] | None = None,
        state_dir: Path | None = None,
        describe: Callable[[], ModelDetails] | None = None,
        pulls: ModelPulls | None = None,
        sampling: DefaultSampling = API_DEFAULTS,
        generic_tools: bool = True,
        refuses_attachments: bool = False,
        boxes: Boxes | None = None,
    ) -> None:
        self.engine = engine
        self.streams = TokenStreams(engine, clock)
        self.service = ChatService(
            name,
            tokenizer,
            self.streams,
            renderer,
            sampling=sampling,
            generic_tools=generic_tools,
            refuses_attachments=refuses_attachments,
        )
        policy = policy or AccessPolicy(host_names=["ingle.test"])
        self.models = fixed_models(self.service, aliases, describe)
        super().__init__(create_application(self.models, ServerContext(policy, pulls, state_dir, boxes)))

    async def _main(self) -> None:
        async with self.streams:
            await super()._main()

    def step_until(self, steps: threading.Semaphore, *, running: int, waiting: int) -> None:
        """Wait until the requests are submitted, then release steps until `running` and `waiting` requests remain."""
        until(lambda: len(self.streams._live) == running + waiting)

        def is_reached() -> bool:
            steps.release()
            return (self.engine.num_running, self.engine.num_waiting) == (running, waiting)

        until(is_reached)


def descriptors() -> int:
    """Return the number of open file descriptors of this process."""
    return len(os.listdir("/dev/fd"))
