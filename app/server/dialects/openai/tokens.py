"""The identity, the usage, and the token reports of both kinds of OpenAI reply."""

import time
import uuid
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Final, TypeAlias

from msgspec import UNSET, Struct, UnsetType

from app.generation.cache_report import PromptTokensDetails
from app.generation.events import TokenCounts
from app.server.usage import RunningCounts, finite, token_text
from app.settings.settings import APP_NAME
from app.text.tokenizer import Tokenizer
from engine.request import TokenLogprobs


def _version() -> str:
    try:
        return version(APP_NAME)
    except PackageNotFoundError:  # a checkout that is not installed
        return "0"


VERSION: Final = _version()
FINGERPRINT: Final = f"{APP_NAME}-{VERSION}"  # of every reply: replies of one version are alike


class CompletionTokensDetails(Struct):
    reasoning_tokens: int


class Usage(Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | UnsetType = UNSET  # known at the end, as the next
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET


class Identity(Struct, frozen=True):
    """What every chunk of one reply repeats."""

    id: str
    created: int  # seconds of Unix time
    model: str

    @classmethod
    def new(cls, prefix: str, model: str, request_id: str | None = None) -> "Identity":
        """`request_id` is the end of the id, if the client chose it."""
        return cls(f"{prefix}-{request_id or uuid.uuid4().hex}", int(time.time()), model)


def usage_of(counts: TokenCounts) -> Usage:
    total = counts.prompt + counts.completion
    details = PromptTokensDetails.of(counts.cache), CompletionTokensDetails(counts.thought)
    return Usage(counts.prompt, counts.completion, total, *details)


def usage_so_far(counts: TokenCounts, running: RunningCounts) -> Usage:
    """The usage of a request whose replies are under way."""
    return Usage(counts.asked, running.completion, counts.asked + running.completion)


class PromptLogprob(Struct):
    """The log-probability of one token of a prompt, in vLLM's form."""

    logprob: float
    rank: int | None  # among all tokens, from 1; None: it is not among those that are reported
    decoded_token: str


# By the id of each token; None for the first, which nothing predicts.
PromptLogprobList: TypeAlias = list[dict[str, PromptLogprob] | None]


def prompt_logprobs(tokenizer: Tokenizer, reported: Sequence[TokenLogprobs]) -> PromptLogprobList:
    """Log-probabilities of a prompt's tokens, from its second on, and of the likely ones in the place of each."""
    return [None, *(_by_id(tokenizer, token) for token in reported)]


def _by_id(tokenizer: Tokenizer, token: TokenLogprobs) -> dict[str, PromptLogprob]:
    ranks: Mapping[int, int] = {token_id: rank for rank, (token_id, _) in enumerate(token.top, 1)}
    several = dict(((token.token_id, token.logprob), *token.top))
    return {
        str(token_id): PromptLogprob(finite(logprob), ranks.get(token_id), token_text(tokenizer, token_id))
        for token_id, logprob in several.items()
    }
