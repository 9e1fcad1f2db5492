"""The watch over the client of each request, without a server."""

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
    """Have the watch receive some messages and no more; how many tasks are left when it returns."""

    async def main() -> int:
        left = list(received)

        async def receive() -> Message:
            return left.pop(0) if left else await asyncio.Future()

        async with asyncio.timeout(HANGING_SECONDS):
            await CancelOnDisconnect(app)(SCOPE, receive, send)
        return len(asyncio.all_tasks())

    return asyncio.run(main())


@pytest.mark.parametrize("body", [[END], [BODY, END]])
def test_work_ends_when_the_client_leaves_after_its_body(body: Sequence[Message]) -> None:
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


def test_the_application_receives_the_body_and_a_client_that_leaves_before_its_end() -> None:
    received: list[Message] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        received.extend([await receive(), await receive()])

    run(app, BODY, LEFT)
    assert received == [BODY, LEFT]


def test_what_is_received_after_the_body_is_the_end_of_the_connection() -> None:
    received: list[Message] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        try:
            await asyncio.Event().wait()
        finally:
            received.append(await receive())

    run(app, END, LEFT)
    assert received == [LEFT]


def test_work_that_ends_by_itself_leaves_no_task() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()

    assert run(app, END) == 1


def test_what_the_work_raises_is_raised() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        raise LookupError("inside")

    with pytest.raises(LookupError, match="inside"):
        run(app, END)


def test_cancelling_the_watch_ends_the_work() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await asyncio.Event().wait()

    async def end() -> int:
        waiting = asyncio.create_task(CancelOnDisconnect(app)(SCOPE, asyncio.Event().wait, send))  # type: ignore[arg-type]
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        return len(asyncio.all_tasks())

    assert asyncio.run(end()) == 1
