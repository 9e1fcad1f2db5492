"""Who goes first: one number for each request, the lowest first. No torch.

It is a time, when a request would have had to come to stand where it does if all were equal: a class stands behind the
one before it by a fixed time, and a request that had to yield stands before those who came after it. So age and class
are weighed by the same scale, whoever waits long enough is first, and the number does not change while a request waits.
Refuses to know who runs and what there is to hand out.
"""

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
