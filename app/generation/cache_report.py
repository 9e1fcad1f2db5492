"""Cache report: where the tokens of a prompt came from, and why some of them were computed.

`PromptTokensDetails` is the report as JSON. The server sends it in `usage`, a client of the server reads it there, and
`ingle run --json` prints it. The chat imports this module before its screens appear, so it imports little.
"""

import enum
from dataclasses import dataclass
from typing import Self

from msgspec import UNSET, Struct, UnsetType

from engine.request import NO_TOKENS, TokenSources


class MissReason(enum.Enum):
    """The reason for a cache miss, in which more of a prompt is computed than the part that was added at its end."""

    FIRST_TIME = "first_time"  # no similar prompt since the engine started
    DIVERGED = "diverged"  # an earlier request diverges from the prompt at this position
    REMOVED = "removed"  # an earlier request has text that the prompt lacks, such as old reasoning or white space
    EVICTED = "evicted"  # the tokens were computed since the engine started, but are no longer in the cache
    RECOMPUTED = "recomputed"  # the tokens are on disk, but computing them is faster than reading them
    PROMPT_LOGPROBS = "prompt_logprobs"  # the request asks for prompt logprobs, so the whole prompt is computed


@dataclass(frozen=True, slots=True)
class Miss:
    """A cache miss: the position at which the KV cache stopped matching a prompt, and the reason.

    The texts are quotes from the conversation. They are for the caller alone and must not be logged.
    """

    reason: MissReason
    position: int  # index of the first prompt token that differs from the earlier request or is missing in the cache
    before: str = ""  # text before that position; this and the next two are set if two conversations diverge there
    was: str = ""  # text after that position in the earlier conversation
    now: str = ""  # text after that position in this prompt
    removed: str = ""  # text that the prompt lacks, shortened


@dataclass(frozen=True, slots=True)
class CacheReport:
    """Cache report of one prompt, or the sum over all prompts of a request."""

    sources: TokenSources = NO_TOKENS
    miss: Miss | None = None  # None: everything was cached except the part that was added at the end of the prompt
    left_out: tuple[str, ...] = ()  # parts of the request that the prompt lacks, as in `Conversation.left_out`

    def plus(self, other: "CacheReport") -> "CacheReport":
        """Add two reports. If both have a miss, the first one is kept."""
        return CacheReport(self.sources + other.sources, self.miss or other.miss, (*self.left_out, *other.left_out))


EMPTY_REPORT = CacheReport()


class MissDetails(Struct, omit_defaults=True, rename={"now": "is"}):
    """A `Miss` as JSON."""

    reason: MissReason
    position: int  # index of the prompt token at which the miss starts
    before: str = ""
    was: str = ""
    now: str = ""
    removed: str = ""


class PromptTokensDetails(Struct):
    """OpenAI's `prompt_tokens_details` with additional fields, which other servers may leave out."""

    cached_tokens: int = 0  # the sum of the next three
    device_tokens: int = 0
    host_tokens: int = 0
    disk_tokens: int = 0
    computed_tokens: int = 0
    restore_ms: float = 0.0
    miss: MissDetails | UnsetType = UNSET
    # parts of the request that the prompt lacks: names of lines, and numbers of images and documents
    left_out: list[str] | UnsetType = UNSET

    @classmethod
    def of(cls, report: CacheReport) -> Self:
        miss, sources = report.miss, report.sources
        details: MissDetails | UnsetType = UNSET
        if miss is not None:
            details = MissDetails(miss.reason, miss.position, miss.before, miss.was, miss.now, miss.removed)
        restore_ms = round(sources.restore_seconds * 1000, 3)
        cached = sources.cached, sources.device, sources.host, sources.disk
        return cls(*cached, sources.computed, restore_ms, details, [*report.left_out] or UNSET)

    def report(self) -> CacheReport:
        details = self.miss
        miss: Miss | None = None
        if details is not UNSET:
            quotes = details.before, details.was, details.now, details.removed
            miss = Miss(details.reason, details.position, *quotes)
        device, seconds = self.cached_tokens - self.host_tokens - self.disk_tokens, self.restore_ms / 1000
        sources = TokenSources(device, self.host_tokens, self.disk_tokens, self.computed_tokens, seconds)
        return CacheReport(sources, miss, () if self.left_out is UNSET else tuple(self.left_out))
