"""Interrupt each wait of a hung test in turn, so that the test fails and the run continues."""

import signal
from collections.abc import Generator
from typing import Any

import pytest

AGAIN_SECONDS = 10.0  # seconds until the test's next wait is interrupted, for example in the exit of a `with` block


@pytest.hookimpl(wrapper=True, optionalhook=True)
def pytest_timeout_set_timer(settings: Any) -> Generator[None, object, object]:
    """Make the timer of pytest-timeout fire repeatedly: it would interrupt one wait only."""
    answer = yield
    if settings.method == "signal":
        signal.setitimer(signal.ITIMER_REAL, settings.timeout, min(AGAIN_SECONDS, settings.timeout))
    return answer
