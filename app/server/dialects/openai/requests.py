"""Fields that all generating requests of OpenAI's APIs share, with their types and bounds.

`fields.py` lists all documented fields. Fields that are absent or null have the API's defaults.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal, TypeAlias

from msgspec import Meta, Struct

from app.generation.grammars import RequestedGrammar
from app.generation.options import (
    API_DEFAULTS,
    DefaultSampling,
    GenerationOptions,
    ReplyOptions,
    SamplerNames,
    candidates,
    only_named,
)
from app.generation.service import ChatService
from app.server.http.errors import check_vocabulary, raise_first
from app.server.origin import OriginFields, Purpose
from app.server.request_fields import (
    Count,
    DryFields,
    Fraction,
    KeepAlive,
    ModelName,
    PositiveCount,
    StopText,
    Temperature,
    TokenId,
)
from app.server.structured_output import (
    Choices,
    GbnfText,
    GrammarText,
    Schema,
    StructuredOutputs,
    gbnf_grammar,
    json_schema_grammar,
    only_grammar,
    structured_outputs_grammars,
)
from engine.sampling_params import MAX_BIASES, MAX_STOPS, MAX_WIDTH, BeamParams, SamplingParams

MAX_PRIORITY = 100
ANY_SEED = -1  # with this value, llama.cpp and vLLM choose a random seed

Penalty: TypeAlias = Annotated[float, Meta(ge=-2, le=2)]
Bias: TypeAlias = Annotated[float, Meta(ge=-100, le=100)]
BiasPair: TypeAlias = Annotated[list[int | float | bool], Meta(min_length=2, max_length=2)]  # a token id and its bias
BadWord: TypeAlias = Annotated[str, Meta(min_length=1, max_length=1024)]
MaxTokens: TypeAlias = Annotated[int, Meta(ge=-2, le=2**31 - 1)]  # below 0: the rest of the context

# Fields that have the same name and meaning in SamplingParams.
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
    "drafts",
)


class StreamOptions(Struct):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None  # vLLM's field: with include_usage, each chunk has the usage so far
    # shortest time between two chunks; an extension of this server
    interval_ms: Annotated[int, Meta(ge=0, le=60_000)] | None = None


class Options(Struct):
    """Ollama's options that this API has no field for."""

    num_ctx: PositiveCount | None = None


class GenerationRequest(DryFields, kw_only=True):
    """Fields of all requests that generate text."""

    model: ModelName | None = None  # absent: the served model, as in llama.cpp and vLLM
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Meta(ge=1, le=16)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    temperature: Temperature | None = None
    top_p: Fraction | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: (
        Annotated[dict[TokenId, Bias], Meta(max_length=MAX_BIASES)]
        | Annotated[list[BiasPair], Meta(max_length=MAX_BIASES)]
        | None
    ) = None
    max_tokens: MaxTokens | None = None
    stop: StopText | Annotated[list[StopText], Meta(max_length=MAX_STOPS)] | None = None
    user: str | None = None
    service_tier: Literal["auto", "default", "flex", "scale", "priority"] | None = None
    store: bool | None = None  # false: the request is not written to disk
    ttl: KeepAlive | None = None  # LM Studio's field
    # Extensions that most engines with OpenAI's API have.
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None  # -1 and 0: no limit
    min_p: Fraction | None = None
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=100)] | None = None
    repeat_last_n: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None  # 0 turns repetition_penalty off
    samplers: SamplerNames | None = None
    xtc_probability: Fraction | None = None
    xtc_threshold: Fraction | None = None
    ignore_eos: bool | None = None
    min_tokens: Count | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=64)] | None = None
    allowed_token_ids: Annotated[list[TokenId], Meta(min_length=1, max_length=1 << 18)] | None = None
    bad_words: Annotated[list[BadWord], Meta(max_length=1024)] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    cache_salt: Annotated[str, Meta(max_length=256)] | None = None
    priority: Annotated[int, Meta(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] | None = None  # the highest value is served first
    # number of candidates, or the width of a beam search
    best_of: Annotated[int, Meta(ge=1, le=MAX_WIDTH)] | None = None
    use_beam_search: bool | None = None
    # applies only to a beam search, like the next field
    length_penalty: Annotated[float, Meta(ge=-10, le=10)] | None = None
    early_stopping: bool | Literal["never"] | None = None
    structured_outputs: StructuredOutputs | None = None
    # this and the next three: vLLM's older names for members of `structured_outputs`
    guided_json: Schema | GrammarText | None = None
    guided_regex: GrammarText | None = None
    guided_choice: Choices | None = None
    guided_grammar: GrammarText | None = None
    grammar: GbnfText | None = None  # a field of llama.cpp, like json_schema; empty: no grammar
    json_schema: Schema | str | None = None
    return_progress: bool | None = None  # a stream reports the progress of prefill, as llama.cpp's server does
    num_ctx: PositiveCount | None = None  # limit of prompt and reply together, in tokens; the model is not reloaded
    options: Options | None = None
    # extensions of this server
    service_class: Literal["interactive", "normal", "background"] | None = None
    drafts: bool | None = None  # false: no speculative decoding; the reply is the same

    @property
    def reports_usage(self) -> bool:
        """Whether the reply reports its usage: a streamed reply does only if the request asks for it."""
        return not self.stream or (self.stream_options is not None and bool(self.stream_options.include_usage))

    def generation_options(self, service: ChatService) -> GenerationOptions:
        """Return the options of the replies to each prompt.

        Raises InvalidSampling, and InvalidRequest for an invalid grammar, several grammars, or a token id that is not
        in the vocabulary.
        """
        grammar, options = self.requested_grammar(), self.sampling_options(service.sampling)
        if self.allowed_token_ids is None:
            return replace(options, grammar=grammar, bad_words=self.bad_words or ())
        allowed = frozenset(self.allowed_token_ids)
        check_vocabulary(allowed, service.vocab_size, "allowed_token_ids")
        return replace(options, grammar=grammar, allowed_ids=allowed, bad_words=self.bad_words or ())

    def requested_grammar(self) -> RequestedGrammar | None:
        """Return the grammar of the replies. Raises InvalidRequest if it is invalid or if there are several."""
        return only_grammar(self._grammars())

    def sampling_options(self, sampling: DefaultSampling = API_DEFAULTS) -> GenerationOptions:
        """Return the options without the grammar and the token filter. With a seed, each candidate has the next seed.

        `sampling` sets values that the request leaves open, except in a beam search. Raises InvalidSampling.
        """
        n, reports = self.n or 1, self._logprobs() is not None
        given = self._sampling() | {"dry": self.dry()}
        if self.use_beam_search:
            return self._make_options(n, [SamplingParams(**given, beams=self._beams(n))], reports=reports)
        inserts = self._purpose() is Purpose.INSERTION
        given = only_named(self.samplers, sampling.fill(given, inserts=inserts, several=self._candidates > 1))
        if self._candidates > n:
            given = {"logprobs": 0, **given}  # candidates are ranked by their log-probabilities
        seed = None if self.seed == ANY_SEED else self.seed
        return self._make_options(n, candidates(given, self._candidates, seed), reports=reports)

    def _make_options(self, count: int, candidates: Sequence[SamplingParams], *, reports: bool) -> GenerationOptions:
        interval = self.stream_options.interval_ms if self.stream and self.stream_options else None
        return GenerationOptions(
            candidates,
            count,
            reports_logprobs=reports,
            breakers=self.breakers(),
            context=self._context(),
            prediction=self._prediction(),
            pause=(interval or 0) / 1000,
            reply=self._options(),
        )

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
        given |= {"top_k": None if self.top_k is None else max(0, self.top_k)}
        given |= {"prompt_logprobs": self._prompt_logprobs()}
        given = {name: value for name, value in given.items() if value is not None}
        return given | {
            "stop": (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ()),
            "stop_token_ids": tuple(self.stop_token_ids or ()),
            "logit_bias": self._biases(),
            **({"repetition_penalty": 1.0} if self.repeat_last_n == 0 else {}),
        }

    def _biases(self) -> tuple[tuple[int, float], ...]:
        """Return the bias of each token. A bias of false, in llama.cpp's pairs, forbids the token."""
        if not isinstance(self.logit_bias, list):
            return tuple((self.logit_bias or {}).items())
        return tuple((int(token), -100.0 if bias is False else float(bias)) for token, bias in self.logit_bias)

    def _options(self) -> ReplyOptions:
        """Return the options of the reply."""
        return ReplyOptions(
            includes_stop=bool(self.include_stop_str_in_output), shows_control=self.skip_special_tokens is False
        )

    def origin_fields(self) -> OriginFields:
        return OriginFields(
            self._purpose(),
            service_class=self.service_class,
            service_tier=self.service_tier,
            priority=self.priority,
            cache_salt=self.cache_salt,
            store=self.store,
        )

    def check(self) -> None:
        """Raise InvalidRequest for problems that the bounds of single fields cannot express."""
        raise_first(self._problems())

    # Subclasses override the following methods.

    def _purpose(self) -> Purpose:
        return Purpose.COMPLETION

    def _problems(self) -> Iterator[tuple[str, str]]:
        if self._candidates < (self.n or 1):
            yield "best_of", "it must not be less than n."
        if self.stream and self._candidates > (self.n or 1) and not self.use_beam_search:
            yield "best_of", "the best choices are known only at the end; leave stream out."
        if self.use_beam_search and self.dry_multiplier:
            yield "dry_multiplier", "a beam search does not support this field; leave one of them out."
        if self.use_beam_search and (self.allowed_token_ids is not None or self.bad_words):
            name = "bad_words" if self.allowed_token_ids is None else "allowed_token_ids"
            yield name, "a beam search does not support this field; leave one of them out."
        if self.stream_options is not None and not self.stream:
            yield "stream_options", "it needs stream to be true; leave it out."
        if isinstance(self.logit_bias, list) and not all(map(_is_bias, self.logit_bias)):
            yield "logit_bias", "each must be a pair of a token id and a number from -100 to 100, or false."

    def _grammars(self) -> Iterator[RequestedGrammar]:
        guided = StructuredOutputs(
            json=self.guided_json, regex=self.guided_regex, choice=self.guided_choice, grammar=self.guided_grammar
        )
        yield from structured_outputs_grammars(self.structured_outputs, "structured_outputs.")
        yield from structured_outputs_grammars(guided, "guided_")
        yield from filter(None, (gbnf_grammar(self.grammar), json_schema_grammar(self.json_schema)))

    def _max_tokens(self) -> int | None:
        return None if self.max_tokens is None or self.max_tokens < 0 else self.max_tokens

    def _prediction(self) -> str:
        return ""

    def _logprobs(self) -> int | None:
        return None

    def _prompt_logprobs(self) -> int | None:
        return None


def _is_bias(pair: Sequence[int | float | bool]) -> bool:
    token, bias = pair
    return type(token) is int and token >= 0 and (bias is False or (bias is not True and -100 <= bias <= 100))
