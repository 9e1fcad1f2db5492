"""The client that measures servers, against a server that sends predefined bytes."""

import asyncio
import json
from collections.abc import Sequence

import pytest

from app.bench.competitor import CompetitorFailed
from app.bench.completion_client import Endpoint, stream_all
from app.bench.sample import Timeline

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
DONE = b"data: [DONE]\n\n"


def event(text: str, tokens: int | None = None) -> bytes:
    usage = None if tokens is None else {"completion_tokens": tokens, "prompt_tokens": 3}
    return b"data: " + json.dumps({"choices": [{"text": text, "index": 0}], "usage": usage}).encode() + b"\n\n"


def chunk(content: bytes) -> bytes:
    return f"{len(content):X};extension=1\r\n".encode() + content + b"\r\n"


REPLY = (b": a comment\n\n", event(""), event("a"), event("ß"), event("c\r\n"), event("", 3), DONE)


def ask(parts: Sequence[bytes], *, streams: int = 1, tokens: int = 3) -> tuple[list[Timeline], list[bytes]]:
    """Return the timelines of requests to a server that sends `parts` one by one, and the requests that it received."""
    requests: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
        requests.append(head + await reader.readexactly(length))
        for part in parts:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(0)
        writer.close()

    async def run() -> list[Timeline]:
        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            endpoint = Endpoint("127.0.0.1", port, "tiny", {"cache_prompt": False})
            return await stream_all(endpoint, [[1, 2, 3]] * streams, tokens)

    return asyncio.run(run()), requests


def test_reply_in_whole_chunks_is_timed() -> None:
    [line], [request] = ask([HEAD, *map(chunk, REPLY), chunk(b"")])
    assert line.tokens == len(line.arrivals) == 3
    assert line.sent < line.first <= line.last
    head, _, body = request.partition(b"\r\n\r\n")
    assert head.startswith(b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:")
    wanted = json.loads(body)
    assert wanted["prompt"] == [1, 2, 3]
    assert (wanted["model"], wanted["cache_prompt"], wanted["ignore_eos"], wanted["temperature"]) == (
        "tiny", False, True, 0,
    )  # fmt: skip


@pytest.mark.parametrize("size", [1, 2, 7, 50])
def test_reply_is_read_in_pieces_of_any_size(size: int) -> None:
    """The stream has chunks without events and events in several chunks, and reads end anywhere."""
    events = b"".join(REPLY)
    chunks = b"".join(chunk(events[at : at + 33]) for at in range(0, len(events), 33))
    wire = HEAD + chunks + chunk(b"")
    [line], _ = ask([wire[at : at + size] for at in range(0, len(wire), size)])
    assert line.tokens == len(line.arrivals) == 3


def test_every_stream_sends_its_own_request() -> None:
    lines, requests = ask([HEAD, *map(chunk, REPLY)], streams=5)
    assert [line.tokens for line in lines] == [3] * 5
    assert len(requests) == 5


def test_part_with_several_tokens_has_one_arrival_time() -> None:
    [line], _ = ask([HEAD, *map(chunk, (event("a"), event("bc", 3), DONE))])
    assert (line.tokens, len(line.arrivals)) == (3, 2)


def test_token_without_text_arrives_with_the_end_of_the_reply() -> None:
    [line], _ = ask([HEAD, *map(chunk, (event(""), event("", 1), DONE))], tokens=1)
    assert (line.tokens, len(line.arrivals)) == (1, 1)


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ([b"HTTP/1.1 503 Service Unavailable\r\n\r\n", b'{"error": "loading"}'], "503"),
        ([HEAD, chunk(b'data: {"error": {"message": "out of blocks"}}\n\n')], "out of blocks"),
        ([HEAD, chunk(event("a")), chunk(event("", 1)), chunk(DONE)], "a reply had 1 tokens instead of 3"),
        ([HEAD, chunk(event("a"))], "closed before the reply was complete"),
        ([HEAD, chunk(b"data: {}}\n\n")], "server at 127.0.0.1"),
        ([HEAD, b"no chunk\r\n"], "server at 127.0.0.1"),
        ([b""], "server at 127.0.0.1"),
    ],
)
def test_invalid_reply_is_an_error(parts: list[bytes], words: str) -> None:
    with pytest.raises(CompetitorFailed, match=words):
        ask(parts)


def test_refused_connection_is_an_error() -> None:
    with pytest.raises(CompetitorFailed, match=r"server at 127\.0\.0\.1:9"):
        asyncio.run(stream_all(Endpoint("127.0.0.1", 9, "tiny"), [[1]], 1))
