"""What replies of several dialects say of tokens: how one is written, with which probability, where the time went."""

from collections.abc import Sequence
from typing import Literal, TypeAlias

from msgspec import Struct

from app.chat.events import PromptProgress
from app.server.token_counts import TokenCounts
from app.text.tokenizer import Tokenizer
from engine.request import FinishReason, TokenLogprobs

FinishText: TypeAlias = Literal["stop", "length"]

LEAST_LOGPROB = -9999.0  # JSON has no minus infinity


class Timings(Struct):
    """Where the time of a request went, in the words of llama.cpp's server; the first two fields are ours. The first
    token of each reply is a part of reading its prompt."""

    queue_ms: float  # before the engine began with it
    restore_ms: float  # that bringing cached tokens from memory and from files took
    cache_n: int  # tokens of the prompt that were cached
    prompt_n: int  # and that were computed
    prompt_ms: float
    prompt_per_token_ms: float
    prompt_per_second: float
    predicted_n: int
    predicted_ms: float
    predicted_per_token_ms: float
    predicted_per_second: float


class ProgressReport(Struct):
    """How far the reading of a prompt is, as llama.cpp's server tells it."""

    total: int  # tokens of the prompt
    cache: int  # that were cached
    processed: int  # those, and what is computed
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
    cache, later_tokens = counts.cache, counts.completion - counts.replies
    restore_ms, prompt_ms = 1000 * cache.restore_seconds, 1000 * counts.reading_seconds
    predicted_ms = max(0.0, 1000 * (counts.total_seconds - counts.first_token_seconds))
    return Timings(
        queue_ms=round(1000 * counts.queue_seconds, 3),
        restore_ms=round(restore_ms, 3),
        cache_n=cache.cached,
        prompt_n=cache.computed,
        prompt_ms=round(prompt_ms, 3),
        prompt_per_token_ms=_ratio(prompt_ms, cache.computed),
        prompt_per_second=_ratio(1000 * cache.computed, prompt_ms),
        predicted_n=counts.completion,
        predicted_ms=round(predicted_ms, 3),
        predicted_per_token_ms=_ratio(predicted_ms, later_tokens),
        predicted_per_second=_ratio(1000 * later_tokens, predicted_ms),
    )


def _ratio(dividend: float, divisor: float) -> float:
    return round(dividend / divisor, 3) if divisor > 0 else 0.0


def finish_text(finish: FinishReason) -> FinishText:
    """The word for a reply that ended well."""
    return "length" if finish is FinishReason.LENGTH else "stop"


def token_text(tokenizer: Tokenizer, token_id: int) -> str:
    """A token as text, control tokens included; bytes that are no whole character become U+FFFD."""
    return tokenizer.token_bytes(token_id, show_control=True).decode(errors="replace")


def finite(logprob: float) -> float:
    return max(logprob, LEAST_LOGPROB)


def reported_tokens(tokenizer: Tokenizer, logprobs: Sequence[TokenLogprobs]) -> list[ReportedToken]:
    """Log-probabilities as the newer endpoints tell them."""
    return [_reported(tokenizer, token) for token in logprobs]


def _reported(tokenizer: Tokenizer, token: TokenLogprobs) -> ReportedToken:
    picked = _alternative(tokenizer, token.token_id, token.logprob)
    top = [_alternative(tokenizer, token_id, logprob) for token_id, logprob in token.top]
    return ReportedToken(picked.token, picked.logprob, picked.bytes, top)


def _alternative(tokenizer: Tokenizer, token_id: int, logprob: float) -> TokenAlternative:
    encoded = tokenizer.token_bytes(token_id, show_control=True)
    return TokenAlternative(token_text(tokenizer, token_id), finite(logprob), list(encoded))
