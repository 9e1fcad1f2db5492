"""Convert the errors of a load that are not typed: failed allocations, and files that cannot be read."""

from collections.abc import Iterator
from contextlib import contextmanager

from engine.backends.device_errors import is_out_of_memory, raising_out_of_memory
from engine.freed_memory import FreeingOnError
from quant.errors import UNREADABLE, ModelFileError


@contextmanager
def converting_load_errors(name: str) -> Iterator[None]:
    """Convert failed allocations to OutOfMemory, and other OSErrors to ModelFileError, for the model `name`.

    Frees what the functions of a failed load still reference.
    """
    with FreeingOnError(), raising_out_of_memory():
        try:
            yield
        except OSError as error:
            if is_out_of_memory(error):
                raise
            file = error.filename or f"the files of {name}"
            raise ModelFileError(f"Cannot read {file}: {error.strerror or error}", UNREADABLE) from error
