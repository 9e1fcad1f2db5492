"""Who yields its place, and what becomes of what it has computed. No torch.

The last in order yields, never the first: so there is always one that proceeds. Its blocks are copied to the host pool,
or given up and computed again where they are reused meanwhile, whichever is measured to be faster. Refuses to know what
the blocks are needed for.
"""

from engine.cost_model import CostModel
from engine.counters import Counters
from engine.kv.memory import KVMemory
from engine.request import Request, RequestStatus
from engine.scheduling.beam_groups import Searches, party
from engine.scheduling.priority import WaitingQueue, is_urgent, precedence


class Yielding:
    """`running` are the requests that have a seat, by id."""

    def __init__(
        self,
        memory: KVMemory,
        waiting: WaitingQueue,
        running: dict[int, Request],
        searches: Searches,
        costs: CostModel,
        counters: Counters,
    ) -> None:
        self._memory = memory
        self._waiting = waiting
        self._running = running
        self._searches = searches
        self._costs = costs
        self._counters = counters

    def last(self) -> Request:
        """Who yields next: the last in order, but never the oldest of the highest class there is."""
        first = min(self._running.values(), key=lambda it: (it.origin.service, it.arrival, it.id))
        others = (it for it in self._running.values() if party(it) is not party(first))
        return max(others, key=precedence, default=first)

    def yields(self, request: Request, to: Request) -> bool:
        """Have a running request give its blocks back, with its whole search, unless that cannot be now, or never for
        this one. A search that has become urgent has all there is, and only ever waits for steps and copies."""
        own, search = party(request) is party(to), request.search
        busy = any(
            it.steps_under_way or it.status is not RequestStatus.RUNNING
            for it in (search.requests if search else [request])
        )
        if busy or (is_urgent(request) and (search or not own)) or not (own or precedence(to) < precedence(request)):
            return False
        if search:
            request = self._searches.fold(search)
        self._memory.swap_out(request)
        request.num_preemptions += 1
        self.requeue(request)
        return True

    def requeue(self, request: Request) -> None:
        """It waits again."""
        del self._running[request.id]
        request.status = RequestStatus.WAITING
        self._searches.mirror(request)
        self._waiting.add(request)
