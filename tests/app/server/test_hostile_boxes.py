"""Boxes that send invalid, endless, or dangerous replies, and boxes that end a reply early."""

import ssl
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest

from app.generation.template import ChatTemplateRenderer
from app.server.boxes import Boxes
from app.settings.boxes import keep_box
from app.text.tokenizer import Tokenizer
from tests.app.server.live_server import LiveServer, controlled_engine
from tests.app.server.shared_machine import RawBox, SharedMachine, share

Answer = Callable[[ssl.SSLSocket, bytes], None]
OK = b"HTTP/1.1 200 OK\r\n"
EVENTS = OK + b"content-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
LIST = b'{"object":"list","data":[%s],"first_id":"x","last_id":"x","has_more":false}'


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> SharedMachine:
    return share(tmp_path_factory.mktemp("box"))


@pytest.fixture
def against(
    shared: SharedMachine, tmp_path: Path, tokenizer: Tokenizer, renderer: ChatTemplateRenderer
) -> Callable[[Answer], Any]:
    """Return a context manager: a client of a laptop whose box answers with `answer`."""

    @contextmanager
    def opened(answer: Answer) -> Iterator[httpx.Client]:
        raw = RawBox(shared, answer)
        engine, _ = controlled_engine(tokenizer.vocab_size)
        keep_box(shared.box(raw.port), tmp_path)
        with (
            LiveServer("small", engine, tokenizer, renderer, boxes=Boxes(tmp_path)) as laptop,
            httpx.Client(base_url=laptop.url, timeout=30) as client,
        ):
            yield client
            # the server still works
            own = client.post("/v1/completions", json={"model": "small", "prompt": "Hi", "max_tokens": 1})
            assert own.status_code == 200
        raw.close()
        engine.assert_empty()

    return opened


def says(reply: bytes) -> Answer:
    return lambda connection, head: connection.sendall(reply)


def whole(body: bytes, kind: bytes = b"application/json", more: bytes = b"") -> bytes:
    return OK + b"content-type: %s\r\ncontent-length: %d\r\n%s\r\n" % (kind, len(body), more) + body


def endless(start: bytes, piece: bytes) -> Answer:
    """Return an answer that sends a piece again and again, until the client closes the connection."""

    def send(connection: ssl.SSLSocket, head: bytes) -> None:
        connection.sendall(start)
        with suppress(OSError):
            while True:
                connection.sendall(piece)

    return send


def ask(client: httpx.Client) -> httpx.Response:
    return client.post("/v1/completions", json={"model": "gpu/big", "prompt": "Hi"})


@pytest.mark.parametrize(
    ("reply", "status"),
    [
        (b"HTTP/1.1 302 Found\r\nlocation: http://127.0.0.1:1/\r\ncontent-length: 0\r\n\r\n", 502),
        (b"HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: x\r\n\r\n", 503),
        (b"HTTP/1.1 401 Unauthorized\r\ncontent-length: 0\r\n\r\n", 502),
        (whole(b"<script>alert(1)</script>", b"text/html"), 502),
        (whole(b"x", b"application/octet-stream"), 502),
        (b"not HTTP\r\n\r\n", 503),
        (b"", 503),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\n", 503),
    ],
)
def test_invalid_reply_is_an_error_of_the_api(against: Callable[[Answer], Any], reply: bytes, status: int) -> None:
    with against(says(reply)) as client:
        refused = ask(client)
    assert refused.status_code == status
    assert refused.json()["error"]["message"].startswith("gpu ")
    assert "location" not in refused.headers


def test_only_known_headers_are_passed_back(against: Callable[[Answer], Any]) -> None:
    more = b"set-cookie: a=b\r\naccess-control-allow-origin: *\r\nretry-after: 3\r\nx-powered-by: x\r\n"
    with against(says(whole(b"{}", more=more))) as client:
        headers = ask(client).headers
    assert set(headers) == {"content-type", "content-length", "retry-after", "x-content-type-options", "date"}
    assert headers["x-content-type-options"] == "nosniff"


def test_endless_headers_are_refused(against: Callable[[Answer], Any]) -> None:
    with against(endless(OK, b"x-more: " + b"x" * 4000 + b"\r\n")) as client:
        assert ask(client).status_code == 503


def test_endless_list_is_dropped(against: Callable[[Answer], Any]) -> None:
    sent = 0

    def send(connection: ssl.SSLSocket, head: bytes) -> None:
        nonlocal sent
        connection.sendall(EVENTS.replace(b"text/event-stream", b"application/json"))
        with suppress(OSError):
            while sent < 1 << 30:
                connection.sendall(chunk(b"x" * 65536))
                sent += 65536

    with against(send) as client:
        assert [model["id"] for model in client.get("/v1/models").json()["data"]] == ["small"]
        time.sleep(1)
    assert sent < 32 << 20


def test_silent_box_does_not_delay_lists(against: Callable[[Answer], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.server.boxes._ASK_SECONDS", 60.0)
    with against(lambda connection, head: time.sleep(20)) as client:
        client.get("/v1/models")
        monkeypatch.setattr("app.server.boxes.LIST_SECONDS", 60.0)  # a list that waited for the box would take 20 s
        started = time.monotonic()
        assert [model["id"] for model in client.get("/v1/models").json()["data"]] == ["small"]
        assert time.monotonic() - started < 10


@pytest.mark.parametrize(
    "entries",
    [
        b'{"id":"small"}',
        b'{"id":"gpu/big","name":"small"}',
        b'{"id":7}',
        b"7",
        b"{}",
        b"[" * 5000,
        b'"' + b"x" * 100 + b'"',
    ],
)
def test_list_with_foreign_names_is_ignored(against: Callable[[Answer], Any], entries: bytes) -> None:
    with against(says(whole(LIST % entries))) as client:
        assert [model["id"] for model in client.get("/v1/models").json()["data"]] == ["small"]


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def test_stream_that_the_box_cuts_ends_with_an_error_event(against: Callable[[Answer], Any]) -> None:
    """The SDKs raise an error of their API, even though the status was 200."""
    piece = b'data: {"id":"x","object":"chat.completion.chunk","created":1,"model":"gpu/big","choices":[]}\n\n'
    with against(says(EVENTS + chunk(piece))) as client:
        with openai.OpenAI(base_url=f"{client.base_url}/v1", api_key="none", max_retries=0) as api:
            stream = api.chat.completions.create(
                model="gpu/big", messages=[{"role": "user", "content": "Hi"}], stream=True
            )
            assert next(stream).model == "gpu/big"
            with pytest.raises(openai.APIError, match="gpu ended the reply early"):
                next(stream)
        with (
            anthropic.Anthropic(base_url=str(client.base_url), api_key="none", max_retries=0) as other,
            pytest.raises(anthropic.APIStatusError, match="gpu ended the reply early"),
        ):
            list(
                other.messages.create(
                    model="gpu/big", max_tokens=9, messages=[{"role": "user", "content": "Hi"}], stream=True
                )
            )


def test_cut_inside_an_event_closes_the_connection(against: Callable[[Answer], Any]) -> None:
    with against(says(EVENTS + chunk(b'data: {"id":'))) as client, pytest.raises(httpx.RemoteProtocolError):
        ask(client)


def test_large_reply_is_passed_without_being_stored(against: Callable[[Answer], Any]) -> None:
    """The client reads nothing: the box can send only what fits into the buffers of the sockets."""
    sent = 0

    def send(connection: ssl.SSLSocket, head: bytes) -> None:
        nonlocal sent
        connection.sendall(EVENTS)
        connection.settimeout(2)
        with suppress(OSError):
            while sent < 1 << 30:
                connection.sendall(chunk(b":" + b"x" * 65536 + b"\n\n"))
                sent += 65536

    with against(send) as client:
        body = {"model": "gpu/big", "prompt": "Hi", "stream": True}
        with client.stream("POST", "/v1/completions", json=body) as reply:
            assert reply.status_code == 200
            time.sleep(4)
    assert sent < 64 << 20


def test_request_without_keys_and_hop_headers_reaches_the_box(against: Callable[[Answer], Any]) -> None:
    heads: list[bytes] = []

    def note(connection: ssl.SSLSocket, head: bytes) -> None:
        heads.append(head.lower())
        connection.sendall(whole(b"{}"))

    secret = {
        "authorization": "Bearer secret",
        "x-api-key": "secret",
        "cookie": "secret",
        "connection": "x-hop",
        "x-hop": "secret",
        "te": "secret",
        "x-ingle-class": "background",
    }
    with against(note) as client:
        body = {"model": "gpu/big", "prompt": "Hi"}
        assert client.post("/v1/completions?echo=1", json=body, headers=secret).status_code == 200
    [head] = heads
    assert head.startswith(b"post /v1/completions?echo=1 http/1.1\r\n")
    assert b"secret" not in head
    for expected in (b"host: localhost\r\n", b"x-ingle-box: gpu\r\n", b"x-ingle-class: background\r\n"):
        assert expected in head
    assert head.count(b"\r\nauthorization: bearer ") == 1
