"""Detection of requests that are stuck in preparation."""

from app.generation.service import STUCK_SECONDS, Preparation
from tests.app.server.live_server import Clock


def test_stuck_preparation_is_reported_until_a_request_is_prepared() -> None:
    clock = Clock()
    preparation = Preparation(clock)
    clock.seconds += 10 * STUCK_SECONDS  # the service is idle for a long time
    assert preparation.problem() == ""
    with preparation.track():
        clock.seconds += STUCK_SECONDS - 1
        assert preparation.problem() == ""
        with preparation.track():
            clock.seconds += 1
            assert preparation.problem() == "no request was prepared for 60 s"
        assert preparation.problem() == ""
        clock.seconds += STUCK_SECONDS
        assert preparation.problem() != ""
    assert preparation.problem() == ""
