"""An HTTP client that needs little processor time, because it shares the processor with the server that it measures.

It uses one connection per stream and only the HTTP that a streamed completion needs. Its only work per token is to
record the time. It measures all servers in the same way. The client of app/client/http.py takes 70 to 100 us per token
with 16 streams, this one 20 to 40. Reference: RFC 9112, section 7.1.
"""

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from app.bench.competitor import CompetitorFailed
from app.bench.sample import Timeline
from app.client.server_sent_events import EventReader

_READ_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Address of a server, and the fields and the API key that its requests need."""

    host: str
    port: int
    model: str
    extra: Mapping[str, object] = field(default_factory=dict)  # fields of the request in addition to the common ones
    key: str | None = None  # API key; None: the server needs none


class _Choice(msgspec.Struct):
    text: str = ""


class _Usage(msgspec.Struct):
    completion_tokens: int


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: object = None


_decode = msgspec.json.Decoder(_Chunk).decode


async def stream_all(endpoint: Endpoint, prompts: Sequence[Sequence[int]], output_tokens: int) -> list[Timeline]:
    """Send the prompts at the same time, and read the replies to the end. Raises CompetitorFailed."""
    try:
        replies = [stream(endpoint, prompt, output_tokens) for prompt in prompts]
        return await asyncio.gather(*replies)
    except (OSError, EOFError, ValueError, msgspec.MsgspecError) as problem:
        address = f"the server at {endpoint.host}:{endpoint.port}"
        raise CompetitorFailed(f"{address}: {str(problem) or type(problem).__name__}") from problem


async def stream(endpoint: Endpoint, prompt: Sequence[int], output_tokens: int) -> Timeline:
    """Send one prompt, and read the reply to the end. Raises OSError, EOFError, ValueError, or MsgspecError."""
    request = _request(endpoint, prompt, output_tokens)
    reader, writer = await asyncio.open_connection(endpoint.host, endpoint.port)
    try:
        sent = time.perf_counter()
        writer.write(request)
        head = await reader.readuntil(b"\r\n\r\n")
        if b" 200 " not in head.partition(b"\r\n")[0]:
            raise ValueError((head + await reader.read(_READ_BYTES)).decode(errors="replace"))
        reply = _Reply()
        body = _Dechunker()
        while not reply.complete:
            part = await reader.read(_READ_BYTES)
            if not part:
                raise EOFError("the connection closed before the reply was complete")
            reply.feed(body.feed(part), time.perf_counter())
    finally:
        writer.close()
    if reply.tokens != output_tokens:
        raise ValueError(f"a reply had {reply.tokens} tokens instead of {output_tokens}")
    return Timeline(sent, reply.arrivals, reply.tokens)


def _request(endpoint: Endpoint, prompt: Sequence[int], output_tokens: int) -> bytes:
    fields = {
        "model": endpoint.model,
        "prompt": list(prompt),
        "max_tokens": output_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        **endpoint.extra,
    }
    body = json.dumps(fields).encode()
    lines = (
        "POST /v1/completions HTTP/1.1",
        f"Host: {endpoint.host}:{endpoint.port}",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
        "Connection: close",
        *([] if endpoint.key is None else [f"Authorization: Bearer {endpoint.key}"]),
    )
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


class _Dechunker:
    """Removes the chunked transfer coding from a body, part by part."""

    def __init__(self) -> None:
        self._unread = b""

    def feed(self, part: bytes) -> bytes:
        """Return the content of the chunks that are complete now. Raises ValueError for an invalid chunk."""
        data, at, content = self._unread + part, 0, []
        while (line_end := data.find(b"\r\n", at)) >= 0:
            start = line_end + 2
            end = start + int(data[at:line_end].partition(b";")[0], 16)
            if len(data) < end + 2:
                break
            content.append(data[start:end])
            at = end + 2
        self._unread = data[at:]
        return b"".join(content)


class _Reply:
    """Records the arrival times of the parts of a reply."""

    def __init__(self) -> None:
        self.arrivals: list[float] = []
        self.tokens = 0
        self._events = EventReader()

    @property
    def complete(self) -> bool:
        return self._events.ended

    def feed(self, content: bytes, now: float) -> None:
        """Read the events in further bytes of the response. Raises ValueError if the server sends an error."""
        for data in self._events.feed(content):
            self._note(_decode(data), now)

    def _note(self, chunk: _Chunk, now: float) -> None:
        if chunk.error is not None:
            raise ValueError(json.dumps(chunk.error))
        if chunk.usage is not None:
            self.tokens = chunk.usage.completion_tokens
        # Tokens can have no text. A reply of only such tokens counts as arrived when it ends.
        if any(choice.text for choice in chunk.choices) or (self.tokens and not self.arrivals):
            self.arrivals.append(now)
