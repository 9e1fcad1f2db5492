"""The choice of how many drafted tokens a step verifies, for all requests of the step together.

A verified token costs time in a step that runs anyway, and pays if it is accepted. The number of tokens is chosen that
gives the most accepted tokens per second by the measured times of steps (the goodput rule of arXiv:2406.14066). In a
large batch the answer is usually none.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from engine.draft import Draft
from engine.drafting.acceptance import Acceptance

MIN_GAIN = 1.03  # smallest expected ratio of tokens per second, with drafts to without


@dataclass(frozen=True, slots=True)
class Room:
    """The room for drafts in a step."""

    decoding: int  # number of requests that decode in the step
    most: int  # maximum number of drafted tokens
    forced: int = 0  # number of tokens of these requests, besides one each, that grammars have forced
    longest: float = math.inf  # maximum seconds of the step, drafting included
    prefills: bool = False  # whether the step also prefills; it then takes long already, and verifies no drafts
    # whether a request that could draft is launched ahead beside others; by drafting, it would miss every second step
    ahead: bool = False

    @property
    def known(self) -> int:
        """Number of tokens in the step without drafts."""
        return self.decoding + self.forced


@dataclass(frozen=True, slots=True)
class DraftPlan:
    """The drafts that a step verifies, by request id, and the tokens per second that are expected of the step."""

    drafts: Mapping[int, Draft]
    rate: float


def choose_drafts(
    drafts: Mapping[int, Draft],
    acceptance: Acceptance,
    seconds: Callable[[int], float],
    room: Room,
    run_lengths: Mapping[int, float] = MappingProxyType({}),
) -> DraftPlan:
    """Plan the drafts to verify, cut to the tokens that pay. Requests without any are left out.

    `drafts` has the drafts by request id, and `seconds` returns the expected time of a step by its number of tokens.
    `run_lengths` has the number of tokens that a request gets per step without drafts, by request id, if it is not 1: a
    grammar forces tokens, which a draft must not count as its gain.
    """
    # The chances of a draft never increase, so each prefix of the sorted list has prefixes of the drafts.
    candidates = sorted(
        (
            (reached / run_lengths.get(request_id, 1.0), request_id)
            for request_id, draft in drafts.items()
            for reached in acceptance.reach(draft)
        ),
        key=lambda candidate: -candidate[0],
    )[: room.most]
    best, rate = best_count([chance for chance, _ in candidates], seconds, room)
    counts: dict[int, int] = {}
    for _, request_id in candidates[:best]:
        counts[request_id] = counts.get(request_id, 0) + 1
    return DraftPlan({request_id: drafts[request_id].first(count) for request_id, count in counts.items()}, rate)


def best_count(chances: Sequence[float], seconds: Callable[[int], float], room: Room) -> tuple[int, float]:
    """Return how many of the candidates to verify, most likely first, and the expected tokens per second.

    The rate without any counts MIN_GAIN times.
    """
    best, best_rate = 0, MIN_GAIN * room.decoding / max(seconds(room.known), 1e-9)
    expected = float(room.decoding)
    for count, chance in enumerate(chances, 1):
        expected += chance
        rate = expected / max(seconds(room.known + count), 1e-9)
        if rate > best_rate:
            best, best_rate = count, rate
    return best, best_rate
