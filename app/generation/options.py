"""Options of the replies to one request: sampling, grammar, limits, and the events that report them.

Dialects pass only the sampling fields that a request has, by the names of SamplingParams. `DefaultSampling` fills in
the others.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeAlias

from msgspec import Meta

from engine.errors import PromptTooLong
from engine.sampling_params import SamplingParams

if TYPE_CHECKING:  # the chat imports this before its screens appear
    from app.generation.grammars import RequestedGrammar
    from app.generation.tool_parsers.reply_parser import ReplyParser
    from engine.grammar import Grammar

_NOTHING: Mapping[str, float] = {}
# A penalty looks at the whole prompt. For code insertion that is the file around the gap, whose names the missing part
# has to repeat.
_NOT_FOR_INSERTION = ("repetition_penalty",)
VARIED_TEMPERATURE: Final = 0.7  # of several replies to one prompt by a model for which 0 is recommended


@dataclass(frozen=True, slots=True)
class DefaultSampling:
    """The default value of each sampling field."""

    recommended: Mapping[str, float] | None = None  # by names of SamplingParams; None: each API has its own defaults

    def fill(
        self,
        given: Mapping[str, Any],
        api: Mapping[str, float] = _NOTHING,
        *,
        inserts: bool = False,
        several: bool = False,
    ) -> dict[str, Any]:
        """Return `given`, fields of SamplingParams, with the defaults of all fields that it lacks.

        `api` holds the defaults of the request's own API. They apply if the model's recommendation is turned off.
        `inserts` says that the reply fills a gap in code, `several` that more than one reply to the prompt is wanted,
        all of which would be the same at temperature 0.
        """
        if self.recommended is None:
            return {**api, **given}
        defaults = {**self.recommended}
        if inserts:
            defaults = {name: value for name, value in defaults.items() if name not in _NOT_FOR_INSERTION}
        if several and defaults.get("temperature") == 0:
            defaults["temperature"] = VARIED_TEMPERATURE
        return {**defaults, **given}


API_DEFAULTS = DefaultSampling()

# A list of names, or one letter each. Their order is the engine's own.
SamplerNames: TypeAlias = Annotated[list[str], Meta(max_length=64)] | Annotated[str, Meta(max_length=64)]

# What the sampler for infilling leaves out is about what is less than a fifth as likely as the most likely token.
INFILL_MIN_P: Final = 0.2

INFILL: Final = "infill"

# The fields of SamplingParams that each sampler reads, with the values at which it does nothing.
SAMPLERS: Final[Mapping[str, Mapping[str, Any]]] = {
    "penalties": {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0},
    "dry": {"dry": None},
    "temperature": {"temperature": 1.0},
    "min_p": {"min_p": 0.0},
    "top_k": {"top_k": 0},
    "top_p": {"top_p": 1.0},
    "xtc": {"xtc_probability": 0.0},
}
_LETTERS: Final[Mapping[str, str]] = {
    "e": "penalties",
    "d": "dry",
    "t": "temperature",
    "m": "min_p",
    "k": "top_k",
    "p": "top_p",
    "x": "xtc",
    "i": INFILL,
}


def named_samplers(samplers: list[str] | str | None) -> list[str] | None:
    """The known samplers among those that a request names. None: it names none, and all samplers are on."""
    if isinstance(samplers, str):
        return [_LETTERS[letter] for letter in samplers if letter in _LETTERS]
    return None if samplers is None else [name for name in samplers if name in (*SAMPLERS, INFILL)]


def only_named(samplers: list[str] | str | None, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return `given`, fields of SamplingParams, with the samplers turned off that the request does not name."""
    named = named_samplers(samplers)
    if named is None:
        return {**given}
    shaped = {**given}
    for name, off in SAMPLERS.items():
        shaped |= {} if name in named else off
    return shaped | ({"min_p": INFILL_MIN_P} if INFILL in named else {})


@dataclass(frozen=True, slots=True)
class TimeLimits:
    """Limits in seconds; None: no limit. A reply that exceeds one ends as it does at the most tokens."""

    prefill: float | None = None  # of the prompt, from when the engine begins with it
    decode: float | None = None  # from the first token on, once there is a line break

    @classmethod
    def of_milliseconds(cls, prefill: int | None, decode: int | None) -> "TimeLimits":
        """Return the limits of a request, in which 0 stands for no limit, as in llama.cpp's API."""
        return cls(prefill / 1000 if prefill else None, decode / 1000 if decode else None)


NO_LIMITS = TimeLimits()


@dataclass(frozen=True, slots=True)
class ReplyOptions:
    """What the events of one reply include."""

    includes_stop: bool = False  # the text ends with the stop string, or with the token, that ended it
    shows_control: bool = False  # control tokens are written out, but for those that end the reply
    reports_tokens: bool = False  # a GeneratedTokens event comes before the text of its tokens
    reports_progress: bool = False  # a PromptProgress event reports the end of each prompt, also of a short one


PLAIN_REPLY = ReplyOptions()


def candidates(given: Mapping[str, Any], count: int, seed: int | None) -> list[SamplingParams]:
    """Return the parameters of `count` replies to a prompt; with a seed, each has the next one. Raises
    InvalidSampling."""
    seeds: list[dict[str, Any]] = [{} if seed is None else {"seed": (seed + number) % 2**64} for number in range(count)]
    return [SamplingParams(**given, **one) for one in seeds]


@dataclass(frozen=True, slots=True)
class GenerationOptions:
    """How the replies to each prompt of a request are generated."""

    candidates: Sequence[SamplingParams]  # one for each reply that is generated; or the one of a beam search
    count: int = 1  # replies that the caller gets, the best of the candidates
    reports_logprobs: bool = False  # False: they rank the candidates, and the caller does not get them
    grammar: "RequestedGrammar | None" = None  # that each reply follows
    breakers: Sequence[str] = ()  # texts whose tokens no repetition that DRY penalizes goes across
    allowed_ids: frozenset[int] | None = None  # tokens that replies are made of; None: all
    bad_words: Sequence[str] = ()  # that no reply contains
    context: int | None = None  # most tokens of a prompt and its reply together; None: what the model has
    limits: TimeLimits = NO_LIMITS
    pause: float = 0.0  # seconds between two batches, at least
    reply: ReplyOptions = PLAIN_REPLY
    returns_text: bool = True  # False: the prompts are computed, for later requests, and the replies are dropped

    @property
    def replies(self) -> int:
        """Replies that the engine returns for each prompt: of a beam search, its results."""
        beams = self.candidates[0].beams
        return len(self.candidates) if beams is None else beams.results

    def with_grammar(self, grammar: "Grammar | None", breakers: frozenset[int]) -> "GenerationOptions":
        """The same options with the grammar and the DRY breakers in every candidate. Raises InvalidSampling."""
        several = []
        for one in self.candidates:
            dry = None if one.dry is None else replace(one.dry, breakers=breakers)
            several.append(replace(one, grammar=grammar, dry=dry))
        return replace(self, candidates=several)

    def clamp_to_context(self, prompt: Sequence[int]) -> Sequence[SamplingParams]:
        """The candidates that continue a prompt, within the context. Raises PromptTooLong."""
        if self.context is None:
            return self.candidates
        room = self.context - len(prompt)
        if room < 1:
            raise PromptTooLong(
                f"The prompt has {len(prompt):,} tokens, and num_ctx allows {self.context:,} including the reply",
                "Shorten the prompt, or raise num_ctx or leave it out: it is a cap, and nothing is loaded anew for it.",
                tokens=len(prompt),
                context=self.context,
            )
        return [replace(one, max_tokens=min(room, one.max_tokens or room)) for one in self.candidates]


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """Prompts as token ids, and how the replies to them are generated and read."""

    prompts: Sequence[tuple[int, ...]]
    options: GenerationOptions  # with the compiled grammar in its candidates
    grammar_field: str = ""  # of the request, that errors about the grammar name
    new_parser: "Callable[[], ReplyParser] | None" = None  # for each reply; None: all of a reply is text
    continues_text: bool = True  # the reply goes on in the middle of a text, not as a turn

    def submissions(self) -> list[tuple[tuple[int, ...], SamplingParams]]:
        """Each prompt with the parameters of one candidate. Raises PromptTooLong."""
        return [(prompt, params) for prompt in self.prompts for params in self.options.clamp_to_context(prompt)]
