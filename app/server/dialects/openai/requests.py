"""The requests of OpenAI's API: every field that is read, with its type and its bounds, declared here and nowhere else.

Unknown fields are ignored, since clients send many; known ones that this version cannot honour are refused by name.
Fields that are absent or null have the API's defaults.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, TypeAlias

from msgspec import Meta, Struct

from app.server.choices import WantedChoices
from app.server.dry_fields import DryFields
from app.server.errors import InvalidRequest, refuse_first
from app.server.field_types import (
    Alternatives,
    Count,
    Fraction,
    ModelName,
    PositiveCount,
    StopText,
    Temperature,
    TokenId,
)
from app.server.origin import Purpose, origin_of
from app.server.served_model import ServedModel
from app.server.structured_output import (
    AskedGrammar,
    Choices,
    GrammarText,
    Schema,
    StructuredOutputs,
    of_structured_outputs,
    only,
)
from engine.request import MAX_BIASES, MAX_STOPS, MAX_WIDTH, BeamParams, Origin, SamplingParams

MAX_CHOICES = 256  # of one request: prompts times those that are generated for each
DEFAULT_COMPLETION_TOKENS = 16
ANY_NUMBER = -1  # of tokens, as clients of llama.cpp say it
MAX_PRIORITY = 100

Penalty: TypeAlias = Annotated[float, Meta(ge=-2, le=2)]
PromptIds: TypeAlias = Annotated[list[TokenId], Meta(min_length=1, max_length=1 << 20)]
MostTokens: TypeAlias = Annotated[int, Meta(ge=ANY_NUMBER, le=2**31 - 1)]
Prompts: TypeAlias = str | Annotated[list[str | TokenId | PromptIds], Meta(min_length=1, max_length=1 << 20)]

# Fields whose value, where there is one, is a field of SamplingParams as it stands.
_SAME_IN_SAMPLING = (
    "temperature",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "xtc_probability",
    "xtc_threshold",
    "min_tokens",
    "ignore_eos",
)


class StreamOptions(Struct):
    include_usage: bool | None = None
    interval_ms: Annotated[int, Meta(ge=0, le=60_000)] | None = None  # between two chunks at least; ours alone


class Options(Struct):
    """Ollama's options, as far as this API has no field for them."""

    num_ctx: PositiveCount | None = None


class GenerationRequest(DryFields, kw_only=True):
    """What both kinds of request have in common."""

    model: ModelName | None = None  # absent: the served one, as in llama.cpp and vLLM
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Meta(ge=1, le=16)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    temperature: Temperature | None = None
    top_p: Fraction | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: (
        Annotated[dict[TokenId, Annotated[float, Meta(ge=-100, le=100)]], Meta(max_length=MAX_BIASES)] | None
    ) = None
    max_tokens: MostTokens | None = None
    stop: StopText | Annotated[list[StopText], Meta(max_length=MAX_STOPS)] | None = None
    user: str | None = None
    service_tier: Literal["auto", "default", "flex", "scale", "priority"] | None = None
    store: bool | None = None  # false: nothing of it is written to disk
    # Not in OpenAI's API, but in that of most engines that speak it.
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None  # -1 and 0: no limit
    min_p: Fraction | None = None
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=100)] | None = None
    xtc_probability: Fraction | None = None
    xtc_threshold: Fraction | None = None
    ignore_eos: bool | None = None
    min_tokens: Count | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=64)] | None = None
    cache_salt: Annotated[str, Meta(max_length=256)] | None = None
    priority: Annotated[int, Meta(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] | None = None  # the highest goes first
    best_of: Annotated[int, Meta(ge=1, le=MAX_WIDTH)] | None = None  # so many are generated; of a search, its width
    use_beam_search: bool | None = None
    length_penalty: Annotated[float, Meta(ge=-10, le=10)] | None = None  # of a search, as the next one
    early_stopping: bool | Literal["never"] | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | GrammarText | None = None  # and the others below: as `structured_outputs` has them
    guided_regex: GrammarText | None = None
    guided_choice: Choices | None = None
    guided_grammar: GrammarText | None = None
    return_progress: bool | None = None  # a stream tells how much of a long prompt is read, as llama.cpp's does
    num_ctx: PositiveCount | None = None  # a cap on prompt and reply together; nothing is loaded anew for it
    options: Options | None = None
    service_class: Literal["interactive", "normal", "background"] | None = None  # ours alone

    @property
    def reports_usage(self) -> bool:
        """Whether the reply says what it used: a streamed one only if asked to."""
        return not self.stream or (self.stream_options is not None and bool(self.stream_options.include_usage))

    def grammar(self) -> AskedGrammar | None:
        """That the reply is to keep to. Raises InvalidRequest for a bad one, or several."""
        return only(self._grammars())

    def choices(self, breakers: frozenset[int] = frozenset()) -> WantedChoices:
        """What is wanted of each prompt, but for its grammar: with a seed, each candidate has the next one. `breakers`
        are the tokens of those texts. Raises InvalidSampling."""
        n, reports = self.n or 1, self._logprobs() is not None
        given = self._sampling() | {"dry": self.dry(breakers)}
        if self.use_beam_search:
            return self._wanted(n, [SamplingParams(**given, beams=self._beams(n))], reports=reports)
        if self._candidates > n:
            given = {"logprobs": 0, **given}  # they are ranked by it
        seeds: list[dict[str, Any]] = [{} for _ in range(self._candidates)]
        if self.seed is not None:
            seeds = [{"seed": (self.seed + candidate) % 2**64} for candidate in range(self._candidates)]
        return self._wanted(n, [SamplingParams(**given, **seed) for seed in seeds], reports=reports)

    def _wanted(self, count: int, candidates: Sequence[SamplingParams], *, reports: bool) -> WantedChoices:
        interval = self.stream_options.interval_ms if self.stream and self.stream_options else None
        return WantedChoices(count, candidates, reports, self._context(), pause=(interval or 0) / 1000)

    def _context(self) -> int | None:
        caps = (self.num_ctx, None if self.options is None else self.options.num_ctx)
        return min((cap for cap in caps if cap is not None), default=None)

    @property
    def _candidates(self) -> int:
        return self.best_of or self.n or 1

    def _beams(self, n: int) -> BeamParams:
        penalty = 1.0 if self.length_penalty is None else self.length_penalty
        return BeamParams(self._candidates, n, penalty, self.early_stopping or False)

    def _sampling(self) -> dict[str, Any]:
        given: dict[str, Any] = {name: getattr(self, name) for name in _SAME_IN_SAMPLING}
        given |= {"max_tokens": self._max_tokens(), "logprobs": self._logprobs()}
        given |= {"prompt_logprobs": self._prompt_logprobs()}
        given = {name: value for name, value in given.items() if value is not None}
        return given | {
            "top_k": max(0, self.top_k or 0),
            "stop": (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ()),
            "stop_token_ids": tuple(self.stop_token_ids or ()),
            "logit_bias": tuple((self.logit_bias or {}).items()),
        }

    def origin(self, headers: Mapping[str, str]) -> Origin:
        """Where it comes from, by its fields and the headers it came with. Raises InvalidRequest."""
        return origin_of(
            self._purpose(),
            headers,
            service_class=self.service_class,
            service_tier=self.service_tier,
            priority=self.priority,
            cache_salt=self.cache_salt,
            store=self.store,
        )

    def check_model(self, served: ServedModel) -> None:
        """Raise InvalidRequest for the name of a model that is not served."""
        served.check(self.model)

    def check(self) -> None:
        """Raise InvalidRequest for what no single field's bounds can say."""
        refuse_first(self._problems())

    # What the two kinds answer differently.

    def _purpose(self) -> Purpose:
        return Purpose.COMPLETION

    def _problems(self) -> Iterator[tuple[str, str]]:
        if self._candidates < (self.n or 1):
            yield "best_of", "it is less than n."
        if self.stream and self._candidates > (self.n or 1) and not self.use_beam_search:
            yield "best_of", "which are the best is known when all have ended; leave stream out."
        if self.use_beam_search and self.dry_multiplier:
            yield "dry_multiplier", "not with a beam search, which ranks by the model alone."

    def _grammars(self) -> Iterator[AskedGrammar]:
        guided = StructuredOutputs(
            json=self.guided_json, regex=self.guided_regex, choice=self.guided_choice, grammar=self.guided_grammar
        )
        yield from of_structured_outputs(self.structured_outputs, "structured_outputs.")
        yield from of_structured_outputs(guided, "guided_")

    def _max_tokens(self) -> int | None:
        return None if self.max_tokens == ANY_NUMBER else self.max_tokens

    def _logprobs(self) -> int | None:
        return None

    def _prompt_logprobs(self) -> int | None:
        return None


class CompletionRequest(GenerationRequest, kw_only=True):
    """POST /v1/completions."""

    prompt: Prompts
    logprobs: Alternatives | None = None
    echo: bool | None = None
    suffix: str | None = None

    def prompts(self) -> list[str | tuple[int, ...]]:
        """The prompts, each a text or token ids. Raises InvalidRequest for a list that mixes the two."""
        prompts = separate(self.prompt, "prompt")
        if len(prompts) * self._candidates > MAX_CHOICES:
            problem = f"{len(prompts)} prompts times n, or best_of, are more than {MAX_CHOICES} choices."
            raise InvalidRequest(f"prompt: {problem}", "Send several requests.", parameter="prompt")
        return prompts

    def _purpose(self) -> Purpose:
        return Purpose.INSERTION if self.suffix else super()._purpose()

    def _problems(self) -> Iterator[tuple[str, str]]:
        yield from super()._problems()
        if self.suffix and self.echo:
            yield "suffix", "the prompt that goes with it cannot be echoed; leave echo out."

    def _max_tokens(self) -> int | None:
        return DEFAULT_COMPLETION_TOKENS if self.max_tokens is None else super()._max_tokens()

    def _logprobs(self) -> int | None:
        return self.logprobs

    def _prompt_logprobs(self) -> int | None:
        return self.logprobs if self.echo else None


def separate(prompts: str | list[str | int | list[int]], parameter: str) -> list[str | tuple[int, ...]]:
    """Each prompt, a text or token ids, of a field with one or several. Raises InvalidRequest where two kinds are
    mixed."""
    if isinstance(prompts, str):
        return [prompts]
    ids = [item for item in prompts if isinstance(item, int)]
    if len(ids) == len(prompts):
        return [tuple(ids)]
    if len({type(item) for item in prompts}) > 1:
        problem = "a list holds texts, token ids, or lists of token ids, and one kind only."
        raise InvalidRequest(f"{parameter}: {problem}", parameter=parameter)
    return [item if isinstance(item, str) else tuple(item) for item in prompts if not isinstance(item, int)]
