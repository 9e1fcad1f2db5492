"""Cache tracker: reports for each prompt where its tokens came from, and why some of them were computed.

It compares a new prompt with the recent prompts and replies as token ids, and counts misses and restore times. All of
it runs on one event loop and costs less than 1 ms per request.
"""

import codecs
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from app.generation.cache_report import CacheReport, Miss, MissReason
from app.generation.latencies import RESTORE_BOUNDS, by_class
from app.generation.recent_prompts import ID_BYTES, Earlier, Exchange, RecentPrompts, packed, unpacked
from app.text.tokenizer import Tokenizer
from engine.config import BLOCK_SIZE
from engine.request import Request, TokenSources

_EXCERPT = 8 * ID_BYTES  # length of the ids whose text a report quotes on each side of a divergence
_RESUMED = 8 * ID_BYTES  # length of the ids that must match again after a removed text
# lengths of the start and the end of a removed text that a report quotes
_REMOVED_HEAD, _REMOVED_TAIL = 40 * ID_BYTES, 12 * ID_BYTES

# Two texts belong to one conversation if they share a run of this length after the point where they diverge. The run is
# longer than the markup between two turns.
_SHARED_RUN = 12 * ID_BYTES
_SHARED_RUN_STRIDE = 4 * ID_BYTES
_SHARED_RUN_WITHIN = 4096 * ID_BYTES

_REPLACEMENT = "\ufffd"


class CacheTracker:
    """Compares the prompts of one engine's requests since its start, and counts their cache misses."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.misses: Final = dict.fromkeys(MissReason, 0)
        # histograms of restore times, for prompts that had blocks to restore
        self.restores: Final = by_class(RESTORE_BOUNDS)
        self._tokenizer = tokenizer
        self._recent = RecentPrompts()

    def track(self, request: Request) -> "TrackedPrompt":
        """Start tracking the prompt of a submitted request.

        If several requests continue one prompt, pass the first one.
        """
        ids, salt = packed(request.prompt_ids), request.origin.cache_salt
        prompt = TrackedPrompt(self, request, ids, self._recent.nearest(ids, salt))
        self.remember(request, ids, computed=0)
        return prompt

    def report(self, request: Request, miss: Miss | None, prefilled: int, *, counts: bool) -> CacheReport:
        """Return the report of a request. `prefilled` tokens of its prompt are in the KV cache."""
        sources = request.cache
        if counts and miss is not None:
            self.misses[miss.reason] += 1
        if counts and sources.host + sources.disk:
            self.restores[request.origin.service].observe(sources.restore_seconds)
        return CacheReport(replace(sources, computed=max(0, prefilled - sources.cached)), miss)

    def miss(self, request: Request, prompt: bytes, earlier: Earlier | None) -> Miss | None:
        if request.params.prompt_logprobs is not None:
            return Miss(MissReason.PROMPT_LOGPROBS, 0)
        return find_miss(prompt, earlier, request.cache, self._tokenizer)

    def remember(self, request: Request, ids: bytes, computed: int) -> None:
        self._recent.remember(Exchange(request.origin.cache_salt, ids, len(request.prompt_ids), computed))


@dataclass(frozen=True, slots=True)
class TrackedPrompt:
    """A prompt that one or several requests continue, with the most similar exchange before it."""

    tracker: CacheTracker
    first: Request  # the only request that is counted: the others reuse its prompt
    ids: bytes
    earlier: Earlier | None

    def report(self, request: Request, prefilled: int) -> CacheReport:
        """Return the sources of the prompt's first `prefilled` tokens, once a step has computed some of them."""
        miss = self.tracker.miss(request, self.ids, self.earlier)
        return self.tracker.report(request, miss, prefilled, counts=request is self.first)

    def finish(self, request: Request, output_ids: Sequence[int], computed: int) -> None:
        """Remember an ended request: its output, and how many of its tokens are certainly in the KV cache."""
        self.tracker.remember(request, self.ids + packed(output_ids), computed)


def find_miss(prompt: bytes, earlier: Earlier | None, sources: TokenSources, tokenizer: Tokenizer) -> Miss | None:
    """Return why a prefix of a packed prompt has to be computed again; None if only its new end has to be computed."""
    if sources.skipped:
        return Miss(MissReason.RECOMPUTED, sources.cached)
    tokens, known = len(prompt) // ID_BYTES, 0
    if earlier is not None:
        exchange, common = earlier.exchange, earlier.common
        known = min(common, exchange.computed)
        # The last token of a prompt is always computed, because its logits are needed.
        if sources.cached < min(known, tokens - 1) // BLOCK_SIZE * BLOCK_SIZE:
            return Miss(MissReason.EVICTED, sources.cached)
        if common < min(tokens, exchange.tokens):
            divergence = _Divergence(prompt, earlier, tokenizer)
            if divergence.is_in_conversation:
                return divergence.miss()
        elif known >= common - 1:  # the last token of a reply has no keys and values
            return None
    is_new = 2 * max(known, sources.cached) < tokens
    return Miss(MissReason.FIRST_TIME, known) if is_new else None


@dataclass(frozen=True)
class _Divergence:
    """The point where a prompt and an earlier exchange diverge, before the end of either. Offsets are in bytes."""

    prompt: bytes
    earlier: Earlier
    tokenizer: Tokenizer

    @property
    def _offset(self) -> int:
        return self.earlier.common * ID_BYTES

    @property
    def _is_in_reply(self) -> bool:
        return self.earlier.common >= self.earlier.exchange.prompt_tokens

    @property
    def is_in_conversation(self) -> bool:
        """Whether the prompt continues the earlier conversation, rather than only sharing its start."""
        old = self.earlier.exchange.ids
        return self._is_in_reply or _share_run(self.prompt[self._offset :], old[self._offset :])

    def miss(self) -> Miss:
        offset, prompt, old = self._offset, self.prompt, self.earlier.exchange.ids
        end = offset + _EXCERPT
        before, was, now = self._texts(prompt[max(0, offset - _EXCERPT) : offset], old[offset:end], prompt[offset:end])
        removed = self._removed()
        reason = MissReason.REMOVED if removed else MissReason.DIVERGED
        return Miss(reason, self.earlier.common, before, was, now, removed)

    def _removed(self) -> str:
        """Return the text of the earlier exchange that the prompt skips before it resumes that exchange; "" if there is
        none.

        The first token after the removed text may differ from the earlier one, because the encoding of a word depends
        on the text before it.
        """
        offset, old = self._offset, self.earlier.exchange.ids
        for same in (0, ID_BYTES):
            first, rest = self._bytes(self.prompt[offset : offset + same]), self.prompt[offset + same :]
            end = self._resumed_at(rest)
            if end < 0 or (same and not first):
                continue
            if self._bytes(old[max(offset, end - _REMOVED_TAIL) : end]).endswith(first):
                return self._shortened(old[offset:end], first)
        return ""

    def _resumed_at(self, rest: bytes) -> int:
        """Return the offset at which the earlier exchange continues like `rest`; -1 if it does not.

        At the end of the exchange fewer equal tokens are enough, since a prompt may continue from its last reply.
        """
        old, start = self.earlier.exchange.ids, self._offset + ID_BYTES
        found = _find(old, rest[:_RESUMED], start) if len(rest) >= _RESUMED else -1
        return _find_end(old, rest, start) if found < 0 and self._is_in_reply else found

    def _shortened(self, ids: bytes, end: bytes) -> str:
        """Decode `ids`, without the text `end` if they end with it. A long text is shortened to its first and last
        part.
        """
        if len(ids) <= _REMOVED_HEAD + _REMOVED_TAIL:
            return _decoded(self._bytes(ids).removesuffix(end))
        head, tail = self._bytes(ids[:_REMOVED_HEAD]), self._bytes(ids[-_REMOVED_TAIL:])
        return f"{_decoded(head)} … {_decoded(tail.removesuffix(end))}"

    def _texts(self, before: bytes, *after: bytes) -> tuple[str, ...]:
        """Return the texts before and after the divergence.

        A character split at the divergence belongs to the texts after it.
        """
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        text = decoder.decode(self._bytes(before)).strip(_REPLACEMENT)
        partial, _ = decoder.getstate()
        return text, *(_decoded(partial + self._bytes(ids)) for ids in after)

    def _bytes(self, ids: bytes) -> bytes:
        return b"".join(self.tokenizer.token_bytes(token_id, show_control=True) for token_id in unpacked(ids))


def _decoded(encoded: bytes) -> str:
    """Decode bytes, and drop the characters that are cut off at either end."""
    return encoded.decode(errors="replace").strip(_REPLACEMENT)


def _find(ids: bytes, wanted: bytes, start: int) -> int:
    """Return the first offset at or after `start` at which `wanted` occurs in `ids`, or -1."""
    found = ids.find(wanted, start)
    while found % ID_BYTES and found >= 0:
        found = ids.find(wanted, found + 1)
    return found


def _find_end(ids: bytes, rest: bytes, start: int) -> int:
    """Return the offset of the longest suffix of `ids` that is a prefix of `rest`; -1 if there is none."""
    for length in range(min(len(rest), _RESUMED), 0, -ID_BYTES):
        if len(ids) - length >= start and ids.endswith(rest[:length]):
            return len(ids) - length
    return -1


def _share_run(one: bytes, other: bytes) -> bool:
    one, other = one[:_SHARED_RUN_WITHIN], other[:_SHARED_RUN_WITHIN]
    runs = {one[at : at + _SHARED_RUN] for at in range(0, len(one) - _SHARED_RUN + 1, _SHARED_RUN_STRIDE)}
    return any(other[at : at + _SHARED_RUN] in runs for at in range(0, len(other) - _SHARED_RUN + 1, ID_BYTES))
