"""The client of a running server, against a stand-in that sends given bytes."""

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import aclosing, closing
from dataclasses import dataclass, field
from typing import Any

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from app.client.http import ServerError, ServerUnreachable
from app.client.own_server import Client, Health
from app.errors import ModelNotFound
from app.generation.cache_report import CacheReport, Miss, MissReason
from app.generation.conversation import Message, ToolCall
from app.generation.events import ChatEvent, ReplyEnd, TextDelta
from app.process.instance import Instance
from app.process.listening import ListeningSockets
from engine.errors import PromptTooLong
from engine.request import FinishReason, TokenSources
from engine.sampling_params import SamplingParams
from quant.errors import InglenookError
from tests.support.processes import HANGING_SECONDS

TEXT = 'data: {"choices": [{"index": 0, "delta": {"content": "%s"}, "finish_reason": null}]}\n\n'
STOP = 'data: {"choices": [{"index": 0, "delta": {}, "finish_reason": "%s"}]}\n\n'
USAGE = (
    'data: {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10,'
    ' "prompt_tokens_details": {"cached_tokens": 5}}}\n\n'
)
DONE = "data: [DONE]\n\n"
ERROR = 'data: {"error": {"message": "The engine failed.", "type": "server_error", "param": null, "code": null}}\n\n'


MODELS = {"/models/m.gguf": {"default_sampling": {"temperature": 0.6}}, "other": {"default_sampling": None}}
HEALTH = {
    "status": "ok",
    "running": 2,
    "waiting": 1,
    "running_by_class": {"normal": 2},
    "waiting_by_class": {"background": 1},
    "kv_blocks": 100,
    "kv_blocks_held": 40,
}


@dataclass
class StandIn:
    """A server with given responses, which records its requests."""

    parts: list[bytes] = field(default_factory=list)
    endless: bool = False
    refusal: Response | None = None
    health: Response = field(default_factory=lambda: JSONResponse(HEALTH))
    asked: list[Any] = field(default_factory=list)
    left_early: threading.Event = field(default_factory=threading.Event)

    def application(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/health", self._answer(lambda: self.health)),
                Route("/v1/models/{model:path}", lambda request: JSONResponse(MODELS[request.path_params["model"]])),
                Route("/v1/chat/completions", self._complete, methods=["POST"]),
            ]
        )

    def _answer(self, response: Callable[[], Response]) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            return response()

        return answer

    async def _complete(self, request: Request) -> Response:
        self.asked.append(await request.json())
        return self.refusal or StreamingResponse(self._stream(), media_type="text/event-stream")

    async def _stream(self) -> AsyncIterator[bytes]:
        try:
            for part in self.parts:
                yield part
                await asyncio.sleep(0.001)  # makes the parts arrive separately
            while self.endless:
                yield b": still there\n\n"
                await asyncio.sleep(0.01)
        except asyncio.CancelledError:
            self.left_early.set()
            raise


@pytest.fixture
def server() -> StandIn:
    return StandIn()


@pytest.fixture
def address(server: StandIn) -> Iterator[Instance]:
    config = uvicorn.Config(server.application(), lifespan="off", ws="none", log_config=None)
    door = uvicorn.Server(config)
    with closing(ListeningSockets(0)) as sockets:
        thread = threading.Thread(target=lambda: asyncio.run(door.serve(sockets.sockets)), daemon=True)
        thread.start()
        yield Instance(1, sockets.port, f"http://127.0.0.1:{sockets.port}", "m", "/m.gguf", "2026-01-01T00:00:00+00:00")
        door.should_exit = True
        thread.join(HANGING_SECONDS)


def chat(address: Instance, *messages: Message, params: SamplingParams | None = None) -> list[ChatEvent]:
    async def collect() -> list[ChatEvent]:
        async with Client(address) as client:
            events = client.stream_chat("m", messages or [Message("user", "hi")], params or SamplingParams(seed=7))
            return [event async for event in events]

    return asyncio.run(collect())


def test_reply_becomes_chat_events(server: StandIn, address: Instance) -> None:
    role = 'data: {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}\n\n'
    server.parts = [part.encode() for part in (role, TEXT % "Hel", TEXT % "lo", STOP % "length", USAGE, DONE)]
    *deltas, end = chat(address)
    assert deltas == [TextDelta("Hel"), TextDelta("lo")]
    assert isinstance(end, ReplyEnd)
    assert (end.finish, end.seed, end.prompt_tokens, end.cached_tokens, end.completion_tokens) == (
        FinishReason.LENGTH, 7, 7, 5, 3,
    )  # fmt: skip
    assert 0 < end.first_token_seconds <= end.total_seconds


def test_cache_details_are_read(server: StandIn, address: Instance) -> None:
    miss = '{"reason": "diverged", "position": 5, "before": "a", "was": "b", "is": "c"}'
    details = (
        '{"cached_tokens": 6, "device_tokens": 1, "host_tokens": 2, "disk_tokens": 3, "computed_tokens": 1,'
        f' "restore_ms": 1.5, "miss": {miss}, "of a later version": 1}}'
    )
    usage = USAGE.replace('{"cached_tokens": 5}', details)
    server.parts = [(STOP % "stop" + usage + DONE).encode()]
    [end] = chat(address)
    assert isinstance(end, ReplyEnd)
    assert end.cache == CacheReport(TokenSources(1, 2, 3, 1, 0.0015), Miss(MissReason.DIVERGED, 5, "a", "b", "c"))


@pytest.mark.parametrize("details", ['{"cached_tokens": "many"}', '{"miss": {"reason": "tired", "position": 1}}', "7"])
def test_invalid_cache_details_are_an_error(server: StandIn, address: Instance, details: str) -> None:
    server.parts = [(STOP % "stop" + USAGE.replace('{"cached_tokens": 5}', details) + DONE).encode()]
    with pytest.raises(ServerError):
        chat(address)


def test_events_are_read_in_pieces_of_any_size(server: StandIn, address: Instance) -> None:
    """The stream arrives one byte at a time.

    It starts with a comment, and its text has separators that some parsers treat as line ends.
    """
    text = "é\u2028\u0085\u2029 data: x"
    stream = ": comment\r\n\r\n" + TEXT % text + STOP % "stop" + DONE
    server.parts = [bytes([byte]) for byte in stream.encode()]
    *deltas, end = chat(address)
    assert deltas == [TextDelta(text)]
    assert isinstance(end, ReplyEnd)
    assert end.finish is FinishReason.STOP


def test_request_has_all_sampling_fields(server: StandIn, address: Instance) -> None:
    server.parts = [(STOP % "stop" + DONE).encode()]
    params = SamplingParams(
        temperature=0.0,
        top_k=5,
        top_p=0.9,
        min_p=0.1,
        repetition_penalty=1.0,
        seed=2**64 - 3,
        max_tokens=8,
        min_tokens=2,
        ignore_eos=True,
        stop=("a", "b"),
        stop_token_ids=(7,),
        logit_bias=((5, 1.5),),
    )
    call = Message("assistant", tool_calls=(ToolCall("look", {"at": 1}, "c1"),))
    chat(address, Message("system", "s"), call, Message("tool", "r", tool_call_id="c1"), params=params)
    [asked] = server.asked
    wire_call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"at": 1}'}}
    assert asked == {
        "model": "m",
        "service_class": "interactive",
        "messages": [
            {"role": "system", "content": "s"},
            {"role": "assistant", "content": "", "tool_calls": [wire_call]},
            {"role": "tool", "content": "r", "tool_call_id": "c1"},
        ],
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0.0,
        "top_k": 5,
        "top_p": 0.9,
        "min_p": 0.1,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "seed": -3,  # signed 64-bit integer in JSON
        "max_tokens": 8,
        "stop": ["a", "b"],
        "min_tokens": 2,
        "ignore_eos": True,
        "stop_token_ids": [7],
        "logit_bias": {"5": 1.5},
    }


def test_unset_limits_are_not_sent(server: StandIn, address: Instance) -> None:
    server.parts = [(STOP % "stop" + DONE).encode()]
    chat(address)
    assert not {"max_tokens", "stop"} & server.asked[0].keys()


@pytest.mark.parametrize(
    ("status", "body", "kind", "words"),
    [
        (400, {"error": {"message": "too long", "code": "context_length_exceeded"}}, PromptTooLong, "too long"),
        (404, {"error": {"message": "no m", "code": "model_not_found"}}, ModelNotFound, "no m"),
        (503, {"error": {"message": "it is stopped", "code": None}}, ServerError, "it is stopped"),
        (500, "oops", ServerError, "status 500"),
        (500, {"error": "oops"}, ServerError, "status 500"),
    ],
)
def test_error_response_raises_the_matching_error(
    server: StandIn, address: Instance, status: int, body: object, kind: type[InglenookError], words: str
) -> None:
    server.refusal = JSONResponse(body, status)
    with pytest.raises(kind, match=words):
        chat(address)


@pytest.mark.parametrize(
    ("stream", "kind", "words"),
    [
        (TEXT % "a" + ERROR, ServerError, "The engine failed"),
        (TEXT % "a", ServerUnreachable, "before it was complete"),
        (TEXT % "a" + "data: {\n\n", ServerError, "not in the expected format"),
    ],
)
def test_interrupted_reply_raises_after_its_text(
    server: StandIn, address: Instance, stream: str, kind: type[InglenookError], words: str
) -> None:
    server.parts = [stream.encode()]
    events: list[ChatEvent] = []

    async def collect() -> None:
        async with Client(address) as client:
            async for event in client.stream_chat("m", [Message("user", "hi")], SamplingParams()):
                events.append(event)  # noqa: PERF401  # what came before the error counts

    with pytest.raises(kind, match=words):
        asyncio.run(collect())
    assert events == [TextDelta("a")]


def test_closing_a_reply_closes_the_connection(server: StandIn, address: Instance) -> None:
    server.parts, server.endless = [(TEXT % "a").encode()], True

    async def leave() -> ChatEvent:
        async with (
            Client(address) as client,
            aclosing(client.stream_chat("m", [Message("user", "hi")], SamplingParams())) as events,
        ):
            return await anext(events)

    assert asyncio.run(leave()) == TextDelta("a")
    assert server.left_early.wait(60)


def ask_health(address: Instance) -> Health:
    async def ask() -> Health:
        async with Client(address) as client:
            return await client.health()

    return asyncio.run(ask())


def test_default_sampling_is_that_of_the_model(address: Instance) -> None:
    async def ask(model: str) -> Mapping[str, float] | None:
        async with Client(address) as client:
            return await client.default_sampling(model)

    assert asyncio.run(ask("/models/m.gguf")) == {"temperature": 0.6}
    assert asyncio.run(ask("other")) is None


def test_health_reports_the_problem_of_a_stopped_server(server: StandIn, address: Instance) -> None:
    assert ask_health(address) == Health("", 2, 1, {"normal": 2}, {"background": 1}, 100, 40)
    server.health = JSONResponse({**HEALTH, "status": "unavailable", "reason": "it is stopped"}, 503)
    assert ask_health(address).problem == "it is stopped"


@pytest.mark.parametrize("body", [b"", b"{}", b"[]", b'{"running": "x", "waiting": 0}'])
def test_response_of_another_program_is_an_error(server: StandIn, address: Instance, body: bytes) -> None:
    server.health = Response(body)
    with pytest.raises(ServerError):
        ask_health(address)


def test_proxies_are_not_used_for_loopback(address: Instance, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(variable, "http://127.0.0.1:9")
    assert ask_health(address).running == 2


def test_refused_connection_is_an_error(address: Instance) -> None:
    with closing(ListeningSockets(0)) as sockets:
        port = sockets.port
    nobody = Instance(1, port, f"http://127.0.0.1:{port}", "m", "/m.gguf", "2026-01-01T00:00:00+00:00")
    with pytest.raises(ServerUnreachable, match=str(port)):
        ask_health(nobody)
    with pytest.raises(ServerUnreachable, match=str(port)):
        chat(nobody)
