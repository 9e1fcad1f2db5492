"""Requests of llama.cpp's server that generate text: every field that is read, with its type and its bounds.

`fields` lists all documented fields.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, TypeAlias

from msgspec import Meta, Struct

from app.generation.options import (
    API_DEFAULTS,
    SAMPLERS,
    DefaultSampling,
    GenerationOptions,
    ReplyOptions,
    SamplerNames,
    TimeLimits,
    candidates,
    named_samplers,
    only_named,
)
from app.server.dialects.llama_cpp import biases
from app.server.dialects.llama_cpp.prompts import OnePrompt, Prompts, split_prompts
from app.server.dialects.llama_cpp.sampling import LlamaSampling, reply_limit
from app.server.dialects.llama_cpp.settings import EchoedFields
from app.server.dialects.openai.completion_requests import MAX_CHOICES
from app.server.http.errors import InvalidRequest, raise_first
from app.server.origin import OriginFields, Purpose
from app.server.request_fields import DRY_BREAKERS, Fraction, LogprobCount, Milliseconds, ModelName
from app.server.structured_output import GbnfText, Schema, gbnf_grammar, json_schema_grammar, only_grammar
from app.text.infilling import Gap, OtherFile

Amount: TypeAlias = Annotated[int, Meta(ge=-2, le=2**31 - 1)]
FieldPath: TypeAlias = Annotated[str, Meta(max_length=128)]

_DEFAULTS: Mapping[str, float] = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}


class GeneratingRequest(LlamaSampling, kw_only=True):
    """Fields of completion and infill requests."""

    model: ModelName | None = None
    stream: bool | None = None
    n_predict: Amount | None = None  # below 0: the rest of the context; 0: only prefill
    n_cmpl: Annotated[int, Meta(ge=1, le=16)] | None = None  # replies to each prompt
    n_probs: LogprobCount | None = None
    post_sampling_probs: bool | None = None  # report the probabilities after sampling
    samplers: SamplerNames | None = None
    ignore_eos: bool | None = None
    logit_bias: biases.Biases | None = None
    xtc_probability: Fraction | None = None
    xtc_threshold: Fraction | None = None
    grammar: GbnfText | None = None
    json_schema: Schema | str | None = None
    t_max_prompt_ms: Milliseconds | None = None  # 0: no limit, also for the next field
    t_max_predict_ms: Milliseconds | None = None
    return_tokens: bool | None = None
    return_progress: bool | None = None
    timings_per_token: bool | None = None
    response_fields: Annotated[list[FieldPath], Meta(max_length=64)] | None = None

    @property
    def num_replies(self) -> int:
        """Replies to each prompt."""
        return self.n_cmpl or 1

    @property
    def echoed_fields(self) -> EchoedFields:
        named = named_samplers(self.samplers)
        return EchoedFields(
            tuple(SAMPLERS) if named is None else tuple(named),
            self.grammar or "",
            DRY_BREAKERS if self.dry_sequence_breakers is None else self.dry_sequence_breakers,
            stream=bool(self.stream),
            timings_per_token=bool(self.timings_per_token),
            post_sampling_probs=bool(self.post_sampling_probs),
        )

    def generation_options(
        self, sampling: DefaultSampling = API_DEFAULTS, logit_bias: Sequence[tuple[int, float]] = ()
    ) -> GenerationOptions:
        """Return the options of the replies to each prompt. With a seed, each candidate has the next seed.

        `sampling` sets values that the request leaves open. `logit_bias` has the biases of the request by token id.
        Raises InvalidSampling, and InvalidRequest for an invalid grammar or for two grammars.
        """
        length, reported, purpose = self.n_predict, self.n_probs or None, self._purpose()
        inserts, several = purpose is Purpose.INSERTION, self.num_replies > 1
        filled = sampling.fill(self.sampling(), _DEFAULTS, inserts=inserts, several=several)
        given = only_named(self.samplers, filled | {"dry": self.dry()})
        given |= {"max_tokens": reply_limit(length), "logprobs": reported, "ignore_eos": bool(self.ignore_eos)}
        given |= {"drawn_logprobs": bool(self.post_sampling_probs), "logit_bias": tuple(logit_bias)}
        seed = given.pop("seed", None)
        return GenerationOptions(
            candidates(given, self.num_replies, seed),
            self.num_replies,
            reports_logprobs=reported is not None,
            grammar=only_grammar(
                one for one in (gbnf_grammar(self.grammar), json_schema_grammar(self.json_schema)) if one is not None
            ),
            breakers=self.breakers(),
            limits=TimeLimits.of_milliseconds(self.t_max_prompt_ms, self.t_max_predict_ms),
            reply=self._options(),
            returns_text=length != 0,
        )

    def sampling(self) -> dict[str, Any]:
        given = {"xtc_probability": self.xtc_probability, "xtc_threshold": self.xtc_threshold}
        return super().sampling() | {name: value for name, value in given.items() if value is not None}

    def _options(self) -> ReplyOptions:
        return ReplyOptions(
            reports_tokens=bool(self.stream or self.return_tokens),
            reports_progress=bool(self.stream and (self.return_progress or self.timings_per_token)),
        )

    def origin_fields(self) -> OriginFields:
        return OriginFields(self._purpose())

    def check(self) -> None:
        """Raise InvalidRequest for problems that the bounds of single fields cannot express."""
        raise_first(self._problems())

    # Subclasses override the following methods.

    def _purpose(self) -> Purpose:
        return Purpose.COMPLETION

    def _problems(self) -> Iterator[tuple[str, str]]:
        yield from biases.bias_problems(self.logit_bias)


class CompletionRequest(GeneratingRequest, kw_only=True):
    """POST /completion."""

    prompt: Prompts

    def prompts(self) -> dict[str, OnePrompt]:
        """Return the prompts, keyed by their paths. Raises InvalidRequest."""
        prompts = split_prompts(self.prompt, "prompt")
        if (count := len(prompts) * self.num_replies) > MAX_CHOICES:
            each = f"{len(prompts)} prompts times {self.num_replies}"
            problem = f"the request asks for {count} replies ({each}), and the limit is {MAX_CHOICES}"
            raise InvalidRequest(f"prompt: {problem}", "Send several requests.", parameter="prompt")
        return prompts


class Extra(Struct):
    text: str
    filename: Annotated[str, Meta(max_length=4096)] = "tmp"


class InfillRequest(GeneratingRequest, kw_only=True):
    """POST /infill."""

    input_prefix: str = ""
    input_suffix: str = ""
    input_extra: Sequence[Extra] = ()
    prompt: str = ""  # start of the missing text; added to input_prefix

    def gap(self) -> Gap:
        others = [OtherFile(extra.filename, extra.text) for extra in self.input_extra]
        return Gap(self.input_prefix + self.prompt, self.input_suffix, others)

    def _purpose(self) -> Purpose:
        return Purpose.INSERTION


class RoutedModel(Struct):
    """POST /models/load and POST /models/unload."""

    model: Annotated[ModelName, Meta(min_length=1)]
