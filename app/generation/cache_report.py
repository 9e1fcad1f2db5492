"""Where the tokens of a prompt came from, and why some of them were computed. Plain data, which a client of a server in
another process fills as well; refuses to know how it was found out.
"""

import enum
from dataclasses import dataclass

from engine.token_sources import NONE, TokenSources


class MissReason(enum.Enum):
    """Why a part of a prompt was computed that is more than its new end."""

    FIRST_TIME = "first_time"  # nothing like it was seen since the start
    DIVERGED = "diverged"  # an earlier request went on otherwise from here
    REMOVED = "removed"  # the same, because a part of it was taken out: old thinking, white space
    EVICTED = "evicted"  # it was computed since the start, and is not there any more
    RECOMPUTED = "recomputed"  # it lies in files, and computing it is faster than reading them
    PROMPT_LOGPROBS = "prompt_logprobs"  # they were asked for: such a prompt is computed whole


@dataclass(frozen=True, slots=True)
class Miss:
    """What the cache did not have. The texts are those of the conversation: for whoever asked, and for no log."""

    reason: MissReason
    position: int  # tokens of the prompt in front of the first one that is other than it was, or not there
    before: str = ""  # what stands in front of it; this and the next two where two conversations part
    was: str = ""  # what stood there in the earlier one
    now: str = ""  # what stands there instead
    removed: str = ""  # what was taken out, shortened


@dataclass(frozen=True, slots=True)
class CacheReport:
    """Of one prompt; or, added up, of those of one request."""

    sources: TokenSources = NONE
    miss: Miss | None = None  # None where all but the new end was found
    left_out: tuple[str, ...] = ()  # names of lines that would change with every request, and were taken out of it

    def plus(self, other: "CacheReport") -> "CacheReport":
        """Both together; of two misses, the first is told."""
        return CacheReport(self.sources + other.sources, self.miss or other.miss, (*self.left_out, *other.left_out))


NOTHING = CacheReport()  # was found, nor computed
