"""What both kinds of OpenAI reply say of tokens: how a token is written, how many were used, why a reply ended."""

import time
import uuid
from typing import Literal, TypeAlias

from msgspec import Struct

from app.cache_details import PromptTokensDetails
from app.server.token_counts import TokenCounts
from app.text.tokenizer import Tokenizer
from engine.request import FinishReason

FinishText: TypeAlias = Literal["stop", "length"]

LEAST_LOGPROB = -9999.0  # JSON has no minus infinity


class Usage(Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


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
    return Usage(counts.prompt, counts.completion, total, PromptTokensDetails.of(counts.cache))


def finish_text(finish: FinishReason) -> FinishText:
    """The word for a reply that ended well."""
    return "length" if finish is FinishReason.LENGTH else "stop"


def token_text(tokenizer: Tokenizer, token_id: int) -> str:
    """A token as text, control tokens included; bytes that are no whole character become U+FFFD."""
    return tokenizer.token_bytes(token_id, show_control=True).decode(errors="replace")


def finite(logprob: float) -> float:
    return max(logprob, LEAST_LOGPROB)
