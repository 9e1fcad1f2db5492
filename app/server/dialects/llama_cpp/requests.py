"""Requests of llama.cpp's server that text is generated for: every field that is read, with its type and its bounds.

Unknown fields are ignored, since clients send many, and so are those of its slots and its cache, which are the engine's
own matter here. Known ones that this version cannot honour are refused by name.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, TypeAlias

from msgspec import Meta, Struct

from app.chat.default_sampling import API_DEFAULTS, DefaultSampling
from app.chat.time_limits import TimeLimits
from app.server.choices import WantedChoices
from app.server.dialects.llama_cpp.sampling import LlamaSampling, reply_limit
from app.server.errors import refuse_first
from app.server.field_types import Alternatives, Fraction, TokenId
from app.server.origin import Purpose, origin_of
from app.server.samplers import SamplerNames, only_named
from app.server.structured_output import AskedGrammar, Schema, of_gbnf, of_json_schema, only
from app.text.infilling import Gap, OtherFile
from engine.request import MAX_BIASES, Origin, SamplingParams

MAX_GBNF = 1 << 15  # characters, which are read one by one

Milliseconds: TypeAlias = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Amount: TypeAlias = Annotated[int, Meta(ge=-2, le=2**31 - 1)]
Mixed: TypeAlias = Annotated[list[str | TokenId], Meta(max_length=1 << 20)]
Bias: TypeAlias = Annotated[list[int | float | str | bool], Meta(min_length=2, max_length=2)]

_DEFAULTS: Mapping[str, float] = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}


class GeneratingRequest(LlamaSampling, kw_only=True):
    """What both kinds of request have in common."""

    model: Annotated[str, Meta(max_length=1024)] = ""  # any, if not given
    stream: bool | None = None
    n_predict: Amount | None = None  # less than 0: what the context holds; 0: the prompt is read, and no more
    n_probs: Alternatives | None = None
    samplers: SamplerNames | None = None
    ignore_eos: bool | None = None
    logit_bias: Annotated[list[Bias], Meta(max_length=MAX_BIASES)] | None = None
    xtc_probability: Fraction | None = None
    xtc_threshold: Fraction | None = None
    grammar: Annotated[str, Meta(max_length=MAX_GBNF)] | None = None
    json_schema: Schema | str | None = None
    t_max_prompt_ms: Milliseconds | None = None  # 0: any number, as for the next
    t_max_predict_ms: Milliseconds | None = None
    cache_prompt: bool | None = None
    id_slot: int | None = None

    def asked_grammar(self) -> AskedGrammar | None:
        """That the reply is to keep to. Raises InvalidRequest for a bad one, or two."""
        asked = of_gbnf(self.grammar), of_json_schema(self.json_schema)
        return only(one for one in asked if one is not None)

    def choices(
        self, breakers: frozenset[int] = frozenset(), sampling: DefaultSampling = API_DEFAULTS
    ) -> WantedChoices:
        """`breakers` are the tokens of those of DRY; `sampling` fills in what the request leaves open. Raises
        InvalidSampling."""
        length, reported = self.n_predict, self.n_probs or None
        filled = sampling.fill(self.sampling(), _DEFAULTS, inserts=self._purpose() is Purpose.INSERTION)
        given = only_named(self.samplers, filled | {"dry": self.dry(breakers)})
        given |= {"max_tokens": reply_limit(length), "logprobs": reported}
        params = SamplingParams(**given, ignore_eos=bool(self.ignore_eos), logit_bias=self._biases())
        limits = TimeLimits(_seconds(self.t_max_prompt_ms), _seconds(self.t_max_predict_ms))
        return WantedChoices(1, [params], reported is not None, limits=limits, is_told=length != 0)

    def sampling(self) -> dict[str, Any]:
        given = {"xtc_probability": self.xtc_probability, "xtc_threshold": self.xtc_threshold}
        return super().sampling() | {name: value for name, value in given.items() if value is not None}

    def _biases(self) -> tuple[tuple[int, float], ...]:
        """False stands for never."""
        given = self.logit_bias or ()
        return tuple((int(token), -100.0 if amount is False else float(amount)) for token, amount in given)

    def origin(self, headers: Mapping[str, str]) -> Origin:
        """Where it comes from. Raises InvalidRequest."""
        return origin_of(self._purpose(), headers)

    def check(self) -> None:
        """Raise InvalidRequest for what no single field's bounds can say."""
        refuse_first(self._problems())

    # What the two kinds answer differently.

    def _purpose(self) -> Purpose:
        return Purpose.COMPLETION

    def _problems(self) -> Iterator[tuple[str, str]]:
        yield from self.sampling_problems()
        for token, amount in self.logit_bias or ():
            if type(token) is not int or token < 0 or isinstance(amount, str):
                yield "logit_bias", "each is a token id, and a number or false."


class CompletionRequest(GeneratingRequest, kw_only=True):
    """POST /completion."""

    prompt: str | Mixed

    def _problems(self) -> Iterator[tuple[str, str]]:
        yield from super()._problems()
        if isinstance(self.prompt, list) and len(self.prompt) > 1 and all(isinstance(it, str) for it in self.prompt):
            yield "prompt", "it has several texts; send a request for each."


class Extra(Struct):
    text: str
    filename: Annotated[str, Meta(max_length=4096)] = "tmp"


class InfillRequest(GeneratingRequest, kw_only=True):
    """POST /infill."""

    input_prefix: str = ""
    input_suffix: str = ""
    input_extra: Sequence[Extra] = ()
    prompt: str = ""  # what the line begins with, behind the prefix

    def gap(self) -> Gap:
        others = [OtherFile(extra.filename, extra.text) for extra in self.input_extra]
        return Gap(self.input_prefix + self.prompt, self.input_suffix, others)

    def _purpose(self) -> Purpose:
        return Purpose.INSERTION


def _seconds(milliseconds: int | None) -> float | None:
    return milliseconds / 1000 if milliseconds else None
