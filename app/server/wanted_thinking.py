"""How much a model is to think: what every dialect makes of its own fields, and what a chat template is told of it.

Refuses to know wire formats, and how models write thoughts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, TypeAlias

from msgspec import Meta

from app.generation.messages import Json

ReasoningEffort: TypeAlias = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
ThinkingBudget: TypeAlias = Annotated[int, Meta(ge=-1, le=2**31 - 1)]  # tokens; -1: any number

_NO_THOUGHT = ("none", "minimal")


@dataclass(frozen=True, slots=True)
class WantedThinking:
    """How a model is to think, whichever fields say so."""

    effort: ReasoningEffort | None
    budget: int | None  # tokens; None: any number
    enabled: bool | None  # None: as the template has it

    @classmethod
    def of(
        cls, effort: ReasoningEffort | None, budgets: Sequence[int | None] = (), enabled: bool | None = None
    ) -> "WantedThinking":
        """An effort says more than whether to think at all. Of several budgets the least counts, and less than 0 is
        none."""
        given = [budget for budget in budgets if budget is not None and budget >= 0]
        if effort == "none" or (effort is None and enabled is False):
            given.append(0)  # for templates that cannot switch it off
        if effort is not None:
            enabled = effort not in _NO_THOUGHT
        return cls(effort, min(given, default=None), False if 0 in given else enabled)

    def template_variables(self, given: Mapping[str, Json] | None = None) -> dict[str, Json]:
        """What a template is told of it, by the names that templates have; what the client says itself counts more."""
        variables: dict[str, Json] = {} if self.effort is None else {"reasoning_effort": self.effort}
        if self.enabled is not None:
            variables |= {"enable_thinking": self.enabled, "thinking": self.enabled}
        return variables | dict(given or {})
