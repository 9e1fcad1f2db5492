"""Logit biases of token ids and texts, as llama.cpp's server accepts them: pairs, or OpenAI's object."""

from collections.abc import Iterator
from typing import Annotated, TypeAlias

from msgspec import Meta

from app.generation.service import ChatService
from app.process.work_pool import Check
from engine.sampling_params import MAX_BIASES

NEVER = -100.0  # the bias that `false` means

_Pair: TypeAlias = Annotated[list[int | float | str | bool], Meta(min_length=2, max_length=2)]
_Text: TypeAlias = Annotated[str, Meta(max_length=1024)]
Biases: TypeAlias = (
    Annotated[list[_Pair], Meta(max_length=MAX_BIASES)]
    | Annotated[dict[_Text, float | bool], Meta(max_length=MAX_BIASES)]
)


def bias_problems(given: Biases | None) -> Iterator[tuple[str, str]]:
    """Yield (field, problem) pairs for invalid biases that the type `Biases` accepts."""
    for token, amount in _pairs(given):
        if isinstance(token, bool | float) or (isinstance(token, int) and token < 0):
            yield "logit_bias", "each key must be a token id or a string."
        if amount is True or isinstance(amount, str):
            yield "logit_bias", "each value must be a number or false."


async def token_biases(service: ChatService, given: Biases | None) -> tuple[tuple[int, float], ...]:
    """Return (token id, bias) pairs. The bias of a string applies to each of its tokens."""

    def resolve(check: Check) -> tuple[tuple[int, float], ...]:
        found: list[tuple[int, float]] = []
        for token, amount in _pairs(given):
            check()
            bias = NEVER if amount is False else float(amount)
            ids = service.tokenizer.encode(token) if isinstance(token, str) else [int(token)]
            found += ((token_id, bias) for token_id in ids)
        return tuple(found)

    return await service.texts.run(resolve) if given else ()


def _pairs(given: Biases | None) -> Iterator[tuple[int | float | str | bool, int | float | str | bool]]:
    if isinstance(given, dict):
        yield from ((int(key) if key.isdecimal() and key.isascii() else key, amount) for key, amount in given.items())
    else:
        yield from ((token, amount) for token, amount in given or ())
