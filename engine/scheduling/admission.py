"""Which of the waiting requests gets a seat, and with what it begins. No torch.

A request joins behind what is cached or saved of it, when its tokens and one more fit what is free; those of a lower
class may have to yield for that. One whose next block is just being computed by another waits until it can share it.
Refuses to know how many tokens a step takes.
"""

import enum
from collections.abc import Callable

from engine.config import BLOCK_SIZE, EngineConfig
from engine.counters import Counters
from engine.kv.memory import KVMemory
from engine.kv.prefixes import Prefix
from engine.request import Request, RequestStatus
from engine.scheduling.beam_groups import Searches
from engine.scheduling.preemption import Yielding
from engine.scheduling.priority import WaitingQueue, is_urgent


class Verdict(enum.Enum):
    """What became of a request that wants to join."""

    SEATED = enum.auto()
    LATER = enum.auto()  # another one is just computing what it needs next; those behind it may go first
    WAITS = enum.auto()  # for a seat or for blocks, which nobody behind it takes first


class Admission:
    """`running` are the requests that have a seat, by id."""

    def __init__(
        self,
        config: EngineConfig,
        memory: KVMemory,
        waiting: WaitingQueue,
        running: dict[int, Request],
        searches: Searches,
        yielding: Yielding,
        counters: Counters,
        clock: Callable[[], float],
    ) -> None:
        self._config = config
        self._memory = memory
        self._waiting = waiting
        self._running = running
        self._searches = searches
        self._yielding = yielding
        self._counters = counters
        self._clock = clock

    def admit(self, request: Request, preempted: list[Request]) -> Verdict:
        """Give a waiting request a seat and what is cached or saved of it, if its tokens and one more fit what is free.

        Where they do not, those of a lower class yield to it.
        """
        if not self._may_sit(request):
            return Verdict.WAITS
        prefix = self._memory.look_up(request, _most_cached(request))
        if prefix and self._is_coming(request, prefix):
            return Verdict.LATER
        while not self._seat(request, prefix):
            if self._memory.is_being_saved(request) or not self._running:
                return Verdict.WAITS
            last = self._yielding.last()
            if last.origin.service <= request.origin.service or not self._yielding.yields(last, request):
                return Verdict.WAITS
            preempted.append(last)
            # The prefix may have been evicted for what the other one saved.
            prefix = self._memory.look_up(request, _most_cached(request))
        return Verdict.SEATED

    def _may_sit(self, request: Request) -> bool:
        """Whether there is a seat, or one of a lower class has it: else nothing needs to be looked up for it."""
        lower = any(other.origin.service > request.origin.service for other in self._running.values())
        return bool(self.free_seats) or lower

    def _is_coming(self, request: Request, prefix: Prefix) -> bool:
        """Whether the block behind a request's cached prefix is being computed by one that goes before it."""
        return prefix.blocks < _most_cached(request) and any(
            other.origin.service <= request.origin.service and self._memory.is_computing(other, request, prefix.blocks)
            for other in self._running.values()
        )

    @property
    def free_seats(self) -> int:
        """That nobody has, and that are not kept for the beams of a search."""
        return max(0, self._config.max_running - len(self._running) - self._searches.seats_kept)

    def _seat(self, request: Request, prefix: Prefix | None) -> bool:
        if self.free_seats < self._searches.seats(request):
            return False
        stop = self._memory.room(request) if takes_all(request) else request.num_tokens + 1
        if not self._memory.join(request, prefix, stop):
            return False
        if self._memory.is_arriving(request):
            request.status = RequestStatus.ARRIVING
        else:
            self.start(request)
        if request.seated is None:
            request.seated = self._clock()
        self._waiting.remove_from_line(request)
        self._running[request.id] = request
        self._searches.mirror(request)
        return True

    def start(self, request: Request) -> None:
        """A request has its blocks and runs from the next step on."""
        request.status = RequestStatus.RUNNING
        if not request.num_preemptions:
            self._counters.prompt_tokens += len(request.prompt_ids)
            self._counters.prompts += request.cache


def _most_cached(request: Request) -> int:
    """Blocks of a request that need not be computed where they are cached.

    The last token always is: its logits are what the next one is picked from. A prompt to be reported on is computed
    whole, since cached keys and values tell no logits.
    """
    return (request.num_tokens - 1) // BLOCK_SIZE if request.params.prompt_logprobs is None else 0


def takes_all(request: Request) -> bool:
    """Whether it starts only with all blocks that it can ever need. An urgent search runs alone instead."""
    return is_urgent(request) and request.search is None
