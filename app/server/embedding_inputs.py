"""What an embedding model is to read: texts or token ids of a request become sequences that it can."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, TypeAlias

from msgspec import Meta

from app.generation.embedding_service import EmbeddingService, InputTooLong
from app.server.http.errors import InvalidRequest, check_vocabulary

MAX_INPUTS = 2048  # of one request, as in OpenAI's API

# Texts are cut to so many tokens, and with -1 to as many as the model reads.
Truncation: TypeAlias = Annotated[int, Meta(ge=-1, le=2**31 - 1)]


async def read_inputs(
    service: EmbeddingService, inputs: Mapping[str, str | tuple[int, ...]], truncate: int | None
) -> list[tuple[int, ...]]:
    """The ids of each input, all of which the model can read; inputs are named by their places in the request.

    Raises InvalidRequest naming one that it cannot.
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
    """What a text is to be cut to; None: it is not."""
    longest = service.context_length
    return truncate if truncate is None else min(longest, longest if truncate == -1 else truncate)


def check_sequence(service: EmbeddingService, name: str, ids: Sequence[int], limit: int | None) -> None:
    """Raise InvalidRequest for ids that the model cannot read, or that could not be cut to `limit`."""
    if not ids:
        raise invalid_input(name, "nothing is left of it")
    if limit is not None and len(ids) > limit:
        raise invalid_input(name, f"the {len(ids)} tokens that cannot be cut are more than {limit}")
    if len(ids) > service.context_length:
        problem = f"its {len(ids)} tokens are more than the {service.context_length} that the model reads"
        raise invalid_input(name, problem, code="context_length_exceeded")
    check_vocabulary(ids, service.vocab_size, name)


@contextlib.contextmanager
def convert_input_errors(service: EmbeddingService, names: Sequence[str]) -> Iterator[None]:
    """An InputTooLong that is raised inside becomes an InvalidRequest with the name of the input at its place."""
    try:
        yield
    except InputTooLong as error:
        problem = f"it has more than {error.least} tokens, and the model reads {service.context_length}"
        raise invalid_input(names[error.index], problem, code="context_length_exceeded") from error


def invalid_input(name: str, problem: str, code: str = "") -> InvalidRequest:
    remedy = "Send it in pieces, or have it cut with truncate_prompt_tokens: -1." if code else ""
    return InvalidRequest(f"{name}: {problem}", remedy, parameter=name, code=code)


def check_dimensions(service: EmbeddingService, dimensions: int | None) -> None:
    """Raise InvalidRequest for more of them than the model's vectors have."""
    if dimensions is not None and dimensions > service.dimensions:
        problem = f"{dimensions} is more than the {service.dimensions} that the model's vectors have."
        raise InvalidRequest(f"dimensions: {problem}", parameter="dimensions")
