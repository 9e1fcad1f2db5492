"""The limit of concurrent requests per key. Excess requests get 429 with Retry-After; other keys are not affected."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from app.generation.template import ChatTemplateRenderer
from app.server.application import AccessPolicy
from app.server.http.access import Authenticator, Caller, RequestLimits
from app.server.http.errors import InvalidRequest
from app.text.tokenizer import Tokenizer
from tests.app.server.live_server import ControlledRunner, LiveServer, controlled_engine
from tests.app.server.test_bad_requests import COMPLETION, VALID
from tests.support.processes import until

MOST = 3


@pytest.fixture
def stack(tokenizer: Tokenizer, renderer: ChatTemplateRenderer) -> Iterator[tuple[LiveServer, ControlledRunner]]:
    engine, runner = controlled_engine(tokenizer.vocab_size)
    policy = AccessPolicy(Authenticator(["first", "second"]), max_requests=MOST)
    with LiveServer("hash", engine, tokenizer, renderer, policy=policy) as server:
        yield server, runner
    engine.assert_empty()


def post(server: LiveServer, headers: dict[str, str]) -> httpx.Response:
    return httpx.post(f"{server.url}{COMPLETION}", json=VALID[COMPLETION], headers=headers, timeout=60)


def test_requests_over_the_limit_get_429_with_retry_after(stack: tuple[LiveServer, ControlledRunner]) -> None:
    server, runner = stack
    with ThreadPoolExecutor(MOST) as clients, runner.held() as steps:
        running = [clients.submit(post, server, {"x-api-key": "first"}) for _ in range(MOST)]
        until(lambda: len(server.streams._live) == MOST)
        for header in ({"x-api-key": "first"}, {"Authorization": "Bearer first"}):
            refused = post(server, header)
            assert (refused.status_code, refused.headers["retry-after"]) == (429, "5")
            error = refused.json()["error"]
            assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
            assert httpx.get(f"{server.url}/v1/models", headers=header).status_code == 200
        assert len(server.streams._live) == MOST  # the refused requests did not reach the engine
        other = clients.submit(post, server, {"x-api-key": "second"})
        steps.release(1000)
        assert [one.result().status_code for one in (*running, other)] == [200] * (MOST + 1)
    assert post(server, {"x-api-key": "first"}).status_code == 200


def test_failed_request_no_longer_counts() -> None:
    limits = RequestLimits(1)
    for _ in range(3):
        with pytest.raises(ZeroDivisionError), limits.count_request(Caller("a"), "POST"):
            raise ZeroDivisionError
    one, another = Caller("a"), Caller("b")
    with limits.count_request(one, "POST"), limits.count_request(another, "POST"), limits.count_request(one, "GET"):
        refused = limits.count_request(one, "POST")
        with pytest.raises(InvalidRequest):
            refused.__enter__()


def test_zero_max_requests_means_no_limit() -> None:
    limits = RequestLimits(0)
    with limits.count_request(Caller("a"), "POST"), limits.count_request(Caller("a"), "POST"):
        pass
