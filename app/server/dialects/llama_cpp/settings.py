"""Generation settings of a reply, under all names that llama.cpp's server reports."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from msgspec import Struct

from engine.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class EchoedFields:
    """Fields of a request that are reported unchanged."""

    samplers: Sequence[str]
    grammar: str
    breakers: Sequence[str]
    stream: bool
    timings_per_token: bool
    post_sampling_probs: bool


class TokenBias(Struct):
    bias: float
    token: int


class GenerationSettings(Struct, kw_only=True):
    """The settings in effect. Fields with constant values belong to samplers that this version does not have."""

    n_ctx: int
    seed: int
    temperature: float
    dynatemp_range: float = 0.0
    dynatemp_exponent: float = 1.0
    top_k: int
    top_p: float
    min_p: float
    top_n_sigma: float = -1.0
    xtc_probability: float
    xtc_threshold: float
    typical_p: float = 1.0
    repeat_last_n: int = -1  # penalties cover all tokens
    repeat_penalty: float
    presence_penalty: float
    frequency_penalty: float
    dry_multiplier: float
    dry_base: float
    dry_allowed_length: int
    dry_penalty_last_n: int
    dry_sequence_breakers: list[str]
    mirostat: int = 0
    mirostat_tau: float = 5.0
    mirostat_eta: float = 0.1
    stop: list[str]
    max_tokens: int  # equal to n_predict
    n_predict: int
    n_keep: int = 0
    n_discard: int = 0
    ignore_eos: bool
    stream: bool
    logit_bias: list[TokenBias]
    n_probs: int
    min_keep: int = 0
    grammar: str
    samplers: list[str]
    timings_per_token: bool
    post_sampling_probs: bool
    lora: list[Any] = []

    @classmethod
    def of(cls, params: SamplingParams, context_length: int, echoed: EchoedFields) -> "GenerationSettings":
        """Return the settings of a reply in a context of `context_length` tokens."""
        length = -1 if params.max_tokens is None else params.max_tokens
        dry = params.dry
        return cls(
            n_ctx=context_length,
            seed=params.seed,
            temperature=params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
            min_p=params.min_p,
            xtc_probability=params.xtc_probability,
            xtc_threshold=params.xtc_threshold,
            repeat_penalty=params.repetition_penalty,
            presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
            dry_multiplier=0.0 if dry is None else dry.multiplier,
            dry_base=1.75 if dry is None else dry.base,
            dry_allowed_length=2 if dry is None else dry.allowed_length,
            dry_penalty_last_n=-1 if dry is None or dry.last_n is None else dry.last_n,
            dry_sequence_breakers=list(echoed.breakers),
            stop=list(params.stop),
            max_tokens=length,
            n_predict=length,
            ignore_eos=params.ignore_eos,
            stream=echoed.stream,
            logit_bias=[TokenBias(bias, token) for token, bias in params.logit_bias],
            n_probs=params.logprobs or 0,
            grammar=echoed.grammar,
            samplers=list(echoed.samplers),
            timings_per_token=echoed.timings_per_token,
            post_sampling_probs=echoed.post_sampling_probs,
        )
