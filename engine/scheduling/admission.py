"""Admission: decides which waiting requests get a slot, and which cached blocks they start with.

A request starts after its longest cached prefix, or with the blocks that were saved when it was preempted. Its tokens
and one more must fit into the free blocks; requests of a lower class may be preempted to free some. If another request
is computing the block after the cached prefix, the request waits until it can share that block.
"""

import enum

from engine.config import BLOCK_SIZE
from engine.kv.memory import KVMemory
from engine.kv.prefix_cache import Prefix
from engine.request import Request
from engine.scheduling.preemption import Preemption
from engine.scheduling.priority import is_pinned
from engine.scheduling.running_set import RunningSet


class Verdict(enum.Enum):
    """The result of `Admission.admit` for a waiting request."""

    STARTED = enum.auto()
    # another request is computing the next block that this request needs; later requests in the queue may start first
    DEFERRED = enum.auto()
    BLOCKED = enum.auto()  # the request waits for a slot or for blocks; later requests in the queue must not take them


class Admission:
    """Starts waiting requests, one per call."""

    def __init__(self, requests: RunningSet, preemption: Preemption, memory: KVMemory) -> None:
        self._requests = requests
        self._preemption = preemption
        self._memory = memory

    def admit(self, request: Request, preempted: list[Request]) -> Verdict:
        """Give a waiting request a slot and its cached or saved blocks, if its tokens and one more fit into the free
        blocks.

        If they do not fit, requests of a lower class are preempted and added to `preempted`.
        """
        if not self._may_start(request):
            return Verdict.BLOCKED
        prefix = self._memory.match(request, _most_cached(request))
        if prefix and self._is_being_computed(request, prefix):
            return Verdict.DEFERRED
        while not self._start(request, prefix):
            if self._memory.is_being_saved(request) or not self._requests.running:
                return Verdict.BLOCKED
            victim = self._preemption.pick_victim()
            if victim.origin.service <= request.origin.service or not self._preemption.preempt(victim, request):
                return Verdict.BLOCKED
            preempted.append(victim)
            # Match again, because saving the victim's blocks may have evicted the prefix.
            prefix = self._memory.match(request, _most_cached(request))
        return Verdict.STARTED

    def takes_all_blocks(self, request: Request) -> bool:
        """Whether the request starts only if all blocks that it can ever need are free.

        This is true of pinned requests, except for beam groups, which run alone instead.
        """
        return is_pinned(request) and self._requests.group_of(request) is None

    def _may_start(self, request: Request) -> bool:
        """Whether a slot is free, or could be taken from a request of a lower class.

        This check comes first because matching the prefix of a request that cannot start would be wasted work.
        """
        running = self._requests.running.values()
        return bool(self._requests.free_slots) or any(it.origin.service > request.origin.service for it in running)

    def _is_being_computed(self, request: Request, prefix: Prefix) -> bool:
        """Whether a request of the same or a higher class is computing the block after the cached prefix."""
        return prefix.blocks < _most_cached(request) and any(
            other.origin.service <= request.origin.service and self._memory.is_computing(other, request, prefix.blocks)
            for other in self._requests.running.values()
        )

    def _start(self, request: Request, prefix: Prefix | None) -> bool:
        if self._requests.free_slots < self._requests.slots(request):
            return False
        stop = self._memory.max_tokens(request) if self.takes_all_blocks(request) else request.num_tokens + 1
        if not self._memory.attach(request, prefix, stop):
            return False
        self._requests.start(request)
        return True


def _most_cached(request: Request) -> int:
    """Return the number of a request's blocks that may come from the cache.

    The last token is always computed, because the next token is sampled from its logits. A prompt whose
    log-probabilities were requested is computed in full, because cached keys and values yield no logits.
    """
    return (request.num_tokens - 1) // BLOCK_SIZE if request.params.prompt_logprobs is None else 0
