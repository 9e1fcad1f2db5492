"""Programming mistakes: the log tells where one was made, and neither the log nor the client what it says.

The words of an exception may hold anything: a prompt, a key. Refuses to know what was asked.
"""

import logging
import traceback

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.server.error_shapes import refusal

log = logging.getLogger(__name__)


class ReplyBroken(Exception):
    """A reply that had begun cannot go on; the connection is to be closed."""


class Mistakes:
    """ASGI middleware around the door: what is raised inside ends here, in a line of the log and a 500."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun = False

        async def send_and_note(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            await self._app(scope, receive, send_and_note)
        except Exception as error:  # noqa: BLE001  # whatever it is
            log.error("a request failed:\n%s", place_of(error))
            if begun:
                raise ReplyBroken from None
            await refusal(error, scope)(scope, receive, send)


def place_of(error: BaseException) -> str:
    """The traceback of an exception without its words."""
    frames = traceback.format_list(traceback.extract_tb(error.__traceback__))
    return "".join((*frames, type(error).__name__))
