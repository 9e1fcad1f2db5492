"""Sampling parameters of a request, validated when they are created."""

import math
import secrets
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Literal, TypeAlias

from engine.errors import InvalidSampling

if TYPE_CHECKING:
    from engine.grammar import Grammar

Bounds: TypeAlias = tuple[tuple[str, float, float], ...]  # (field, minimum, maximum)

MAX_STOPS = 64  # a generous limit: editors send about two dozen
MAX_BIASES = 1024
MAX_LOGPROBS = 20
MAX_WIDTH = 16
MAX_TEMPERATURE = 100.0


@dataclass(frozen=True, slots=True)
class BeamParams:
    """Parameters of a beam search. Raises InvalidSampling, which names the invalid parameter."""

    width: int  # number of beams in each round
    results: int = 1  # number of sequences to return, best first
    # a score is divided by the reply's length to this power; values above 0 favor longer replies
    length_penalty: float = 1.0
    # True: stop when `width` sequences have ended. False: stop when no live beam has a higher score than the worst of
    # those sequences. "never": stop when no live beam can reach a higher score, at any length.
    early_stopping: bool | Literal["never"] = False

    _BOUNDS: ClassVar[Bounds] = (("width", 1, MAX_WIDTH), ("length_penalty", -10, 10))

    def __post_init__(self) -> None:
        _check_bounds(self, self._BOUNDS)
        if not 1 <= self.results <= self.width:
            raise InvalidSampling("results", f"{self.results} is not between 1 and the width, {self.width}")


@dataclass(frozen=True, slots=True)
class DryParams:
    """Parameters of DRY penalties, on tokens that would continue a repetition (see `engine.sampling.filters`).

    Raises InvalidSampling, which names the invalid parameter.
    """

    multiplier: float  # penalty of a repetition of `allowed_length` tokens
    base: float = 1.75  # factor by which the penalty grows with each further token of the repetition
    allowed_length: int = 2  # shortest length of a repetition that is penalized
    last_n: int | None = None  # number of last tokens to search; None: all
    breakers: frozenset[int] = frozenset()  # tokens at which a repetition ends

    _BOUNDS: ClassVar[Bounds] = (("multiplier", 0, 100), ("base", 1, 4), ("allowed_length", 0, 2**31 - 1))

    def __post_init__(self) -> None:
        _check_bounds(self, self._BOUNDS)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling parameters of one request. Raises InvalidSampling, which names the invalid parameter."""

    temperature: float = 1.0  # 0: always the most likely token
    top_k: int = 0  # keep the k most likely tokens; 0: all
    top_p: float = 1.0  # keep the fewest most likely tokens whose total probability reaches this
    min_p: float = 0.0  # keep tokens whose probability, relative to that of the most likely one, is at least this
    repetition_penalty: float = 1.0  # divides the positive logits of tokens already seen, multiplies the negative ones
    presence_penalty: float = 0.0  # subtracted once from the logits of tokens already generated
    frequency_penalty: float = 0.0  # subtracted from a token's logit once for each time it was generated
    dry: DryParams | None = None  # penalty on repetitions of several tokens; None: off
    xtc_probability: float = 0.0  # probability of removing the most likely tokens (see `engine.sampling.filters`)
    xtc_threshold: float = 0.1  # minimum probability of the tokens that may be removed
    seed: int = field(default_factory=lambda: secrets.randbits(63))
    max_tokens: int | None = None  # length limit of the reply; None: limited by the context only
    min_tokens: int = 0  # end and stop tokens are not sampled before this many tokens
    ignore_eos: bool = False  # the model's own end tokens do not end the reply
    stop: tuple[str, ...] = ()  # strings that end the reply; the caller applies them when it converts ids to text
    stop_token_ids: tuple[int, ...] = ()
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, value added to its logit)
    # number of alternatives to report for each token; 0: only the sampled token; None: no report
    logprobs: int | None = None
    # whether to report the distribution that the token is sampled from, instead of the model's own
    drawn_logprobs: bool = False
    prompt_logprobs: int | None = None  # like `logprobs`, for prompt tokens; the prompt is then computed in full
    grammar: "Grammar | None" = None  # constrains the reply, and may end it regardless of min_tokens and ignore_eos
    drafts: bool = True  # whether drafts may be verified; they make a reply faster, and never change it
    prediction: tuple[int, ...] = ()  # token ids that the reply may contain, from which drafts are taken
    beams: BeamParams | None = None  # beam search, which ignores temperature and filters

    _BOUNDS: ClassVar[Bounds] = (
        ("temperature", 0, MAX_TEMPERATURE),
        ("top_k", 0, 2**31 - 1),
        ("top_p", 0, 1),
        ("min_p", 0, 1),
        ("repetition_penalty", 0.01, 100),
        ("presence_penalty", -100, 100),
        ("frequency_penalty", -100, 100),
        ("xtc_probability", 0, 1),
        ("xtc_threshold", 0, 1),
        ("seed", 0, 2**64 - 1),
        ("max_tokens", 1, 2**31 - 1),
        ("min_tokens", 0, 2**31 - 1),
        ("logprobs", 0, MAX_LOGPROBS),
        ("prompt_logprobs", 0, MAX_LOGPROBS),
    )

    def __post_init__(self) -> None:
        _check_bounds(self, self._BOUNDS)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidSampling("min_tokens", f"{self.min_tokens} is more than max_tokens, {self.max_tokens}")
        if len(self.stop) > MAX_STOPS or any(not text for text in self.stop):
            raise InvalidSampling("stop", f"at most {MAX_STOPS} strings, none of them empty")
        if len(self.logit_bias) > MAX_BIASES:
            raise InvalidSampling("logit_bias", f"{len(self.logit_bias)} entries, more than {MAX_BIASES}")
        if not all(math.isfinite(bias) and abs(bias) <= 100 for _, bias in self.logit_bias):
            raise InvalidSampling("logit_bias", "a bias is not between -100 and 100")
        for name in _SHAPING if self.beams is not None else ():
            if getattr(self, name) != SamplingParams.__dataclass_fields__[name].default:
                raise InvalidSampling(
                    name, "not available with beam search, which ranks by the model's own probabilities"
                )

    @property
    def penalizes(self) -> bool:
        """Whether a penalty makes tokens that occurred before less likely."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def needs_reply(self) -> bool:
        """Whether sampling a token requires all earlier tokens of the reply."""
        return self.penalizes or self.dry is not None

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise InvalidSampling if a token id is outside the vocabulary, because devices do not check ids."""
        for name, ids in (("logit_bias", [i for i, _ in self.logit_bias]), ("stop_token_ids", self.stop_token_ids)):
            for token_id in ids:
                if not 0 <= token_id < vocab_size:
                    raise InvalidSampling(name, f"token id {token_id} is not in the vocabulary of {vocab_size} tokens")


# Parameters that change the model's own distribution; beam search rejects them.
_SHAPING = ("logit_bias", "repetition_penalty", "presence_penalty", "frequency_penalty", "dry", "grammar")


def _check_bounds(params: object, bounds: Bounds) -> None:
    for name, low, high in bounds:
        value = getattr(params, name)
        if value is not None and not low <= value <= high:  # NaN fails this comparison, so it is rejected too
            raise InvalidSampling(name, f"{value} is not between {low} and {high}")


@dataclass(frozen=True, slots=True)
class BeamSampling(SamplingParams):
    """Sampling parameters of a request that computes beams. `logprobs` is the number of candidates per beam."""

    _BOUNDS: ClassVar[Bounds] = ()
