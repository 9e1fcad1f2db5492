"""The tokens that a request used and what it is doing, counted while its replies are generated."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from app.generation.cache_report import NOTHING, CacheReport
from app.generation.events import ChatEvent, PromptProgress, ReplyEnd

QUEUED = "queued"


@dataclass(slots=True)
class TokenCounts:
    """Tokens that a request used: of all that was generated for it, but what a beam search does not return. A prompt
    that several choices continue counts once."""

    prompts: Sequence[tuple[int, ...]] = ()  # the ids of all prompts, known before any is read
    asked: int = 0  # tokens of all prompts, likewise
    prompt: int = 0  # of those whose replies have ended
    cache: CacheReport = NOTHING  # of the prompts, as the first choice of each found them
    completion: int = 0
    replies: int = 0  # that have ended
    first_token_seconds: float = math.inf  # the least of any reply
    total_seconds: float = 0.0  # the most
    queue_seconds: float = 0.0  # the most that a prompt waited before the engine began with it
    reading_seconds: float = 0.0  # the most from there to its first token, but for what was restored
    thought: int = 0  # of the completion
    status: str = QUEUED  # what the request is doing, for a client that waits

    def begin(self, prompts: Sequence[tuple[int, ...]]) -> None:
        """Note the prompts, before the engine reads any of them."""
        self.prompts, self.asked = prompts, sum(map(len, prompts))

    def see(self, event: ChatEvent) -> None:
        """Keep the status up to date."""
        if isinstance(event, PromptProgress):
            self.status = f"prefill {event.done:,} of {event.total:,}"
        else:
            self.status = "decode"

    def add(self, end: ReplyEnd, *, first_of_prompt: bool) -> None:
        """Count a reply that has ended."""
        self.completion += end.completion_tokens
        self.thought += end.thought_tokens
        self.replies += 1
        self.first_token_seconds = min(self.first_token_seconds, end.first_token_seconds)
        self.total_seconds = max(self.total_seconds, end.total_seconds)
        if first_of_prompt:
            self.prompt += end.prompt_tokens
            self.cache = self.cache.plus(end.cache)
            self.queue_seconds = max(self.queue_seconds, end.queue_seconds)
            reading = end.first_token_seconds - end.queue_seconds - end.cache.restore_seconds
            self.reading_seconds = max(self.reading_seconds, reading)
