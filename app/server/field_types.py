"""Types of fields that requests of all dialects have, each with its bounds."""

from typing import Annotated, TypeAlias

from msgspec import Meta

from engine.request import MAX_LOGPROBS, MAX_TEMPERATURE

ModelName: TypeAlias = Annotated[str, Meta(max_length=1024)]  # absent or null: the served model
Temperature: TypeAlias = Annotated[float, Meta(ge=0, le=MAX_TEMPERATURE)]
Count: TypeAlias = Annotated[int, Meta(ge=0, le=2**31 - 1)]
PositiveCount: TypeAlias = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Milliseconds: TypeAlias = Annotated[int, Meta(ge=0, le=2**31 - 1)]
TokenId: TypeAlias = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Fraction: TypeAlias = Annotated[float, Meta(ge=0, le=1)]
Alternatives: TypeAlias = Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)]
StopText: TypeAlias = Annotated[str, Meta(min_length=1, max_length=1024)]
