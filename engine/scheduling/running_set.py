"""RunningSet: owns the scheduler's waiting, running, and ending requests, and the slots that they hold.

A beam group holds one slot per beam from its first step to its last, even while fewer of its beams run.
"""

from collections.abc import Callable, Iterable

from engine.counters import Counters
from engine.kv.memory import KVMemory
from engine.request import FinishReason, Request, RequestStatus, TokenEvent, TokenLogprobs
from engine.scheduling.beam import BeamGroup
from engine.scheduling.priority import WaitingQueue, is_pinned
from engine.step import SampledToken, ScheduledRequest


class RunningSet:
    """All requests of the scheduler, by state.

    Callers may read `waiting`, `running`, and `ending`, but must change them through the methods only.
    """

    def __init__(self, max_running: int, memory: KVMemory, counters: Counters, clock: Callable[[], float]) -> None:
        self.max_running = max_running
        self.waiting = WaitingQueue()
        self.running: dict[int, Request] = {}  # requests that have a slot, by id
        self.ending: dict[int, Request] = {}  # finished requests that are part of a step under way, by id
        self._memory = memory
        self._counters = counters
        self._clock = clock
        self._parts: dict[int, list[ScheduledRequest]] = {}  # request id -> parts that are launched but not collected
        self._groups: dict[int, BeamGroup] = {}  # keyed by the id of a result, or of a request that computes a beam

    def __bool__(self) -> bool:
        return bool(self.waiting or self.running or self.ending)

    # -- slots

    def slots(self, request: Request) -> int:
        """Return the number of slots that a request needs. A pinned beam group takes all slots and all memory."""
        group = self.group_of(request)
        if group is None:
            return 1
        return self.max_running if is_pinned(request) else group.beams.width

    @property
    def free_slots(self) -> int:
        """Number of slots that are neither held nor reserved for beams of running groups."""
        groups = {group for group in self._groups.values() if group.requests[0].id in self.running}
        reserved = sum(self.slots(group.requests[0]) - len(group.requests) for group in groups)
        return max(0, self.max_running - len(self.running) - reserved)

    def start(self, request: Request) -> None:
        """Give a waiting request a slot. If its blocks are still being copied to the device, its status is ARRIVING."""
        self.waiting.dequeue(request)
        self.running[request.id] = request
        if request.queue.started is None:
            request.queue.started = self._clock()
        arriving = self._memory.is_arriving(request)
        self.set_status(request, RequestStatus.ARRIVING if arriving else RequestStatus.RUNNING)

    def requeue(self, request: Request) -> None:
        """Take away the slot of a request that has lost its blocks, and queue the request again."""
        del self.running[request.id]
        self.set_status(request, RequestStatus.WAITING)
        self.waiting.add(request)

    def finish(self, request: Request) -> None:
        """End a request in any state. Its blocks are released once no step under way can write to them."""
        if self.running.pop(request.id, None):
            self.ending[request.id] = request
            self.waiting.promote_followers(request)
        else:
            self.waiting.remove(request.id)
        request.status = RequestStatus.FINISHED
        self._release(request)

    def withdraw(self, request: Request) -> None:
        """Remove a request that holds no blocks, so that another scheduler can queue it."""
        if self.running.pop(request.id, None):
            self.waiting.promote_followers(request)
            request.num_suspensions += 1
        else:
            self.waiting.remove(request.id)
        request.status = RequestStatus.WAITING
        request.num_computed = request.num_scheduled = 0

    def set_status(self, request: Request, status: RequestStatus) -> None:
        """Set a request's status. If it computes a beam, the results of its group get the same status."""
        request.status = status
        if group := self.group_of(request):
            for result in group.results:
                result.status, result.cache = status, request.cache

    # -- replies

    def extend(self, request: Request, computed: int, found: SampledToken | None) -> list[TokenEvent]:
        """Extend a request by the result of a step, and return the events: tokens, or progress of its prefill."""
        prompt = () if found is None else found.prompt_logprobs
        if found is None or (found.token_id is None and not found.problem):
            return [TokenEvent(request.id, None, num_computed=computed, prompt_logprobs=prompt)]
        if found.token_id is None:
            return self.end(request, found.reason, found.problem)
        followed = request.constraint.accept(found.token_id) if request.constraint is not None else ()
        events = [self._token(request, found.token_id, found.logprobs, prompt, last=not followed)]
        for number, token_id in enumerate(followed, 1):
            if events[-1].finish is None:
                events.append(self._token(request, token_id, last=number == len(followed)))
        return events

    def end(self, request: Request, finish: FinishReason, error: str = "") -> list[TokenEvent]:
        """End a request in any state, and return an event with the finish reason."""
        self.finish(request)
        return [TokenEvent(request.id, None, finish=finish, error=error)]

    def _token(
        self,
        request: Request,
        token_id: int,
        logprobs: TokenLogprobs | None = None,
        prompt: tuple[TokenLogprobs, ...] = (),
        *,
        last: bool,
    ) -> TokenEvent:
        """Append a token to a reply and return its event. `last` is false if more tokens forced by the grammar come
        after it.
        """
        request.output_ids.append(token_id)
        self._counters.generated_tokens += 1
        finish = self._finish_reason(request, token_id, last=last)
        if finish is not None:
            self.finish(request)
        return TokenEvent(request.id, token_id, logprobs, finish, prompt_logprobs=prompt)

    def _finish_reason(self, request: Request, token_id: int, *, last: bool) -> FinishReason | None:
        params = request.params
        if last and request.constraint is not None and request.constraint.ended:
            return FinishReason.STOP
        if token_id in params.stop_token_ids or (token_id in request.end_ids and not params.ignore_eos):
            return FinishReason.STOP
        return FinishReason.LENGTH if request.num_tokens >= self._memory.max_tokens(request) else None

    # -- requests that share the prompt of a leader

    def start_followers(self, leader: Request) -> tuple[Request, ...]:
        """Give slots to a leader's followers, which will sample their first token from the leader's logits.

        Followers that get no slot are queued.
        """
        followers = self.waiting.pop_followers(leader, self.free_slots)
        for follower in followers:
            follower.status = RequestStatus.FOLLOWING
            self.running[follower.id] = follower
        if followers:
            leader.status = RequestStatus.LEADING
        return followers

    def undo_followers(self, leader: Request, followers: Iterable[Request]) -> None:
        """Undo `start_followers` for a step that was not executed."""
        back = [self.running.pop(it.id) for it in followers if it.id in self.running]
        for follower in back:
            follower.status = RequestStatus.WAITING
        if leader.status is RequestStatus.LEADING:
            leader.status = RequestStatus.RUNNING
        if leader.status is RequestStatus.FINISHED and back:
            self.waiting.add(*back)
        else:
            self.waiting.follow(leader, back)

    # -- steps under way

    def parts_of(self, request: Request) -> list[ScheduledRequest]:
        """Return the request's parts of steps that are launched but not collected, oldest first."""
        return self._parts.get(request.id, [])

    def launch(self, part: ScheduledRequest) -> None:
        """Record a launched part. Its request's blocks must not be reused before the part is collected."""
        self._parts.setdefault(part.request.id, []).append(part)

    def collect(self, part: ScheduledRequest) -> None:
        """Remove a part whose step has been collected. If its request has finished, this may release the request's
        blocks.
        """
        self._parts[part.request.id].remove(part)
        self._release(part.request)

    def forget_parts(self) -> None:
        """Remove all launched parts, because their steps will not be collected."""
        self._parts.clear()
        for request in list(self.ending.values()):
            self._release(request)

    def _release(self, request: Request) -> None:
        if request.status is RequestStatus.FINISHED and not self.parts_of(request):
            self._parts.pop(request.id, None)
            self.ending.pop(request.id, None)
            self._memory.release(request)

    # -- beam groups

    def group_of(self, request: Request) -> BeamGroup | None:
        """Return the beam group of a request that computes one of its beams or is one of its results, if any."""
        return self._groups.get(request.id)

    def same_group(self, one: Request, other: Request) -> bool:
        """Whether two requests are the same or belong to one beam group, in which case they are preempted together."""
        group = self.group_of(one)
        return one is other or (group is not None and group is self.group_of(other))

    def group_of_result(self, result_id: int) -> BeamGroup | None:
        """Return the running beam group that has the result with this id, or None."""
        return self._groups.get(result_id)

    def add_group(self, group: BeamGroup) -> None:
        """Register a group whose beams are to run."""
        self._groups.update((request.id, group) for request in (*group.results, *group.requests))

    def add_beam(self, group: BeamGroup, request: Request) -> None:
        """Start another request of a running group, in a slot that is reserved for it."""
        self._groups[request.id] = group
        self.running[request.id] = request

    def drop_beam(self, request: Request) -> None:
        """End the request of a beam that did not survive, without an event."""
        self._groups.pop(request.id, None)
        self.finish(request)

    def drop_group(self, group: BeamGroup) -> None:
        """End a group and all its requests, without events."""
        self.set_status(group.requests[0], RequestStatus.FINISHED)
        for result in group.results:
            del self._groups[result.id]
        for request in group.requests:
            self.drop_beam(request)
