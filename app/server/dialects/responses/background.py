"""Responses that are made while nobody waits for them, to be asked for later."""

import asyncio
import contextlib
from collections.abc import Sequence

from app.server.dialects.responses.input_items import InputItem
from app.server.dialects.responses.replies import ResponseReply
from app.server.dialects.responses.response import Response
from app.server.errors import InvalidRequest

MAX_RUNNING = 64


class BackgroundReplies:
    """Those under way, by owner and id. They are kept when they end."""

    def __init__(self) -> None:
        self._running: dict[tuple[str, str], tuple[ResponseReply, asyncio.Task[None]]] = {}

    def start(self, owner: str, reply: ResponseReply, earlier: Sequence[InputItem]) -> Response:
        """Raises InvalidRequest where too many are under way."""
        if len(self._running) >= MAX_RUNNING:
            problem = f"There are {MAX_RUNNING} responses in the background already"
            raise InvalidRequest(problem, "Wait for one of them.", parameter="background", status=429)
        key = (owner, reply.writer.response.id)
        task = asyncio.create_task(reply.run(earlier))
        self._running[key] = (reply, task)
        task.add_done_callback(lambda _: self._running.pop(key))
        return reply.writer.response

    def find(self, owner: str, response_id: str) -> Response | None:
        """How far it is."""
        found = self._running.get((owner, response_id))
        return None if found is None else found[0].writer.response

    async def cancel(self, owner: str, response_id: str) -> Response | None:
        """What became of it."""
        found = self._running.get((owner, response_id))
        if found is None:
            return None
        reply, task = found
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        return reply.writer.response
