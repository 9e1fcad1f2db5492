"""Sampling fields shared by llama.cpp's server and Ollama: their bounds, and the engine's names for them.

Fields that are absent or null get the defaults of the API that the request uses.
"""

from typing import Annotated, Any, TypeAlias

from msgspec import Meta

from app.server.request_fields import DryFields, Fraction, StopText, Temperature
from engine.sampling_params import MAX_STOPS

ANY_SEED = 2**32 - 1  # llama.cpp's server reports it if no seed was set, and clients send it back

Amount: TypeAlias = Annotated[int, Meta(ge=-1, le=2**31 - 1)]
Penalty: TypeAlias = Annotated[float, Meta(ge=-100, le=100)]

_SAME_IN_SAMPLING = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty")


class LlamaSampling(DryFields, kw_only=True):
    """Sampling fields of requests to llama.cpp's server and to Ollama."""

    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None  # below 0, or ANY_SEED: random
    temperature: Temperature | None = None
    top_k: Amount | None = None  # -1 and 0: no limit
    top_p: Fraction | None = None
    min_p: Fraction | None = None
    repeat_penalty: Annotated[float, Meta(ge=0.01, le=100)] | None = None
    repeat_last_n: Amount | None = None  # 0 turns the penalty off; otherwise it covers all tokens
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    stop: StopText | Annotated[list[StopText], Meta(max_length=MAX_STOPS)] | None = None

    def sampling(self) -> dict[str, Any]:
        """Return the fields of SamplingParams that the request sets."""
        given: dict[str, Any] = {name: getattr(self, name) for name in _SAME_IN_SAMPLING}
        given |= {"top_k": None if self.top_k is None else max(0, self.top_k)}
        given |= {"repetition_penalty": 1.0 if self.repeat_last_n == 0 else self.repeat_penalty}
        given |= {"seed": None if self.seed is None or self.seed < 0 or self.seed == ANY_SEED else self.seed}
        given_values = {name: value for name, value in given.items() if value is not None}
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        return {**given_values, "stop": stop}


def reply_limit(length: int | None) -> int | None:
    """Return the token limit of a reply from `n_predict` or `num_predict`. Below 0, there is no limit.

    For 0, which asks only for prefill, one token is generated and not reported.
    """
    return None if length is None or length < 0 else max(1, length)
