"""How much a step may take since memory ran out: less each time, more again with each step that succeeds. No torch.

Refuses to know why it ran out, and who takes part in a step.
"""

from dataclasses import dataclass

from engine.request import StepPlan

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
