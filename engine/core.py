"""The engine: requests in, token events out, one step at a time.

Owns scheduler and runner, and is driven by exactly one thread. Refuses to know text, clients and where models come
from.
"""

import itertools

from engine.config import EngineConfig, ModelConfig
from engine.request import Request, SamplingParams, TokenEvent
from engine.runner import ModelRunner
from engine.scheduler import Scheduler


class Engine:
    """One loaded model and the requests it is working on."""

    def __init__(self, model: ModelConfig, config: EngineConfig, runner: ModelRunner) -> None:
        self.model = model
        self.config = config
        self._scheduler = Scheduler(config)
        self._runner = runner
        self._ids = itertools.count(1)

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work

    def submit(self, prompt_ids: tuple[int, ...], params: SamplingParams, end_ids: frozenset[int]) -> Request:
        """Queue a request. Raises PromptTooLong or InvalidSampling; IndexError for an id not in the vocabulary."""
        params.check_vocabulary(self.model.vocab_size)
        if not all(0 <= token_id < self.model.vocab_size for token_id in (*prompt_ids, *end_ids)):
            raise IndexError(f"a token id is not in the vocabulary of {self.model.vocab_size}")
        request = Request(next(self._ids), prompt_ids, params, end_ids)
        self._scheduler.add(request)
        return request

    def step(self) -> list[TokenEvent]:
        """Plan, compute and record one step."""
        plan = self._scheduler.schedule()
        ticket = self._runner.launch(plan)
        return self._scheduler.update(plan, self._runner.collect(ticket))

    def abort(self, request_id: int) -> TokenEvent | None:
        """End a request in any state; None when it has ended already."""
        return self._scheduler.abort(request_id)

    def assert_empty(self) -> None:
        """Raise RuntimeError when a request or a block is still held."""
        self._scheduler.assert_empty()
