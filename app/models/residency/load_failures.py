"""Failures of loads: the error that requests get, and the seconds until the model is tried again."""

import logging
from collections.abc import Mapping

from app.models.residency.ledger import Never
from app.models.residency.resident import DoesNotFit, Needs
from app.progress import format_bytes
from engine.errors import FREE_MEMORY, EngineError, OutOfMemory
from quant.errors import InglenookError

log = logging.getLogger(__name__)

OUT_OF_MEMORY = (OutOfMemory, MemoryError)
FAILED_SECONDS = 60.0  # seconds for which a model that cannot be loaded is not tried again
FULL_SECONDS = 10.0  # the same after memory ran out, since other programs may free some at any time


class MemoryTaken(OutOfMemory):
    """Other programs hold memory that a model needs. No model was unloaded for it, and no load was started."""


def refusal(title: str, verdict: Never, capacity: int, remedy: str) -> DoesNotFit | MemoryTaken:
    """Return the error for a model that does not fit now even if all others are unloaded.

    `capacity` is the number of bytes that all models could use if no other program used the memory. A model that needs
    more never fits.
    """
    needs = f"{title} needs {format_bytes(verdict.needed)} of memory"
    available = format_bytes(verdict.available)
    if verdict.needed > capacity:
        return DoesNotFit(f"{needs}, and all models may use {available}", remedy)
    free = f"{available} of {format_bytes(capacity)} are available ({verdict.memory})"
    return MemoryTaken(f"{needs}, and {free}", f"Close other programs. {remedy}")


def problem_of(error: Exception, title: str) -> InglenookError:
    """Return the error for the requests that wait for a model, and log the reason."""
    if isinstance(error, InglenookError):
        log.warning("%s was not loaded: %s", title, error)
        return error
    if isinstance(error, MemoryError):
        log.warning("%s was not loaded: there is not enough memory", title)
        return OutOfMemory(f"{title} could not be loaded: there is not enough memory", FREE_MEMORY)
    log.error("loading %s failed", title, exc_info=error)
    return EngineError(f"{title} could not be loaded", "The log of the server has the details.")


def pause_after(problem: InglenookError) -> float:
    """Return the seconds until a model that failed to load is tried again."""
    return FULL_SECONDS if isinstance(problem, OutOfMemory) else FAILED_SECONDS


def with_numbers(error: OutOfMemory, title: str, needs: Needs, allotted: Mapping[str, int]) -> OutOfMemory:
    """Return an error of a load with the bytes that the model needs, and those that it could use."""
    least = needs.useful if needs.least is None else needs.least
    numbers = ", ".join(
        f"{format_bytes(least.get(memory, 0))} of {format_bytes(free)} ({memory})" for memory, free in allotted.items()
    )
    return OutOfMemory(f"{title} ran out of memory, although it needs {numbers}: {error.message}", error.remedy)
