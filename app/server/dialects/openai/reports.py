"""Reports beside the text of completions: identity, usage, timings, token ids, and log-probabilities.

Some are extensions of vLLM and of llama.cpp's server.
"""

import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated, Final, Protocol, TypeAlias

from msgspec import UNSET, Meta, Struct, UnsetType

from app.generation.cache_report import PromptTokensDetails
from app.generation.events import ChatEvent, GeneratedTokens, TokenCounts
from app.generation.options import GenerationOptions, ReplyOptions, TimeLimits
from app.server.dialects.openai.requests import GenerationRequest
from app.server.request_fields import LogprobCount, Milliseconds
from app.server.usage import RunningCounts, Timings, finite_logprob, timings_of, token_text
from app.settings.settings import APP_NAME
from app.text.tokenizer import Tokenizer
from engine.request import TokenLogprobs
from engine.sampling_params import SamplingParams


def _version() -> str:
    try:
        return version(APP_NAME)
    except PackageNotFoundError:  # a checkout that is not installed
        return "0"


VERSION: Final = _version()
FINGERPRINT: Final = f"{APP_NAME}-{VERSION}"  # the same in all replies of one version


class CompletionTokensDetails(Struct):
    reasoning_tokens: int
    accepted_prediction_tokens: int = 0  # drafted tokens that turned out right
    rejected_prediction_tokens: int = 0

    @classmethod
    def of(cls, counts: TokenCounts) -> "CompletionTokensDetails":
        drafts = counts.drafts
        return cls(counts.reasoning, drafts.accepted, drafts.drafted - drafts.accepted)


class Usage(Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | UnsetType = UNSET  # set at the end of the reply, like the next field
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET


class Identity(Struct, frozen=True):
    """Fields that every chunk of one reply repeats."""

    id: str
    created: int  # Unix time in seconds
    model: str

    @classmethod
    def new(cls, prefix: str, model: str, request_id: str | None = None) -> "Identity":
        """Create an identity. The id ends with `request_id` if the client sent one, else with a random UUID."""
        return cls(f"{prefix}-{request_id or uuid.uuid4().hex}", int(time.time()), model)


def usage_of(counts: TokenCounts) -> Usage:
    total = counts.prompt + counts.completion
    details = PromptTokensDetails.of(counts.cache), CompletionTokensDetails.of(counts)
    return Usage(counts.prompt, counts.completion, total, *details)


def usage_so_far(counts: TokenCounts, running: RunningCounts) -> Usage:
    """Return the usage of a request whose replies are still running."""
    return Usage(counts.prompt_total, running.completion, counts.prompt_total + running.completion)


class PromptLogprob(Struct):
    """Log-probability of one token of a prompt, in vLLM's format."""

    logprob: float
    rank: int | None  # rank among all tokens, starting at 1; null if the token is not reported among the likeliest
    decoded_token: str


# Keyed by token id; null for the first token, which no other token predicts.
PromptLogprobList: TypeAlias = list[dict[str, PromptLogprob] | None]


def prompt_logprobs(tokenizer: Tokenizer, reported: Sequence[TokenLogprobs]) -> PromptLogprobList:
    """Return log-probabilities of a prompt's tokens from the second on, each with its likeliest alternatives."""
    return [None, *(_by_id(tokenizer, token) for token in reported)]


def _by_id(tokenizer: Tokenizer, token: TokenLogprobs) -> dict[str, PromptLogprob]:
    ranks: Mapping[int, int] = {token_id: rank for rank, (token_id, _) in enumerate(token.top, 1)}
    several = dict(((token.token_id, token.logprob), *token.top))
    return {
        str(token_id): PromptLogprob(finite_logprob(logprob), ranks.get(token_id), token_text(tokenizer, token_id))
        for token_id, logprob in several.items()
    }


RequestId: TypeAlias = Annotated[str, Meta(pattern=r"^[A-Za-z0-9._:-]{1,128}$")]


class ReportingRequest(GenerationRequest, kw_only=True):
    """Fields of chat and text completions that the Responses API does not have."""

    prompt_logprobs: LogprobCount | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None  # log-probabilities name tokens by id
    timings_per_token: bool | None = None  # report timings in each chunk of a stream
    request_id: RequestId | None = None  # the end of the reply's id
    t_max_prompt_ms: Milliseconds | None = None  # 0: no limit, also for the next field
    t_max_predict_ms: Milliseconds | None = None

    @property
    def reports_usage_continuously(self) -> bool:
        """Whether each chunk of a stream reports the usage so far."""
        options = self.stream_options
        return bool(self.reports_usage and self.stream and options and options.continuous_usage_stats)

    def _make_options(self, count: int, candidates: Sequence[SamplingParams], *, reports: bool) -> GenerationOptions:
        body = super()._make_options(count, candidates, reports=reports)
        return replace(body, limits=TimeLimits.of_milliseconds(self.t_max_prompt_ms, self.t_max_predict_ms))

    def _options(self) -> ReplyOptions:
        counts = self.reports_usage_continuously or bool(self.timings_per_token)
        return replace(
            super()._options(),
            reports_tokens=bool(self.return_token_ids) or counts,
            reports_progress=bool(self.return_progress or self.timings_per_token),
        )

    def _prompt_logprobs(self) -> int | None:
        return self.prompt_logprobs

    def _problems(self) -> Iterator[tuple[str, str]]:
        yield from super()._problems()
        if self.stream and self.prompt_logprobs is not None:
            yield "prompt_logprobs", "a stream does not report them; leave stream out."


class ReportingChoice(Protocol):
    index: int
    token_ids: list[int] | UnsetType


class ReportingChunk(Protocol):
    """A chunk of a chat completion or a text completion."""

    usage: Usage | UnsetType
    timings: Timings | UnsetType

    @property
    def choices(self) -> Sequence[ReportingChoice]: ...


class ChunkReports:
    """Collects the reports of one request and adds them to its chunks."""

    def __init__(self, body: ReportingRequest, counts: TokenCounts) -> None:
        """Set the request, `body`, and the counts of its tokens. The service fills `counts` when replies end."""
        self._body = body
        self._counts = counts
        self._running = RunningCounts()
        self._ids: dict[int, list[int]] = {}  # token ids of each choice that no chunk has reported yet

    def count_event(self, index: int, event: ChatEvent) -> None:
        """Count an event of the choice at `index`."""
        self._running.add(event)
        if isinstance(event, GeneratedTokens) and self._body.return_token_ids:
            self._ids.setdefault(index, []).extend(event.ids)

    def add_to_chunk(self, chunk: ReportingChunk) -> None:
        """Add the requested reports to a chunk with choices."""
        if self._body.return_token_ids:
            for choice in chunk.choices:
                choice.token_ids = self._ids.pop(choice.index, [])
        if self._body.reports_usage_continuously:
            chunk.usage = usage_so_far(self._counts, self._running)
        if self._body.timings_per_token:
            chunk.timings = self._running.timings()

    def add_totals(self, chunk: ReportingChunk) -> None:
        """Add the usage and the timings of all replies to the last chunk. All replies must have ended."""
        chunk.usage, chunk.timings = usage_of(self._counts), timings_of(self._counts)
