"""Fields of vLLM and llama.cpp by which both kinds of completions report more than their text."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Annotated, TypeAlias

from msgspec import Meta

from app.generation.events import ReplyOptions, TimeLimits
from app.server.choices import WantedChoices
from app.server.common_fields import Alternatives, Milliseconds
from app.server.dialects.openai.requests import GenerationRequest
from engine.sampling_params import SamplingParams

RequestId: TypeAlias = Annotated[str, Meta(pattern=r"^[A-Za-z0-9._:-]{1,128}$")]


class ReportingRequest(GenerationRequest, kw_only=True):
    """The fields of both kinds that the Responses API does not have."""

    prompt_logprobs: Alternatives | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None  # in log-probabilities
    timings_per_token: bool | None = None  # each chunk of a stream has timings
    request_id: RequestId | None = None  # the end of the reply's id
    t_max_prompt_ms: Milliseconds | None = None  # 0: any number, as for the next
    t_max_predict_ms: Milliseconds | None = None

    @property
    def reports_usage_continuously(self) -> bool:
        """Each chunk of a stream reports the usage so far."""
        options = self.stream_options
        return bool(self.reports_usage and self.stream and options and options.continuous_usage_stats)

    def _wanted(self, count: int, candidates: Sequence[SamplingParams], *, reports: bool) -> WantedChoices:
        wanted = super()._wanted(count, candidates, reports=reports)
        return replace(wanted, limits=TimeLimits.of_milliseconds(self.t_max_prompt_ms, self.t_max_predict_ms))

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
