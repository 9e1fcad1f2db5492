"""The order in which requests are served, and the queue of those that wait."""

from bisect import insort
from collections.abc import Iterable, Iterator

from engine.request import Request, ServiceClass

CLASS_DELAY = {ServiceClass.INTERACTIVE: 0.0, ServiceClass.NORMAL: 60.0, ServiceClass.BACKGROUND: 600.0}  # seconds
YIELDED = 60.0  # seconds that a request is put forward for each time it had to yield
PRIORITY_STEP = 0.1  # seconds for each unit of `Origin.priority`: a hundred do not reach the next class
MOST_PREEMPTIONS = 8  # of one request
URGENT = float("-inf")


def is_urgent(request: Request) -> bool:
    """Whether it has yielded so often that it may only once more start: it then takes all blocks it can ever need."""
    return request.num_preemptions >= MOST_PREEMPTIONS - 1


def precedence(request: Request) -> tuple[float, float, int]:
    """Its place in every queue; no two requests have the same."""
    stands = request.arrival + CLASS_DELAY[request.origin.service] - PRIORITY_STEP * request.origin.priority
    stands -= YIELDED * request.num_preemptions
    return (URGENT if is_urgent(request) else 0.0), stands, request.id


class WaitingQueue:
    """Every request that waits, each once."""

    def __init__(self) -> None:
        self._line: list[Request] = []  # in order of precedence
        self._leaders: dict[int, Request] = {}  # of the followers, by their id

    def __len__(self) -> int:
        return len(self._line) + len(self._leaders)

    def __iter__(self) -> Iterator[Request]:
        yield from tuple(self._line)
        for leader in tuple(dict.fromkeys(self._leaders.values())):
            yield from tuple(leader.followers)

    def first_in_line(self, count: int) -> list[Request]:
        return self._line[:count]

    def add(self, leader: Request, *followers: Request) -> None:
        self.follow(leader, followers)
        insort(self._line, leader, key=precedence)

    def follow(self, leader: Request, followers: Iterable[Request]) -> None:
        """Have requests wait for one that has a place of its own, in line or elsewhere."""
        for follower in followers:
            leader.followers.append(follower)
            self._leaders[follower.id] = leader

    def remove(self, request_id: int) -> Request | None:
        """Take a request out, if it is here. Its followers stay, behind the first of them."""
        if leader := self._leaders.pop(request_id, None):
            request = next(follower for follower in leader.followers if follower.id == request_id)
            leader.followers.remove(request)
            return request
        found = next((request for request in self._line if request.id == request_id), None)
        if found is not None:
            self._line.remove(found)
            self.leave_followers(found)
        return found

    def take_followers(self, leader: Request, seats: int) -> tuple[Request, ...]:
        """The followers that get a seat now; the others get in line."""
        followers = self._dismiss(leader)
        for follower in followers[seats:]:
            self.add(follower)
        return followers[:seats]

    def leave_followers(self, leader: Request) -> None:
        """Have the followers of a request that has ended follow the first of them."""
        if followers := self._dismiss(leader):
            self.add(*followers)

    def _dismiss(self, leader: Request) -> tuple[Request, ...]:
        followers = tuple(leader.followers)
        leader.followers.clear()
        for follower in followers:
            del self._leaders[follower.id]
        return followers

    def remove_from_line(self, request: Request) -> None:
        """It has a seat now; its followers go on following it."""
        self._line.remove(request)
