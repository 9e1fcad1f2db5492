"""Interrupt each wait of a hung test in turn, so that the test fails and the run continues."""

import signal
from collections.abc import Generator
from typing import Any

import pytest

AGAIN_SECONDS = 10.0  # time until the test's next wait is interrupted, for example one in the exit of a `with` block


@pytest.hookimpl(wrapper=True, optionalhook=True)
def pytest_timeout_set_timer(settings: Any) -> Generator[None, object, object]:
    """Make the timer of pytest-timeout fire repeatedly, because it would interrupt only one wait."""
    answer = yield
    if settings.method == "signal":
        signal.setitimer(signal.ITIMER_REAL, settings.timeout, min(AGAIN_SECONDS, settings.timeout))
    return answer
