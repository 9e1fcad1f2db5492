"""Requests for text completions through OpenAI's API.

`requests` and `reports` declare the fields that other requests share with these.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Annotated, Literal, TypeAlias

from msgspec import Meta

from app.generation.grammars import RequestedGrammar
from app.generation.options import GenerationOptions
from app.server.dialects.openai.reports import ReportingRequest
from app.server.embedding_inputs import Truncation
from app.server.http.errors import InvalidRequest
from app.server.origin import Purpose
from app.server.request_fields import LogprobCount, TokenId
from app.server.structured_output import ResponseFormat, response_format_grammars
from engine.sampling_params import SamplingParams

MAX_CHOICES = 256  # limit of a request: prompts times candidates
DEFAULT_COMPLETION_TOKENS = 16

PromptIds: TypeAlias = Annotated[list[TokenId], Meta(min_length=1, max_length=1 << 20)]
Prompts: TypeAlias = str | Annotated[list[str | TokenId | PromptIds], Meta(min_length=1, max_length=1 << 20)]


class CompletionRequest(ReportingRequest, kw_only=True):
    """POST /v1/completions."""

    prompt: Prompts
    logprobs: LogprobCount | None = None
    echo: bool | None = None
    suffix: str | None = None
    response_format: ResponseFormat | None = None
    truncate_prompt_tokens: Truncation | None = None  # number of tokens to keep of each prompt; -1: the most that fit
    truncation_side: Literal["left", "right"] | None = None

    def prompts(self) -> list[str | tuple[int, ...]]:
        """Return the prompts, each a string or token ids. Raises InvalidRequest if they have too many choices."""
        prompts = split_prompts(self.prompt, "prompt")
        if (count := len(prompts) * self._candidates) > MAX_CHOICES:
            each = f"{len(prompts)} prompts times {self._candidates}"
            problem = f"the request asks for {count} choices ({each}), and the limit is {MAX_CHOICES}."
            raise InvalidRequest(f"prompt: {problem}", "Send several requests.", parameter="prompt")
        return prompts

    def truncate(self, prompt: tuple[int, ...], context_length: int) -> tuple[int, ...]:
        """Cut a prompt to its last or first tokens, as the request asks.

        -1 keeps the maximum number of tokens that leaves space for the reply. Raises InvalidRequest if no token may
        be kept.
        """
        limit = self.truncate_prompt_tokens
        if limit is None:
            return prompt
        if limit == 0:
            raise InvalidRequest("truncate_prompt_tokens: it must not be 0.", parameter="truncate_prompt_tokens")
        kept = limit if limit > 0 else max(1, context_length - (self._max_tokens() or 1))
        return prompt[:kept] if self.truncation_side == "right" else prompt[-kept:]

    def _purpose(self) -> Purpose:
        return Purpose.INSERTION if self.suffix else super()._purpose()

    def _problems(self) -> Iterator[tuple[str, str]]:
        yield from super()._problems()
        if self.suffix and self.echo:
            yield "suffix", "echo is not supported with a suffix; leave echo out."

    def _grammars(self) -> Iterator[RequestedGrammar]:
        yield from response_format_grammars(self.response_format)
        yield from super()._grammars()

    def _make_options(self, count: int, candidates: Sequence[SamplingParams], *, reports: bool) -> GenerationOptions:
        options = super()._make_options(count, candidates, reports=reports)
        return options if self.max_tokens != 0 else replace(options, returns_text=False)

    def _max_tokens(self) -> int | None:
        if self.max_tokens == 0:
            return 1  # the request asks only for prefill; the generated token is not reported
        return DEFAULT_COMPLETION_TOKENS if self.max_tokens is None else super()._max_tokens()

    def _logprobs(self) -> int | None:
        return self.logprobs

    def _prompt_logprobs(self) -> int | None:
        requested = super()._prompt_logprobs()
        return self.logprobs if requested is None and self.echo else requested


def split_prompts(prompts: str | list[str | int | list[int]], parameter: str) -> list[str | tuple[int, ...]]:
    """Split a field into its prompts, each a string or token ids.

    Raises InvalidRequest for a list that mixes token ids with other items.
    """
    if isinstance(prompts, str):
        return [prompts]
    ids = [item for item in prompts if isinstance(item, int)]
    if ids and len(ids) < len(prompts):
        problem = "a list must contain token ids only, or strings and lists of token ids."
        raise InvalidRequest(f"{parameter}: {problem}", parameter=parameter)
    if ids:
        return [tuple(ids)]
    return [item if isinstance(item, str) else tuple(item) for item in prompts if not isinstance(item, int)]
