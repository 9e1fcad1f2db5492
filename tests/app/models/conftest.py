"""Fixtures of download tests, in which retries do not wait."""

import pytest

from app.models import hub
from app.models.transfer import attempts


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempts, "WAITS", (0.0,) * len(attempts.WAITS))
    monkeypatch.setattr(hub, "SHORT_WAITS", (0.0,) * len(attempts.SHORT_WAITS))
