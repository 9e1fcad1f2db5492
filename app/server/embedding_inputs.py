"""Inputs of embedding models: strings or token ids of a request become sequences that the model can read."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, TypeAlias

from msgspec import Meta

from app.generation.embedding_service import EmbeddingService, InputTooLong
from app.server.http.errors import InvalidRequest, check_vocabulary

MAX_INPUTS = 2048  # limit of the inputs of a request, as in OpenAI's API

# Number of tokens to keep of each input; -1 cuts an input to the model's context length.
Truncation: TypeAlias = Annotated[int, Meta(ge=-1, le=2**31 - 1)]


async def read_inputs(
    service: EmbeddingService, inputs: Mapping[str, str | tuple[int, ...]], truncate: int | None
) -> list[tuple[int, ...]]:
    """Return the token ids of each input. `inputs` maps the path of an input in the request to its string or ids.

    Raises InvalidRequest naming an input that the model cannot read.
    """
    limit = truncation_limit(service, truncate)
    texts = {name: one for name, one in inputs.items() if isinstance(one, str)}
    with convert_input_errors(service, list(texts)):
        encoded = iter(await service.encode(list(texts.values()), limit))
    sequences = [next(encoded) if isinstance(one, str) else one[:limit] for one in inputs.values()]
    for name, ids in zip(inputs, sequences, strict=True):
        check_sequence(service, name, ids, limit)
    return sequences


def truncation_limit(service: EmbeddingService, truncate: int | None) -> int | None:
    """Return the number of tokens to keep of each input; None: inputs are not cut."""
    longest = service.context_length
    return truncate if truncate is None else min(longest, longest if truncate == -1 else truncate)


def check_sequence(service: EmbeddingService, name: str, ids: Sequence[int], limit: int | None) -> None:
    """Raise InvalidRequest if the model cannot read `ids`, or if more than `limit` ids are left."""
    if not ids:
        raise invalid_input(name, "it is empty after truncation")
    if limit is not None and len(ids) > limit:
        raise invalid_input(name, f"it has {len(ids)} tokens that cannot be cut, and the limit is {limit}")
    if len(ids) > service.context_length:
        problem = f"it has {len(ids)} tokens, and the model reads at most {service.context_length}"
        raise invalid_input(name, problem, code="context_length_exceeded")
    check_vocabulary(ids, service.vocab_size, name)


@contextlib.contextmanager
def convert_input_errors(service: EmbeddingService, names: Sequence[str]) -> Iterator[None]:
    """Convert an InputTooLong that the `with` body raises into an InvalidRequest that names the input."""
    try:
        yield
    except InputTooLong as error:
        problem = f"it has more than {error.least} tokens, and the model reads at most {service.context_length}"
        raise invalid_input(names[error.index], problem, code="context_length_exceeded") from error


def invalid_input(name: str, problem: str, code: str = "") -> InvalidRequest:
    remedy = "Send shorter inputs, or set truncate_prompt_tokens to -1." if code else ""
    return InvalidRequest(f"{name}: {problem}", remedy, parameter=name, code=code)


def check_dimensions(service: EmbeddingService, dimensions: int | None) -> None:
    """Raise InvalidRequest for more dimensions than the model's vectors have."""
    if dimensions is not None and dimensions > service.dimensions:
        problem = f"the model's vectors have {service.dimensions} dimensions, fewer than {dimensions}."
        raise InvalidRequest(f"dimensions: {problem}", parameter="dimensions")
