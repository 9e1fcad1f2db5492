"""A fake server that implements enough of OpenAI's API for a chat, and sends prepared replies."""

import json
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self, TypeAlias

from tests.support.processes import HANGING_SECONDS


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore errors, because tests disconnect in the middle of a reply."""


Piece: TypeAlias = str | Mapping[str, Any]


class FakeEndpoint:
    """Serves inside its `with` block. Each request receives the next of `replies`, in pieces; the last reply is
    repeated.

    A piece is a text, or the delta of a chunk. Requests for a title receive `title`.
    """

    def __init__(self, replies: Sequence[Sequence[Piece]] = (("Hello.",),)) -> None:
        self.replies = list(replies)
        self.asked: list[dict[str, Any]] = []
        self.breaks_off = False  # whether to close the connection after the last piece of a reply
        self.error: object = None  # error to send after the last piece of a reply
        self.refusal: tuple[int, bytes] | None = None  # (status, body) to return for every request, if not None
        self.title = "A title"
        self.pause = 0.0  # seconds between two pieces of a reply
        self.done = 0  # number of replies that were sent completely
        self.model: dict[str, Any] = {"id": "stand-in", "max_model_len": 1 << 24}
        self.usage: dict[str, Any] | None = {"prompt_tokens": 9, "completion_tokens": 2}
        self.timings: dict[str, float] = {}  # sent with the usage, if not empty
        self._held = threading.Event()
        self._held.set()
        self._server = _Server(("127.0.0.1", 0), self._handler())
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), name="endpoint", daemon=True)

    def hold(self) -> None:
        """Stop every reply after its first piece."""
        self._held.clear()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._held.set()
        self._server.shutdown()
        self._thread.join(HANGING_SECONDS)
        self._server.server_close()

    def _next(self, asked: dict[str, Any]) -> Sequence[Piece]:
        self.asked.append(asked)
        return self.replies.pop(0) if len(self.replies) > 1 else self.replies[0]

    def _chunks(self, pieces: Sequence[Piece]) -> Iterator[dict[str, Any]]:
        for number, piece in enumerate(pieces):
            if number:
                time.sleep(self.pause)
                self._held.wait()
            yield {"choices": [{"index": 0, "delta": {"content": piece} if isinstance(piece, str) else piece}]}
        if self.error is not None:
            yield {"error": self.error}
        if self.breaks_off:
            return
        calls = any("tool_calls" in piece for piece in pieces if not isinstance(piece, str))
        yield {"choices": [{"index": 0, "delta": {}, "finish_reason": "tool_calls" if calls else "stop"}]}
        if self.usage is not None:
            yield {"choices": [], "usage": self.usage} | ({"timings": self.timings} if self.timings else {})

    def _handler(endpoint: "FakeEndpoint") -> type[BaseHTTPRequestHandler]:  # noqa: N805  # `self` is the handler
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:  # http.server calls the method by this name
                self._answer("application/json", [json.dumps({"data": [endpoint.model]}).encode()])

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                asked = json.loads(body)
                for_chat = "max_tokens" not in asked  # only requests for a title have a limit
                pieces = endpoint._next(asked) if for_chat else (endpoint.title,)
                events = (b"data: " + json.dumps(chunk).encode() + b"\n\n" for chunk in endpoint._chunks(pieces))
                self._answer("text/event-stream", events)
                if endpoint.refusal is None:
                    self.wfile.write(b"data: [DONE]\n\n")
                endpoint.done += for_chat

            def _answer(self, media_type: str, parts: Any) -> None:
                status = 200
                if endpoint.refusal is not None:
                    status, *parts = endpoint.refusal
                self.send_response(status)
                self.send_header("content-type", media_type)
                self.send_header("connection", "close")
                self.end_headers()
                for part in parts:
                    self.wfile.write(part)
                    self.wfile.flush()

            def log_message(self, form: str, *values: object) -> None:
                pass

        return Handler
