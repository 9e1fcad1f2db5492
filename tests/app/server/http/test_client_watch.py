"""The middleware CancelOnDisconnect, tested without a server."""

import asyncio
from collections.abc import Sequence

import pytest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.server.http.connection import CancelOnDisconnect
from tests.support.processes import HANGING_SECONDS

SCOPE: Scope = {"type": "http", "method": "POST", "path": "/", "headers": []}
BODY: Message = {"type": "http.request", "body": b"a", "more_body": True}
END: Message = {"type": "http.request", "body": b"b", "more_body": False}
LEFT: Message = {"type": "http.disconnect"}


async def send(message: Message) -> None:
    pass


def run(app: ASGIApp, *received: Message) -> int:
    """Run the middleware on `received`, after which no message arrives. Returns the number of tasks that remain."""

    async def main() -> int:
        left = list(received)

        async def receive() -> Message:
            return left.pop(0) if left else await asyncio.Future()

        async with asyncio.timeout(HANGING_SECONDS):
            await CancelOnDisconnect(app)(SCOPE, receive, send)
        return len(asyncio.all_tasks())

    return asyncio.run(main())


@pytest.mark.parametrize("body", [[END], [BODY, END]])
def test_disconnect_after_the_body_cancels_the_work(body: Sequence[Message]) -> None:
    ended = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        while (await receive()).get("more_body"):
            pass
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(True)

    assert run(app, *body, LEFT) == 1
    assert ended == [True]


def test_application_receives_the_body_and_an_early_disconnect() -> None:
    received: list[Message] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        received.extend([await receive(), await receive()])

    run(app, BODY, LEFT)
    assert received == [BODY, LEFT]


def test_receive_after_the_body_returns_the_disconnect() -> None:
    received: list[Message] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        try:
            await asyncio.Event().wait()
        finally:
            received.append(await receive())

    run(app, END, LEFT)
    assert received == [LEFT]


def test_finished_work_leaves_no_task() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()

    assert run(app, END) == 1


def test_exception_of_the_work_is_raised() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        raise LookupError("inside")

    with pytest.raises(LookupError, match="inside"):
        run(app, END)


def test_canceling_the_middleware_cancels_the_work() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await asyncio.Event().wait()

    async def end() -> int:
        waiting = asyncio.create_task(CancelOnDisconnect(app)(SCOPE, asyncio.Event().wait, send))  # type: ignore[arg-type]
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        return len(asyncio.all_tasks())

    assert asyncio.run(end()) == 1
