"""Types and fields that requests of several dialects share."""

from collections.abc import Sequence
from typing import Annotated, Any, TypeAlias

from msgspec import Meta, Struct

from engine.sampling_params import MAX_LOGPROBS, MAX_TEMPERATURE, DryParams

ModelName: TypeAlias = Annotated[str, Meta(max_length=1024)]  # absent or null: the served model
Temperature: TypeAlias = Annotated[float, Meta(ge=0, le=MAX_TEMPERATURE)]
Count: TypeAlias = Annotated[int, Meta(ge=0, le=2**31 - 1)]
PositiveCount: TypeAlias = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Milliseconds: TypeAlias = Annotated[int, Meta(ge=0, le=2**31 - 1)]
TokenId: TypeAlias = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Fraction: TypeAlias = Annotated[float, Meta(ge=0, le=1)]
Alternatives: TypeAlias = Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)]
StopText: TypeAlias = Annotated[str, Meta(min_length=1, max_length=1024)]


DRY_BREAKERS = ("\n", ":", '"', "*")  # llama.cpp's

BreakerText: TypeAlias = Annotated[str, Meta(min_length=1, max_length=64)]


class DryFields(Struct, kw_only=True):
    """What a request says of it."""

    dry_multiplier: Annotated[float, Meta(ge=0, le=100)] | None = None  # 0: off; the others say how
    dry_base: Annotated[float, Meta(ge=1, le=4)] | None = None
    dry_allowed_length: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    dry_penalty_last_n: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None  # -1: all tokens; 0: off
    dry_sequence_breakers: Annotated[list[BreakerText], Meta(max_length=64)] | None = None

    def breakers(self) -> Sequence[str]:
        """Texts whose tokens no repetition goes across, where repetitions are looked for."""
        if not self.dry_multiplier or self.dry_penalty_last_n == 0:
            return ()
        return DRY_BREAKERS if self.dry_sequence_breakers is None else self.dry_sequence_breakers

    def dry(self) -> DryParams | None:
        """The parameters but for the breakers. Raises InvalidSampling."""
        if not self.dry_multiplier or self.dry_penalty_last_n == 0:
            return None
        given = {"base": self.dry_base, "allowed_length": self.dry_allowed_length}
        known: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        last_n = None if self.dry_penalty_last_n == -1 else self.dry_penalty_last_n
        return DryParams(self.dry_multiplier, last_n=last_n, **known)
