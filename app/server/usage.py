"""Reports of tokens in replies: usage, timings, and log-probabilities, in formats that several dialects share."""

import time
from collections.abc import Callable, Sequence
from typing import Literal, TypeAlias

from msgspec import UNSET, Struct, UnsetType

from app.generation.events import ChatEvent, GeneratedTokens, PromptProgress, TokenCounts
from app.text.tokenizer import Tokenizer
from engine.request import FinishReason, TokenLogprobs

FinishText: TypeAlias = Literal["stop", "length"]
TokenText: TypeAlias = Callable[[Tokenizer, int], str]  # returns the text of a token

LEAST_LOGPROB = -9999.0  # JSON has no minus infinity


class Timings(Struct, kw_only=True):
    """Times of a request, as llama.cpp's server reports them, and two fields that it does not have.

    The time to the first token of each reply counts as prefill.
    """

    queue_ms: float | UnsetType = UNSET  # time until the engine started; known at the end, like the next field
    restore_ms: float | UnsetType = UNSET  # time to copy cached blocks from RAM and files
    cache_n: int  # cached tokens of the prompt
    prompt_n: int  # computed tokens of the prompt
    prompt_ms: float
    prompt_per_token_ms: float
    prompt_per_second: float
    predicted_n: int
    predicted_ms: float
    predicted_per_token_ms: float
    predicted_per_second: float
    draft_n: int | UnsetType = UNSET  # drafted tokens, known at the end if there are any, like the next field
    draft_n_accepted: int | UnsetType = UNSET


class ProgressReport(Struct):
    """Progress of prefilling a prompt, as llama.cpp's server reports it."""

    total: int  # tokens of the prompt
    cache: int  # cached tokens
    processed: int  # cached and computed tokens so far
    time_ms: float

    @classmethod
    def of(cls, progress: PromptProgress) -> "ProgressReport":
        return cls(progress.total, progress.cached, progress.done, round(progress.seconds * 1000, 3))


class TokenAlternative(Struct):
    token: str
    logprob: float
    bytes: list[int]


class ReportedToken(Struct):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TokenAlternative]


def timings_of(counts: TokenCounts) -> Timings:
    """Return the timings of a request whose replies have ended."""
    timings = timings_so_far(
        cached=counts.cache.sources.cached,
        computed=counts.cache.sources.computed,
        prefill_seconds=counts.prefill_seconds,
        completion=counts.completion,
        writing_seconds=max(0.0, counts.total_seconds - counts.first_token_seconds),
        replies=counts.replies,
    )
    timings.queue_ms = round(1000 * counts.queue_seconds, 3)
    timings.restore_ms = round(1000 * counts.cache.sources.restore_seconds, 3)
    if counts.drafts.drafted:
        timings.draft_n, timings.draft_n_accepted = counts.drafts.drafted, counts.drafts.accepted
    return timings


def timings_so_far(
    *,
    cached: int,
    computed: int,
    prefill_seconds: float,
    completion: int,
    writing_seconds: float,
    replies: int = 1,
) -> Timings:
    """Return timings. `cached` and `computed` count tokens of the prompt, `completion` the tokens of all `replies`."""
    later_tokens, prompt_ms, predicted_ms = completion - replies, 1000 * prefill_seconds, 1000 * writing_seconds
    return Timings(
        cache_n=cached,
        prompt_n=computed,
        prompt_ms=round(prompt_ms, 3),
        prompt_per_token_ms=_ratio(prompt_ms, computed),
        prompt_per_second=_ratio(1000 * computed, prompt_ms),
        predicted_n=completion,
        predicted_ms=round(predicted_ms, 3),
        predicted_per_token_ms=_ratio(predicted_ms, later_tokens),
        predicted_per_second=_ratio(1000 * later_tokens, predicted_ms),
    )


def _ratio(dividend: float, divisor: float) -> float:
    return round(dividend / divisor, 3) if divisor > 0 else 0.0


def finish_text(finish: FinishReason) -> FinishText:
    """Return the finish reason of a reply that was not aborted."""
    return "length" if finish is FinishReason.LENGTH else "stop"


def token_text(tokenizer: Tokenizer, token_id: int) -> str:
    """Return the text of a token, control tokens included. Bytes that are not whole characters become U+FFFD."""
    return tokenizer.token_bytes(token_id, show_control=True).decode(errors="replace")


def finite_logprob(logprob: float) -> float:
    return max(logprob, LEAST_LOGPROB)


def id_text(tokenizer: Tokenizer, token_id: int) -> str:
    """Return a token id in the form in which vLLM writes it instead of the token's text."""
    return f"token_id:{token_id}"


def reported_tokens(
    tokenizer: Tokenizer, logprobs: Sequence[TokenLogprobs], text: TokenText = token_text
) -> list[ReportedToken]:
    """Return log-probabilities in the format of chat completions. `text` returns the text of a token."""
    return [_reported(tokenizer, token, text) for token in logprobs]


def _reported(tokenizer: Tokenizer, token: TokenLogprobs, text: TokenText) -> ReportedToken:
    sampled = _alternative(tokenizer, token.token_id, token.logprob, text)
    top = [_alternative(tokenizer, token_id, logprob, text) for token_id, logprob in token.top]
    return ReportedToken(sampled.token, sampled.logprob, sampled.bytes, top)


def _alternative(tokenizer: Tokenizer, token_id: int, logprob: float, text: TokenText) -> TokenAlternative:
    encoded = tokenizer.token_bytes(token_id, show_control=True)
    return TokenAlternative(text(tokenizer, token_id), finite_logprob(logprob), list(encoded))


class RunningCounts:
    """Counts of a request while its replies are generated. They need `ReplyOptions.reports_tokens`."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Start counting. `clock` returns monotonic seconds."""
        self.completion = 0  # tokens of all replies
        self._clock = clock
        self._first_token_at: float | None = None
        self._progress = PromptProgress(0, 0)

    def add(self, event: ChatEvent) -> None:
        """Count an event of any reply."""
        match event:
            case GeneratedTokens(ids):
                self.completion += len(ids)
                self._first_token_at = self._first_token_at or self._clock()
            case PromptProgress():
                self._progress = event

    def timings(self) -> Timings:
        """Return the timings so far. The times in the queue and for restored blocks are known only at the end."""
        progress, since = self._progress, self._first_token_at
        predicted = 0.0 if since is None else self._clock() - since
        return timings_so_far(
            cached=progress.cached,
            computed=progress.done - progress.cached,
            prefill_seconds=progress.seconds,
            completion=self.completion,
            writing_seconds=predicted,
        )
