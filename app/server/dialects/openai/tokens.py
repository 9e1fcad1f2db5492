"""What both kinds of OpenAI reply say of themselves: who gave them, and how many tokens they used."""

import time
import uuid

from msgspec import Struct

from app.cache_details import PromptTokensDetails
from app.server.token_counts import TokenCounts


class CompletionTokensDetails(Struct):
    reasoning_tokens: int


class Usage(Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class Identity(Struct, frozen=True):
    """What every chunk of one reply repeats."""

    id: str
    created: int  # seconds of Unix time
    model: str

    @classmethod
    def new(cls, prefix: str, model: str) -> "Identity":
        return cls(f"{prefix}-{uuid.uuid4().hex}", int(time.time()), model)


def usage_of(counts: TokenCounts) -> Usage:
    total = counts.prompt + counts.completion
    details = PromptTokensDetails.of(counts.cache), CompletionTokensDetails(counts.thought)
    return Usage(counts.prompt, counts.completion, total, *details)
