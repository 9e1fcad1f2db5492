"""Hung tests: each wait of one is interrupted in turn, so that the test fails and the run goes on."""

import signal
from collections.abc import Generator
from typing import Any

import pytest

AGAIN_SECONDS = 10.0  # until the next wait of the same test is interrupted, of `with` blocks for one


@pytest.hookimpl(wrapper=True, optionalhook=True)
def pytest_timeout_set_timer(settings: Any) -> Generator[None, object, object]:
    """Have the timer of pytest-timeout fire again and again: it interrupts one wait only."""
    answer = yield
    if settings.method == "signal":
        signal.setitimer(signal.ITIMER_REAL, settings.timeout, min(AGAIN_SECONDS, settings.timeout))
    return answer
