"""Priority: the order of requests, the split of a step's token budget, and the waiting queue."""

from bisect import insort
from collections.abc import Iterable, Iterator, Mapping, Sequence

from engine.request import Request, ServiceClass

# seconds added to the arrival time
CLASS_DELAY = {ServiceClass.INTERACTIVE: 0.0, ServiceClass.NORMAL: 60.0, ServiceClass.BACKGROUND: 600.0}
PREEMPTION_BONUS = 60.0  # seconds by which a request moves ahead for each preemption
PRIORITY_STEP = 0.1  # seconds per unit of `Origin.priority`; even 100 units are less than the delay between two classes
MAX_PREEMPTIONS = 8  # limit per request
PINNED = float("-inf")
WEIGHTS = {ServiceClass.INTERACTIVE: 16, ServiceClass.NORMAL: 4, ServiceClass.BACKGROUND: 1}


def is_pinned(request: Request) -> bool:
    """Whether the request was preempted so often that it may restart only once more.

    It then starts only with all blocks that it can ever need.
    """
    return request.num_preemptions >= MAX_PREEMPTIONS - 1


def priority_key(request: Request) -> tuple[float, float, int]:
    """Return the key by which every queue is sorted, lowest first. No two requests have the same key."""
    rank = request.queue.arrival + CLASS_DELAY[request.origin.service] - PRIORITY_STEP * request.origin.priority
    rank -= PREEMPTION_BONUS * request.num_preemptions
    return (PINNED if is_pinned(request) else 0.0), rank, request.id


def split_token_budget(wanted: Sequence[tuple[Request, int]], budget: int) -> Mapping[int, int]:
    """Split a step's token budget among requests. `wanted` has the number of tokens that each could use.

    Returns request id -> tokens. The split is weighted max-min fair (Bertsekas and Gallager, Data Networks, 1992,
    section 6.5.2). The whole budget is used if the requests can use it. Tokens that do not divide evenly go to the
    requests that are listed first.
    """
    given: dict[int, int] = {}
    weight = sum(WEIGHTS[request.origin.service] for request, _ in wanted)
    for request, tokens in sorted(wanted, key=lambda it: it[1] / WEIGHTS[it[0].origin.service]):
        own = WEIGHTS[request.origin.service]
        given[request.id] = min(tokens, -(-budget * own // weight))
        budget -= given[request.id]
        weight -= own
    return given


class WaitingQueue:
    """All waiting requests. Each is either queued, or a follower of a request with the same prompt."""

    def __init__(self) -> None:
        self._queue: list[Request] = []  # sorted by priority
        self._followers: dict[int, list[Request]] = {}  # keyed by the id of their leader, which is queued or running
        self._leaders: dict[int, Request] = {}  # keyed by the id of a follower

    def __len__(self) -> int:
        return len(self._queue) + len(self._leaders)

    def __iter__(self) -> Iterator[Request]:
        yield from tuple(self._queue)
        for followers in tuple(self._followers.values()):
            yield from tuple(followers)

    def head(self, count: int) -> list[Request]:
        return self._queue[:count]

    def add(self, leader: Request, *followers: Request) -> None:
        """Queue a request, and make `followers`, which have the same prompt, wait for it."""
        self.follow(leader, followers)
        insort(self._queue, leader, key=priority_key)

    def follow(self, leader: Request, followers: Iterable[Request]) -> None:
        """Make requests wait for the prompt of a leader that is queued or running."""
        for follower in followers:
            self._followers.setdefault(leader.id, []).append(follower)
            self._leaders[follower.id] = leader

    def remove(self, request_id: int) -> Request | None:
        """Remove a request if it is waiting, and return it. The first of its followers then becomes the leader of the
        others.
        """
        if leader := self._leaders.pop(request_id, None):
            followers = self._followers[leader.id]
            request = next(follower for follower in followers if follower.id == request_id)
            followers.remove(request)
            return request
        found = next((request for request in self._queue if request.id == request_id), None)
        if found is not None:
            self._queue.remove(found)
            self.promote_followers(found)
        return found

    def dequeue(self, request: Request) -> None:
        """Remove a queued request that got a slot. Its followers keep following it."""
        self._queue.remove(request)

    def pop_followers(self, leader: Request, slots: int) -> tuple[Request, ...]:
        """Remove a leader's followers. Returns the first `slots` of them; the others are queued."""
        followers = self._remove_followers(leader)
        for follower in followers[slots:]:
            self.add(follower)
        return followers[:slots]

    def promote_followers(self, leader: Request) -> None:
        """Queue the first follower of a request that is no longer their leader. The other followers follow it."""
        if followers := self._remove_followers(leader):
            self.add(*followers)

    def _remove_followers(self, leader: Request) -> tuple[Request, ...]:
        followers = tuple(self._followers.pop(leader.id, ()))
        for follower in followers:
            del self._leaders[follower.id]
        return followers
