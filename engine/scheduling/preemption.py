"""Preemption: picks a victim, and takes away its slot and its blocks.

The victim is the last request in order of priority, never the first, so one request always makes progress. Its blocks
are swapped out to the host pools, or dropped and recomputed, whichever is faster by measurement (`KVMemory.swap_out`).
"""

from engine.kv.memory import KVMemory
from engine.request import Request, RequestStatus
from engine.scheduling.beam_groups import BeamGroups
from engine.scheduling.priority import is_pinned, priority_key
from engine.scheduling.running_set import RunningSet


class Preemption:
    """Preempts running requests. A beam group is preempted as a whole."""

    def __init__(self, requests: RunningSet, groups: BeamGroups, memory: KVMemory) -> None:
        self._requests = requests
        self._groups = groups
        self._memory = memory

    def pick_victim(self) -> Request:
        """Return the running request to preempt next: the last in priority.

        The oldest request of the highest class present is never returned.
        """
        running = self._requests.running.values()
        first = min(running, key=lambda it: (it.origin.service, it.queue.arrival, it.id))
        others = (it for it in running if not self._requests.same_group(it, first))
        return max(others, key=priority_key, default=first)

    def preempt(self, request: Request, to: Request) -> bool:
        """Preempt a running request, with its whole beam group, in favor of request `to`.

        `to` may be the request itself if it lacks blocks. Returns False if it cannot be preempted at all or yet.
        A pinned beam group is never preempted: it runs alone, with all the memory, and waits only for steps and copies.
        """
        own = self._requests.same_group(request, to)
        group = self._requests.group_of(request)
        busy = any(
            it.status is not RequestStatus.RUNNING or self._requests.parts_of(it)
            for it in (group.requests if group else [request])
        )
        if busy or (is_pinned(request) and (group or not own)) or not (own or priority_key(to) < priority_key(request)):
            return False
        if group:
            request = self._groups.collapse(group)
        self._memory.swap_out(request)
        request.num_preemptions += 1
        self._requests.requeue(request)
        return True
