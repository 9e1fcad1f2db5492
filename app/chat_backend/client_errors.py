"""Errors of this program as the chat in the terminal is told them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ParamSpec, TypeVar

from quant.errors import InglenookError
from tui.client import ClientError

P = ParamSpec("P")
T = TypeVar("T")


@contextmanager
def client_errors() -> Iterator[None]:
    """What is raised inside becomes a ClientError, where the person can do something about it."""
    try:
        yield
    except InglenookError as problem:
        raise ClientError(problem.message, problem.remedy) from problem
    except OSError as problem:
        where = f"{problem.filename}: " if problem.filename else ""
        raise ClientError(f"{where}{problem.strerror or problem}") from problem


async def to_thread(work: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
    """The result of `work`, done on a thread; its errors as ClientError."""
    import asyncio

    with client_errors():
        return await asyncio.to_thread(work, *arguments, **named)
