"""Tells of every prompt where its tokens came from and why some were computed, and counts that.

Written and read on one event loop. Costs less than a millisecond a request. Refuses to know who is told.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from app.generation.cache_misses import find_miss
from app.generation.cache_report import CacheReport, Miss, MissReason
from app.generation.latencies import RESTORE_BOUNDS, by_class
from app.generation.recent_prompts import Earlier, Exchange, RecentPrompts, packed
from app.text.tokenizer import Tokenizer
from engine.request import Request


class CacheReporter:
    """Of all requests of one engine, since the start."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.misses: Final = dict.fromkeys(MissReason, 0)
        self.restores: Final = by_class(RESTORE_BOUNDS)  # of prompts of which something had to be brought
        self._tokenizer = tokenizer
        self._recent = RecentPrompts()

    def asked(self, request: Request) -> "AskedPrompt":
        """To be told when a request is submitted: of several that continue one prompt together, the first."""
        ids, salt = packed(request.prompt_ids), request.origin.cache_salt
        prompt = AskedPrompt(self, request, ids, self._recent.nearest(ids, salt))
        self.remember(request, ids, computed=0)
        return prompt

    def report(self, request: Request, miss: Miss | None, read: int, *, counts: bool) -> CacheReport:
        found = request.cache
        if counts and miss is not None:
            self.misses[miss.reason] += 1
        if counts and found.host + found.disk:
            self.restores[request.origin.service].observe(found.restore_seconds)
        return CacheReport(replace(found, computed=max(0, read - found.cached)), miss)

    def miss(self, request: Request, prompt: bytes, earlier: Earlier | None) -> Miss | None:
        if request.params.prompt_logprobs is not None:
            return Miss(MissReason.PROMPT_LOGPROBS, 0)
        return find_miss(prompt, earlier, request.cache, self._tokenizer)

    def remember(self, request: Request, ids: bytes, computed: int) -> None:
        self._recent.remember(Exchange(request.origin.cache_salt, ids, len(request.prompt_ids), computed))


@dataclass(frozen=True, slots=True)
class AskedPrompt:
    """A prompt that one or several requests continue, and what was known of it when it was asked."""

    reporter: CacheReporter
    first: Request  # of them; the others come without a cost, and are not counted
    ids: bytes
    earlier: Earlier | None

    def report(self, request: Request, read: int) -> CacheReport:
        """Where the prompt of one of the requests came from, of which a step has computed something; as far as its
        first `read` tokens, where it was ended before all were."""
        miss = self.reporter.miss(request, self.ids, self.earlier)
        return self.reporter.report(request, miss, read, counts=request is self.first)

    def ended(self, request: Request, output_ids: Sequence[int], computed: int) -> None:
        """To be told when one of the requests has ended: what it generated, and how many tokens have been computed for
        it, at least."""
        self.reporter.remember(request, self.ids + packed(output_ids), computed)
