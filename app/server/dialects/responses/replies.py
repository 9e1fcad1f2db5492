"""The events of one response. The response is stored before its last event is sent."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import TypeVar

import msgspec

from app.generation.service import ChatService
from app.server.dialects.responses.events import Completed, Event, Incomplete
from app.server.dialects.responses.input_items import InputItem
from app.server.dialects.responses.requests import ResponseRequest
from app.server.dialects.responses.response import Response
from app.server.dialects.responses.stored_responses import StoredResponse, StoredResponses
from app.server.dialects.responses.writer import NUM_QUEUE_EVENTS, ResponseWriter
from app.server.http.errors import convert_errors, traceback_without_message
from app.server.served_models import Served
from engine.request import Origin
from quant.errors import InglenookError

log = logging.getLogger(__name__)

EventT = TypeVar("EventT")


class ResponseReply:
    """The reply to one request. `writer` holds the current state of the response."""

    def __init__(
        self,
        served: Served[ChatService],
        body: ResponseRequest,
        origin: Origin,
        owner: str,
        stored: StoredResponses,
        queued: Response | None = None,
    ) -> None:
        """Prepare the reply to `body`.

        `stored` keeps the response for its `owner`, unless the request forbids it. `queued` is the response if its
        first events have been sent already.
        """
        service = self._service = served.service
        self._body = body
        self._origin = origin
        self._owner = owner
        self._stored = stored
        response = queued or Response.create(body, served.name, service.sampling)
        self.writer = ResponseWriter(
            response,
            body.offered,
            service.tokenizer,
            reports_summary=body.reports_summary,
            num_events=0 if queued is None else NUM_QUEUE_EVENTS,
        )

    async def events(
        self, earlier: Sequence[InputItem], translate: Callable[[list[Event]], list[EventT]]
    ) -> AsyncGenerator[list[EventT]]:
        """Yield the translated events of the response in batches. The response continues `earlier` items.

        Raises the errors of `ChatService.reply`. Errors about the request become InvalidRequest. If the response had
        started, a failed response is yielded first.
        """
        if not earlier and not self._body.items:  # the conversation is empty
            events = [*self.writer.start(), *self.writer.finish()]
            await self._store_if_ended()
            yield translate(events)
            return
        try:
            options = self._body.generation_options(self._service)
            conversation = self._body.conversation_after(earlier)
            replies = self._service.reply(conversation, options, self._origin, self.writer.counts)
            with convert_errors("input"):
                async with aclosing(replies) as batches:
                    async for batch in batches:
                        if events := self.writer.write(batch):
                            await self._store_if_ended()
                            if translated := translate(events):
                                yield translated
        except Exception as error:
            if self.writer.has_started and (translated := translate(self.writer.fail(error))):
                yield translated
            raise

    async def run(self, earlier: Sequence[InputItem], publish: Callable[[list[Event]], None]) -> None:
        """Generate the response and pass its events to `publish`. The response is stored even if it fails or is
        canceled.
        """
        try:
            async with aclosing(self.events(earlier, list)) as batches:
                async for batch in batches:
                    publish(batch)
        except asyncio.CancelledError:
            self.writer.cancel()
            await self._store_if_ended()
            raise
        except Exception as error:  # noqa: BLE001 # any error: the response reports it
            if not self.writer.response.has_ended:
                publish(self.writer.fail(error))
            kind = type(error).__name__ if isinstance(error, InglenookError) else traceback_without_message(error)
            log.warning("a background response failed: %s", kind)
            await self._store_if_ended()

    async def _store_if_ended(self) -> None:
        """Store the response if it has ended and the request asks for it."""
        response = self.writer.response
        if response.store and response.has_ended:
            body, items = msgspec.json.encode(response), [item.to_stored() for item in self._body.items]
            previous, request_items = response.previous_response_id, msgspec.json.encode(items)
            await self._stored.put(StoredResponse(response.id, self._owner, previous, body, request_items))


async def fold(events: AsyncGenerator[Event]) -> Response:
    """Return the whole reply, which is the response of the last event."""
    last: Event | None = None
    async for event in events:
        last = event
    if last is None or not isinstance(last, Completed | Incomplete):
        raise EOFError("the events ended without a response")
    return last.response
