"""A cache report as fields of JSON: what the endpoint says in `usage`, what the client of a server reads there, and
what `ingle run --json` prints. So the three cannot disagree.
"""

from typing import Self

from msgspec import UNSET, Struct, UnsetType

from app.generation.cache_report import CacheReport, Miss, MissReason
from engine.token_sources import TokenSources


class MissDetails(Struct, omit_defaults=True, rename={"now": "is"}):
    """Why more than the new end of a prompt was computed."""

    reason: MissReason
    position: int  # in tokens of the prompt
    before: str = ""
    was: str = ""
    now: str = ""
    removed: str = ""


class PromptTokensDetails(Struct):
    """OpenAI's field, with ours beside it. A server that knows fewer of them leaves them out."""

    cached_tokens: int = 0  # the next three together
    device_tokens: int = 0
    host_tokens: int = 0
    disk_tokens: int = 0
    computed_tokens: int = 0
    restore_ms: float = 0.0
    miss: MissDetails | UnsetType = UNSET
    left_out: list[str] | UnsetType = UNSET  # lines that change with every request, taken out of the prompt

    @classmethod
    def of(cls, report: CacheReport) -> Self:
        miss = report.miss
        told: MissDetails | UnsetType = UNSET
        sources = report.sources
        restore_ms = round(sources.restore_seconds * 1000, 3)
        if miss is not None:
            told = MissDetails(miss.reason, miss.position, miss.before, miss.was, miss.now, miss.removed)
        left_out = [*report.left_out] or UNSET
        found = sources.cached, sources.device, sources.host, sources.disk
        return cls(*found, sources.computed, restore_ms, told, left_out)

    def report(self) -> CacheReport:
        told = self.miss
        miss: Miss | None = None
        if told is not UNSET:
            miss = Miss(told.reason, told.position, told.before, told.was, told.now, told.removed)
        device, seconds = self.cached_tokens - self.host_tokens - self.disk_tokens, self.restore_ms / 1000
        sources = TokenSources(device, self.host_tokens, self.disk_tokens, self.computed_tokens, seconds)
        return CacheReport(sources, miss, () if self.left_out is UNSET else tuple(self.left_out))
