"""The check of a client: what it finds for a working client, and for each planted fault."""

import asyncio
import os
import sys
import threading
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import httpx
import pytest

from app.connect.clients import find_client
from app.connect.connection import Connection
from app.connect.exchanges import EXCHANGES, check_requests
from app.connect.probe import REPLY_TOKENS, Finding, Probed, check_client, new_nonce, proxy_in_the_way
from app.generation.template import ChatTemplateRenderer
from app.process.instance import Instance
from app.server.application import AccessPolicy
from app.server.http.access import Authenticator
from app.text.tokenizer import Tokenizer
from tests.app.connect import stand_in
from tests.app.server.live_server import LiveServer, controlled_engine
from tests.app.server.scripted_server import ScriptedServer
from tests.support.local_servers import refusing_port

CALL = '<tool_call>\n{"name": "list", "arguments": {}}\n</tool_call>'
PLAIN = {name: value for name, value in os.environ.items() if "proxy" not in name.lower()}


def probed(server: LiveServer, url: str = "", model: str = "", key: str = "none", **environment: str) -> Probed:
    """Return a stand-in that is set up for a server, or for another URL, model, or key."""
    name = server.service.name
    command = (sys.executable, "-S", stand_in.__file__, url or server.url, model or name, key)
    connection = Connection(server.url, name, server.service.context_length, has_tools=True)
    return Probed(find_client("pi"), connection, command, {**PLAIN, **environment})


def check(server: LiveServer, one: Probed, key: str | None = None) -> Mapping[str, Finding]:
    return collected(check_client(one, instance_of(server), key))


def instance_of(server: LiveServer) -> Instance:
    return Instance(os.getpid(), server.port, server.url, server.service.name, "", "2026-01-01T00:00:00")


def collected(found: AsyncIterator[Finding]) -> Mapping[str, Finding]:
    async def findings() -> list[Finding]:
        return [finding async for finding in found]

    return {finding.name: finding for finding in asyncio.run(findings())}


def statuses(found: Mapping[str, Finding]) -> Mapping[str, str]:
    return {name: finding.status for name, finding in found.items()}


@pytest.fixture
def server(scripted_server: ScriptedServer) -> ScriptedServer:
    scripted_server.says("Hello")
    return scripted_server


def test_working_client_passes_and_no_folder_stays(
    server: ScriptedServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    found = check(server, probed(server))
    assert statuses(found) == {"reply": "ok", "server": "ok", "context": "ok", "cache": "ok", "tools": "skip"}
    assert list(tmp_path.iterdir()) == []


def test_round_trip_of_a_tool_is_found(server: ScriptedServer) -> None:
    server.says(CALL)
    assert check(server, probed(server))["tools"].status == "ok"


def test_long_reply_is_stopped(server: ScriptedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    nonce, done = new_nonce(), threading.Event()
    monkeypatch.setattr("app.connect.probe.new_nonce", lambda: nonce)
    server.runner.script = server.service.tokenizer.encode("word")
    with server.runner.held() as steps:

        def step() -> None:
            while not done.wait(0.005):
                steps.release()

        stepping = threading.Thread(target=step)
        stepping.start()
        try:
            assert check(server, probed(server))["server"].status == "ok"
        finally:
            done.set()
            stepping.join()
    seen = httpx.get(f"{server.url}/inglenook/seen", params={"nonce": nonce}, trust_env=False).json()["requests"]
    assert all(REPLY_TOKENS <= one["completion_tokens"] < one["max_tokens"] for one in seen)


def test_wrong_port_is_found(server: ScriptedServer) -> None:
    with refusing_port() as port:
        found = check(server, probed(server, url=f"http://127.0.0.1:{port}"))
    assert statuses(found) == {"reply": "fail", "server": "fail", "context": "ok"}
    assert server.url in found["server"].remedy


def test_wrong_model_is_found(server: ScriptedServer) -> None:
    found = check(server, probed(server, model="gpt-x"))
    assert found["server"].status == "fail"
    assert "'gpt-x'" in found["server"].found
    assert "scripted" in found["server"].remedy


def test_context_that_is_shorter_than_the_client_expects_is_found(server: ScriptedServer) -> None:
    found = check(server, replace(probed(server), believed_context=40_960))
    assert found["context"].status == "fail"
    assert "40,960" in found["context"].found
    assert "2,048" in found["context"].found


def test_template_without_tools_is_found(hash_server: LiveServer) -> None:
    found = check(hash_server, probed(hash_server))
    assert found["tools"].status == "fail"
    assert "template" in found["tools"].found


def test_proxy_in_the_way_is_found(server: ScriptedServer) -> None:
    with refusing_port() as port:
        found = check(server, probed(server, http_proxy=f"http://127.0.0.1:{port}"))
    assert found["server"].status == "fail"
    assert "http_proxy" in found["server"].found
    assert "NO_PROXY" in found["server"].remedy


def test_another_server_that_answers_nonsense_is_found(server: ScriptedServer) -> None:
    with nonsense() as url:
        found = check(server, probed(server, url=url))
    assert found["reply"].status == "ok"
    assert found["server"].status == "fail"
    assert "another server" in found["server"].found


def test_wrong_key_is_found(tokenizer: Tokenizer, renderer: ChatTemplateRenderer) -> None:
    engine, _ = controlled_engine(tokenizer.vocab_size)
    policy = AccessPolicy(Authenticator(["good"], "own"))
    with LiveServer("hash", engine, tokenizer, renderer, policy=policy) as server:
        found = check(server, probed(server, key="wrong"), "own")
    assert found["server"].status == "fail"
    assert "key" in found["server"].remedy


def test_prompt_that_changes_with_each_run_is_found(server: ScriptedServer) -> None:
    found = check(server, probed(server, CHANGES="1"))
    assert found["cache"].status == "fail"


@pytest.mark.parametrize("name", EXCHANGES)
def test_requests_of_a_client_with_a_window_are_answered(server: ScriptedServer, name: str) -> None:
    found = check_by_requests(server, server.url, name)
    assert statuses(found) == {"requests": "ok", "tools": "ok", "client": "skip"}


def test_requests_that_another_server_answers_fail(server: ScriptedServer) -> None:
    with nonsense() as url:
        found = check_by_requests(server, url, "droid")
    assert statuses(found) == {"requests": "fail"}


def check_by_requests(server: LiveServer, url: str, name: str) -> Mapping[str, Finding]:
    connection = Connection(url, server.service.name, server.service.context_length, has_tools=True)
    return collected(check_requests(find_client(name), connection, instance_of(server), None))


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"HTTP_PROXY": "http://p:1"}, "HTTP_PROXY"),
        ({"all_proxy": "socks5://p:1", "NO_PROXY": "example.org"}, "all_proxy"),
        ({"http_proxy": "http://p:1", "no_proxy": "localhost, 127.0.0.1"}, ""),
        ({"http_proxy": "http://p:1", "NO_PROXY": "*"}, ""),
        ({"https_proxy": "http://p:1"}, ""),
    ],
)
def test_proxy_variables_are_in_the_way_unless_this_machine_is_exempt(
    environment: Mapping[str, str], expected: str
) -> None:
    assert proxy_in_the_way(environment) == expected


@contextmanager
def nonsense() -> Iterator[str]:
    """Run a server that answers each request with status 200 and a constant reply."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:  # the name that the library calls
            self.rfile.read(int(self.headers["content-length"]))
            body = b'{"choices": [{"message": {"role": "assistant", "content": "nonsense"}}]}'
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002  # the name of the library
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()
