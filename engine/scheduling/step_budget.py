"""How many tokens a step computes, and how they are divided among its requests."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from engine.request import Request, ServiceClass
from engine.step import StepPlan

WEIGHTS = {ServiceClass.INTERACTIVE: 16, ServiceClass.NORMAL: 4, ServiceClass.BACKGROUND: 1}


def shares(wanted: Sequence[tuple[Request, int]], budget: int) -> Mapping[int, int]:
    """Tokens of each request by its id: together at most `budget`, and all of it where so much is wanted.

    Weighted max-min fairness (Bertsekas and Gallager, Data Networks, 1992, section 6.5.2); first come, first served
    for what does not divide evenly.
    """
    given: dict[int, int] = {}
    weight = sum(WEIGHTS[request.origin.service] for request, _ in wanted)
    for request, tokens in sorted(wanted, key=lambda it: it[1] / WEIGHTS[it[0].origin.service]):
        own = WEIGHTS[request.origin.service]
        given[request.id] = min(tokens, -(-budget * own // weight))
        budget -= given[request.id]
        weight -= own
    return given


PLENTY = 1 << 30


@dataclass(slots=True)
class Allowance:
    """The limits of the next step."""

    requests: int = PLENTY
    tokens: int = PLENTY
    _failures: int = 0  # since the last step that succeeded

    def shrink(self, plan: StepPlan) -> bool:
        """A step has failed for want of memory: half of it next time. False where there is nothing to halve.

        The first time it may just be tried again: memory that was kept for speed has been given back meanwhile.
        """
        self._failures += 1
        if self._failures == 1:
            return True
        if len(plan.scheduled) > 1:
            self.requests = len(plan.scheduled) // 2
        elif plan.num_tokens > 1:
            self.tokens = plan.num_tokens // 2
        else:
            return False
        return True

    def relax(self) -> None:
        """A step has succeeded."""
        self._failures = 0
        self.requests, self.tokens = min(PLENTY, 2 * self.requests), min(PLENTY, 2 * self.tokens)
