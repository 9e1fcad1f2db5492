"""RunningSet: the one owner of a scheduler's requests, those that wait, run, and end, and of the slots they take.

A beam group takes a slot for each of its beams from its first to its last step, also while fewer of them run.
"""

from collections.abc import Callable, Iterable

from engine.counters import Counters
from engine.kv.memory import KVMemory
from engine.request import FinishReason, Request, RequestStatus, TokenEvent, TokenLogprobs
from engine.scheduling.beam import BeamGroup
from engine.scheduling.priority import WaitingQueue, is_pinned
from engine.step import SampledToken, ScheduledRequest


class RunningSet:
    """Callers read `waiting`, `running`, and `ending`; the methods change them."""

    def __init__(self, max_running: int, memory: KVMemory, counters: Counters, clock: Callable[[], float]) -> None:
        self.max_running = max_running
        self.waiting = WaitingQueue()
        self.running: dict[int, Request] = {}  # by id: the requests that have a slot
        self.ending: dict[int, Request] = {}  # by id: finished, but part of a step under way
        self._memory = memory
        self._counters = counters
        self._clock = clock
        self._parts: dict[int, list[ScheduledRequest]] = {}  # by request id: launched and not collected
        self._groups: dict[int, BeamGroup] = {}  # by the id of a result, or of a request that computes a beam

    def __bool__(self) -> bool:
        return bool(self.waiting or self.running or self.ending)

    # -- slots

    def slots(self, request: Request) -> int:
        """Slots that a request takes. A beam group that was preempted often runs alone: it then has all memory."""
        group = self.group_of(request)
        if group is None:
            return 1
        return self.max_running if is_pinned(request) else group.beams.width

    @property
    def free_slots(self) -> int:
        """Slots that no request has and that are not reserved for beams to come."""
        groups = {group for group in self._groups.values() if group.requests[0].id in self.running}
        reserved = sum(self.slots(group.requests[0]) - len(group.requests) for group in groups)
        return max(0, self.max_running - len(self.running) - reserved)

    def start(self, request: Request) -> None:
        """Give a waiting request its slot. It runs once its blocks are on the device."""
        self.waiting.dequeue(request)
        self.running[request.id] = request
        if request.queue.started is None:
            request.queue.started = self._clock()
        arriving = self._memory.is_arriving(request)
        self.set_status(request, RequestStatus.ARRIVING if arriving else RequestStatus.RUNNING)

    def requeue(self, request: Request) -> None:
        """Take the slot of a request that has lost its blocks: it waits again."""
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

    def set_status(self, request: Request, status: RequestStatus) -> None:
        """Change a request's status, and that of the results if it computes their beams."""
        request.status = status
        if group := self.group_of(request):
            for result in group.results:
                result.status, result.cache = status, request.cache

    # -- replies

    def extend(self, request: Request, computed: int, found: SampledToken | None) -> list[TokenEvent]:
        """What a step means for one of its requests: a token, or that a part of the prompt was computed."""
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
        """End a request in any state, with an event that carries the reason."""
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
        """The reply goes on with a token, the `last` of those that its constraint knows of."""
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

    # -- requests that wait for the prompt of another

    def start_followers(self, leader: Request) -> tuple[Request, ...]:
        """Give slots to requests that pick their first token with their leader; the others join later by the cache."""
        followers = self.waiting.pop_followers(leader, self.free_slots)
        for follower in followers:
            follower.status = RequestStatus.FOLLOWING
            self.running[follower.id] = follower
        if followers:
            leader.status = RequestStatus.LEADING
        return followers

    def undo_followers(self, leader: Request, followers: Iterable[Request]) -> None:
        """The step that `start_followers` was for has not happened."""
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
        """A request's parts in steps that are launched and not collected, oldest first."""
        return self._parts.get(request.id, [])

    def launch(self, part: ScheduledRequest) -> None:
        """A part is under way: its request's blocks must not be reused before it is collected."""
        self._parts.setdefault(part.request.id, []).append(part)

    def collect(self, part: ScheduledRequest) -> None:
        """A part is not under way any more. If its request has finished, its blocks may be released now."""
        self._parts[part.request.id].remove(part)
        self._release(part.request)

    def forget_parts(self) -> None:
        """No step under way will be collected."""
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
        """The group that a request computes a beam of, or is a result of."""
        return self._groups.get(request.id)

    def same_group(self, one: Request, other: Request) -> bool:
        """Whether two requests are the same or belong to one beam group, and so are preempted together."""
        group = self.group_of(one)
        return one is other or (group is not None and group is self.group_of(other))

    def group_of_result(self, result_id: int) -> BeamGroup | None:
        """The group of a result that has not ended."""
        return self._groups.get(result_id)

    def add_group(self, group: BeamGroup) -> None:
        """Register a group whose beams are to run."""
        self._groups.update((request.id, group) for request in (*group.results, *group.requests))

    def add_beam(self, group: BeamGroup, request: Request) -> None:
        """Run another request of a running group, in one of the slots that are reserved for it."""
        self._groups[request.id] = group
        self.running[request.id] = request

    def drop_beam(self, request: Request) -> None:
        """End a request whose beam ends, without an event."""
        self._groups.pop(request.id, None)
        self.finish(request)

    def drop_group(self, group: BeamGroup) -> None:
        """End a group with all its requests."""
        self.set_status(group.requests[0], RequestStatus.FINISHED)
        for result in group.results:
            del self._groups[result.id]
        for request in group.requests:
            self.drop_beam(request)
