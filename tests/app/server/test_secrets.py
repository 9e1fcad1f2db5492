"""Logs never contain keys, tokens, or prompts, even at the highest log level."""

import io
import json
import logging
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from app.generation.template import ChatTemplateRenderer
from app.server.application import AccessPolicy
from app.server.http.access import Authenticator
from app.settings.settings import load_settings
from app.text.detokenizer import IncrementalDetokenizer
from app.text.tokenizer import Tokenizer
from tests.app.server.live_server import ControlledRunner, LiveServer, controlled_engine
from tests.app.server.test_bad_requests import CHAT, COMPLETION

KEY, TOKEN, PROMPT = "sk-canary-of-the-key", "hf_canaryOfTheToken", "The canary of the prompt sings."


@pytest.fixture
def logged() -> Iterator[io.StringIO]:
    """A buffer with everything that is logged except by the client, with tracebacks."""
    written = io.StringIO()
    handler, root = logging.StreamHandler(written), logging.getLogger()
    handler.setFormatter(logging.Formatter("%(name)s %(levelname)s %(message)s"))
    handler.addFilter(lambda record: not record.name.startswith(("httpx", "httpcore")))
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.DEBUG)
    yield written
    root.removeHandler(handler)
    root.setLevel(level)


@pytest.fixture
def stack(tokenizer: Tokenizer, renderer: ChatTemplateRenderer) -> Iterator[tuple[LiveServer, ControlledRunner]]:
    engine, runner = controlled_engine(tokenizer.vocab_size)
    with LiveServer("hash", engine, tokenizer, renderer, policy=AccessPolicy(Authenticator([KEY]))) as server:
        yield server, runner


def bodies() -> Iterator[tuple[str, dict[str, object]]]:
    """Return requests that end in different ways. Each of them contains the prompt."""
    said = [{"role": "user", "content": PROMPT}]
    for stream in (False, True):
        yield CHAT, {"messages": said, "max_tokens": 2, "stream": stream}
        yield COMPLETION, {"prompt": PROMPT, "max_tokens": 2, "echo": True, "logprobs": 1, "stream": stream}
    yield CHAT, {"messages": [{"role": PROMPT, "content": "Hi"}]}
    yield CHAT, {"messages": said, "guided_regex": f"({PROMPT}"}
    yield CHAT, {"messages": said, "response_format": {"type": PROMPT}}
    yield CHAT, {"messages": [{"role": "user", "content": PROMPT * 5000}]}
    yield COMPLETION, {"prompt": PROMPT, "user": PROMPT, "stop": PROMPT, "cache_salt": PROMPT, "model": PROMPT}


def test_logs_contain_no_key_and_no_prompt(
    stack: tuple[LiveServer, ControlledRunner], logged: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, runner = stack
    statuses = set()
    with httpx.Client(base_url=server.url, timeout=60) as http:
        for path, body in bodies():
            url = f"{path}?api_key={KEY}&prompt={PROMPT}"
            for headers in ({"x-api-key": KEY}, {"authorization": f"Bearer {KEY}"}, {"x-api-key": f"{KEY}2"}):
                statuses.add(http.post(url, json={"model": "hash", **body}, headers=headers).status_code)
        assert statuses == {200, 400, 401, 404}
        asked = {"model": "hash", "prompt": PROMPT, "max_tokens": 2}
        runner.failures = 1
        assert http.post(COMPLETION, json=asked, headers={"x-api-key": KEY}).status_code == 500

        async def mistaken(text: str) -> None:
            raise KeyError(text, KEY)

        monkeypatch.setattr(server.service, "encode_text", mistaken)
        for stream in (False, True):
            reply = http.post(COMPLETION, json={**asked, "stream": stream}, headers={"x-api-key": KEY})
            assert (reply.status_code, "canary" in reply.text) == (500, False)
    text = logged.getvalue()
    assert "a step of 1 requests failed" in text  # this line proves that logging was active
    assert "mistaken" in text
    assert "KeyError" in text
    assert "canary" not in text.lower()


def test_stream_broken_by_a_bug_reveals_no_details(
    stack: tuple[LiveServer, ControlledRunner], logged: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, runner = stack

    def mistaken(detokenizer: IncrementalDetokenizer, token_id: int) -> str:
        raise KeyError(PROMPT)

    asked = {"model": "hash", "prompt": PROMPT, "max_tokens": 200, "stream": True, "ignore_eos": True, "logprobs": 1}
    runner.steps_allowed = threading.Semaphore(3)
    with httpx.stream("POST", f"{server.url}{COMPLETION}", json=asked, headers={"x-api-key": KEY}) as reply:
        lines = reply.iter_lines()
        next(lines)
        monkeypatch.setattr(IncrementalDetokenizer, "push", mistaken)
        runner.steps_allowed.release(1000)
        last = [line for line in lines if line][-1].removeprefix("data: ")
    assert json.loads(last)["error"]["type"] == "server_error"
    assert "mistaken" in logged.getvalue()
    assert "canary" not in logged.getvalue().lower() + last


def test_settings_are_shown_without_secrets(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("INGLE_API_KEY", KEY)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    settings = load_settings()
    assert (settings.api_key, settings.hub_token) == ((KEY,), TOKEN)
    assert "canary" not in f"{settings} {settings!r}".lower()
    assert not [argument for argument in sys.argv if "canary" in argument]


def test_name_of_a_caller_does_not_reveal_the_key() -> None:
    scope = {"type": "http", "method": "GET", "path": "/", "headers": [(b"x-api-key", KEY.encode())]}
    assert KEY not in repr(Authenticator(["another", KEY]).authenticate(scope))
    assert KEY not in repr(vars(Authenticator(["another", KEY])))
