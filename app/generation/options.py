"""Options of the replies to one request: sampling, grammar, limits, and the contents of events.

Dialects pass only the sampling fields that a request has, by the names of SamplingParams. `DefaultSampling` fills in
the others.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeAlias

from msgspec import Meta

from engine.errors import PromptTooLong
from engine.sampling_params import SamplingParams

if TYPE_CHECKING:  # not imported at run time: the chat imports this module before its screens appear
    from app.generation.grammars import RequestedGrammar
    from app.generation.tool_parsers.reply_parser import ReplyParser
    from engine.grammar import Grammar

_NOTHING: Mapping[str, float] = {}
# A penalty applies to the whole prompt. For infilling, the prompt is the surrounding code, whose names the missing part
# must repeat.
_NOT_FOR_INSERTION = ("repetition_penalty",)
VARIED_TEMPERATURE: Final = 0.7  # temperature of several replies to one prompt if the model recommends 0


@dataclass(frozen=True, slots=True)
class DefaultSampling:
    """The default values of sampling fields."""

    # values by names of SamplingParams; None: each API has its own defaults
    recommended: Mapping[str, float] | None = None

    def fill(
        self,
        given: Mapping[str, Any],
        api: Mapping[str, float] = _NOTHING,
        *,
        inserts: bool = False,
        several: bool = False,
    ) -> dict[str, Any]:
        """Return `given`, fields of SamplingParams, with the defaults of all missing fields.

        `api` holds the defaults of the request's API. They apply if the model's recommendation is turned off. `inserts`
        is true for infilling. `several` is true if a prompt gets more than one reply: at temperature 0 they would all
        be the same.
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

# A list of names, or a string with one letter for each. Their order is ignored: the engine has a fixed order.
SamplerNames: TypeAlias = Annotated[list[str], Meta(max_length=64)] | Annotated[str, Meta(max_length=64)]

# llama.cpp's infill sampler drops roughly the tokens below a fifth of the highest probability.
INFILL_MIN_P: Final = 0.2

INFILL: Final = "infill"

# The fields of SamplingParams that each sampler uses, each with the value that turns the sampler off.
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
    """Return the known samplers among those that a request names. None: the request names none, so all are on."""
    if isinstance(samplers, str):
        return [_LETTERS[letter] for letter in samplers if letter in _LETTERS]
    return None if samplers is None else [name for name in samplers if name in (*SAMPLERS, INFILL)]


def only_named(samplers: list[str] | str | None, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of `given` (fields of SamplingParams) with every sampler off that is not in `samplers`."""
    named = named_samplers(samplers)
    if named is None:
        return {**given}
    shaped = {**given}
    for name, off in SAMPLERS.items():
        shaped |= {} if name in named else off
    return shaped | ({"min_p": INFILL_MIN_P} if INFILL in named else {})


@dataclass(frozen=True, slots=True)
class TimeLimits:
    """Limits in seconds; None: no limit. A reply beyond a limit ends as if it had reached its token limit."""

    prefill: float | None = None  # seconds from the start of the prefill to the first token
    decode: float | None = None  # seconds after the first token; applies once the reply has a line break

    @classmethod
    def of_milliseconds(cls, prefill: int | None, decode: int | None) -> "TimeLimits":
        """Convert the limits of a request. As in llama.cpp's API, 0 means no limit."""
        return cls(prefill / 1000 if prefill else None, decode / 1000 if decode else None)


NO_LIMITS = TimeLimits()


@dataclass(frozen=True, slots=True)
class ReplyOptions:
    """Optional contents of a reply's events."""

    includes_stop: bool = False  # the text includes the stop string or stop token that ended it
    shows_control: bool = False  # the text includes control tokens, except those that end the reply
    reports_tokens: bool = False  # a GeneratedTokens event precedes the text of its tokens
    reports_progress: bool = False  # a PromptProgress event reports the end of every prefill, even of a short one


PLAIN_REPLY = ReplyOptions()


def candidates(given: Mapping[str, Any], count: int, seed: int | None) -> list[SamplingParams]:
    """Return the parameters of `count` replies to a prompt. With a seed, each reply has the next seed.

    Raises InvalidSampling.
    """
    seeds: list[dict[str, Any]] = [{} if seed is None else {"seed": (seed + number) % 2**64} for number in range(count)]
    return [SamplingParams(**given, **one) for one in seeds]


@dataclass(frozen=True, slots=True)
class GenerationOptions:
    """Options for the replies to each prompt of a request."""

    candidates: Sequence[SamplingParams]  # parameters of each generated reply; of a beam search, a single element
    count: int = 1  # number of replies that are returned, the best of the candidates
    reports_logprobs: bool = False  # whether events have log-probabilities; False: these only rank the candidates
    grammar: "RequestedGrammar | None" = None  # grammar of every reply
    breakers: Sequence[str] = ()  # texts that end a repetition for the DRY penalty
    allowed_ids: frozenset[int] | None = None  # token ids that replies may contain; None: all
    bad_words: Sequence[str] = ()  # texts that replies must not contain
    context: int | None = None  # limit of a prompt and its reply together, in tokens; None: the model's context length
    limits: TimeLimits = NO_LIMITS
    prediction: str = ""  # a text that the replies may repeat, from which drafts are taken
    pause: float = 0.0  # smallest number of seconds between two batches of events
    reply: ReplyOptions = PLAIN_REPLY
    returns_text: bool = True  # False: only prefill the prompts for later requests, and drop the replies

    @property
    def replies(self) -> int:
        """Number of replies per prompt that the engine returns. For a beam search, the number of its results."""
        beams = self.candidates[0].beams
        return len(self.candidates) if beams is None else beams.results

    def prepared(
        self, grammar: "Grammar | None", breakers: frozenset[int], prediction: tuple[int, ...]
    ) -> "GenerationOptions":
        """Return the options with a compiled grammar, the DRY breakers, and the predicted tokens in every candidate.

        Raises InvalidSampling.
        """
        several = []
        for one in self.candidates:
            dry = None if one.dry is None else replace(one.dry, breakers=breakers)
            several.append(replace(one, grammar=grammar, dry=dry, prediction=prediction))
        return replace(self, candidates=several)

    def clamp_to_context(self, prompt: Sequence[int]) -> Sequence[SamplingParams]:
        """Return the candidates for a prompt, with max_tokens limited by the context. Raises PromptTooLong."""
        if self.context is None:
            return self.candidates
        room = self.context - len(prompt)
        if room < 1:
            raise PromptTooLong(
                f"The prompt has {len(prompt):,} tokens, but num_ctx allows {self.context:,} including the reply",
                "Shorten the prompt, or raise or omit num_ctx. Here it is only a limit: the model is not loaded again.",
                tokens=len(prompt),
                context=self.context,
            )
        return [replace(one, max_tokens=min(room, one.max_tokens or room)) for one in self.candidates]


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """Prompts as token ids, and how the replies to them are generated and parsed."""

    prompts: Sequence[tuple[int, ...]]
    options: GenerationOptions  # options whose candidates include the compiled grammar
    grammar_field: str = ""  # request field that errors about the grammar name
    # creates the parser of each reply; None: replies are plain text
    new_parser: "Callable[[], ReplyParser] | None" = None
    continues_text: bool = True  # whether the reply continues a text, rather than being a new turn
    marks: tuple[int, ...] = ()  # see `Request.marks`; only for a single prompt

    def submissions(self) -> list[tuple[tuple[int, ...], SamplingParams]]:
        """Return each prompt with the parameters of one of its candidates. Raises PromptTooLong."""
        return [(prompt, params) for prompt in self.prompts for params in self.options.clamp_to_context(prompt)]
