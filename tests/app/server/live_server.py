"""An application under a real server on a free port, with its own event loop in its own thread."""

import asyncio
import os
import random
import socket
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self, TypeVar

import uvicorn

from app.chat.service import ChatService
from app.chat.template import ChatTemplateRenderer
from app.chat.token_streams import TokenStreams
from app.host import server_config
from app.server.application import create_application
from app.text.tokenizer import Tokenizer
from engine.config import EngineConfig
from engine.core import Engine
from engine.request import SampledToken, StepPlan
from tests.hash_model import HashRunner, HashTicket

T = TypeVar("T")

# So that what hangs fails. Nothing here measures time.
HANGING_SECONDS = 120.0


class Clock:
    """Stands still until a test moves it."""

    def __init__(self) -> None:
        self.seconds = 1000.0

    def __call__(self) -> float:
        return self.seconds


class ControlledRunner(HashRunner):
    """The hash model; its steps can be held back and made to fail."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config, random.Random(0))
        self.failures = 0  # how many of the next steps fail
        self.steps_allowed: threading.Semaphore | None = None  # None: any number
        self.plans = 0

    @contextmanager
    def held(self) -> Iterator[threading.Semaphore]:
        """Each step waits for one release, while the body runs."""
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
    """A hash engine whose pool holds as many whole contexts as told, under a tokenizer's vocabulary."""
    num_blocks = 1 + contexts * context // 16
    config = EngineConfig("hash", context, num_blocks, max_step_tokens=budget, max_running=running)
    runner = ControlledRunner(config)
    return Engine(config, vocab_size, runner), runner


class LiveServer:
    """Serves one engine while it is entered. `clock` tells its seconds."""

    def __init__(
        self,
        name: str,
        engine: Engine[Any],
        tokenizer: Tokenizer,
        renderer: ChatTemplateRenderer,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.engine = engine
        self.streams = TokenStreams(engine, clock)
        self.service = ChatService(name, tokenizer, self.streams, renderer)
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        self._socket.bind(("127.0.0.1", 0))
        self.port: int = self._socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        application = create_application(self.service, host_names=["ingle.test"])
        config = server_config(application)
        config.timeout_graceful_shutdown = 10
        self._server = uvicorn.Server(config)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()), name="server")

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        async with self.streams:
            await self._server.serve([self._socket])

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work` on the server's loop."""
        assert self._loop is not None
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(HANGING_SECONDS)

    def tasks(self) -> int:
        """How many tasks the server's loop has."""

        async def count() -> int:
            return len(asyncio.all_tasks()) - 1

        return self.call(count())

    def step_until(self, steps: threading.Semaphore, *, running: int, waiting: int) -> None:
        """Once that many requests were submitted, let the engine take steps until it works on them in this way."""
        until(lambda: len(self.streams._live) == running + waiting)

        def stepped() -> bool:
            steps.release()
            return (self.engine.num_running, self.engine.num_waiting) == (running, waiting)

        until(stepped)

    def __enter__(self) -> Self:
        self._thread.start()
        until(lambda: self._server.started)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.should_exit = True
        self._thread.join()
        self._socket.close()


def descriptors() -> int:
    """Files this process has open."""
    return len(os.listdir("/dev/fd"))


def until(condition: Callable[[], bool]) -> None:
    """Return once it holds; fail when it never does."""
    deadline = time.monotonic() + HANGING_SECONDS
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.005)
