"""Converts errors from this program to the ClientError that the screens show."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ParamSpec, TypeVar

from quant.errors import InglenookError
from tui.client import ClientError

P = ParamSpec("P")
T = TypeVar("T")


@contextmanager
def client_errors() -> Iterator[None]:
    """Convert InglenookError and OSError raised in the body to ClientError.

    The details are the lines after the first one of the message, and the message of the cause.
    """
    try:
        yield
    except InglenookError as problem:
        cause = problem.__cause__
        message, _, more = problem.message.partition("\n")
        details = "\n".join(filter(None, (more, cause.message if isinstance(cause, InglenookError) else "")))
        raise ClientError(message, problem.remedy, details) from problem
    except OSError as problem:
        where = f"{problem.filename}: " if problem.filename else ""
        raise ClientError(f"{where}{problem.strerror or problem}") from problem


async def to_thread(work: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
    """Run `work` in a thread and return its result. Its errors are raised as ClientError."""
    import asyncio

    with client_errors():
        return await asyncio.to_thread(work, *arguments, **named)
