"""Endpoints of the Responses API, which generate, store, retrieve, cancel, and delete responses."""

import contextlib
from collections.abc import Sequence
from typing import Annotated, Literal, NoReturn, TypeAlias, TypeVar

import msgspec
from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.responses import Response as HTTPResponse

from app.errors import TemplateError
from app.server.dialects.openai.errors import error_body
from app.server.dialects.responses import stored_responses
from app.server.dialects.responses.background import FROM_START, BackgroundReplies
from app.server.dialects.responses.compaction import Compaction, CompactRequest, compaction, single_compaction
from app.server.dialects.responses.events import Event
from app.server.dialects.responses.fields import COMPACT, RESPONSE
from app.server.dialects.responses.input_items import InputItem
from app.server.dialects.responses.queued_events import QueuedEvents
from app.server.dialects.responses.replies import ResponseReply, fold
from app.server.dialects.responses.requests import ResponseRequest
from app.server.dialects.responses.response import Response
from app.server.dialects.responses.stored_responses import StoredResponse, StoredResponses
from app.server.http.endpoint import NAMED_EVENTS, Endpoint
from app.server.http.errors import InvalidRequest, convert_errors
from app.server.http.holds import EarlyEvents
from app.server.http.reply import StreamedReply, WholeReply, json_reply
from app.server.http.request_body import read_body
from app.server.origin import OriginFields, Purpose, caller_of, caller_origin, origin_of
from app.server.served_models import ServedModels

RESPONSES = "/v1/responses"

QueryT = TypeVar("QueryT", bound=Struct)
Reply: TypeAlias = StreamedReply[Event] | WholeReply[Event] | HTTPResponse


class ItemList(Struct, kw_only=True):
    object: Literal["list"] = "list"
    data: list[InputItem]
    first_id: str | None
    last_id: str | None
    has_more: bool


class Deleted(Struct):
    id: str
    object: Literal["response"] = "response"
    deleted: bool = True


class InputTokens(Struct):
    input_tokens: int
    object: Literal["response.input_tokens"] = "response.input_tokens"


class _Retrieval(Struct):
    """Query parameters for retrieving a response."""

    stream: bool = False
    starting_after: int = FROM_START


class _Page(Struct):
    """Query parameters for listing items."""

    limit: Annotated[int, Meta(ge=1, le=100)] = 20
    order: Literal["asc", "desc"] = "desc"
    after: str | None = None


class ResponseEndpoints:
    """Endpoints that generate and store responses."""

    def __init__(self, models: ServedModels, stored: StoredResponses) -> None:
        self._models = models
        self._stored = stored
        self._background = BackgroundReplies()

    def endpoints(self) -> list[Endpoint]:
        one, counted = f"{RESPONSES}/{{id}}", f"{RESPONSES}/input_tokens"
        return [
            Endpoint(
                "POST",
                RESPONSES,
                self.create,
                "Generate the next items of a conversation",
                takes=ResponseRequest,
                gives=Response,
                streams=Event,
                framing=NAMED_EVENTS,
            ),
            Endpoint(
                "POST",
                counted,
                self.count,
                "Count the tokens of a request's prompt",
                takes=ResponseRequest,
                gives=InputTokens,
            ),
            Endpoint(
                "POST",
                f"{RESPONSES}/compact",
                self.compact,
                "Compact a conversation to its user messages and a summary",
                takes=CompactRequest,
                gives=Compaction,
            ),
            Endpoint(
                "GET",
                one,
                self.retrieve,
                "Retrieve a stored or running response",
                gives=Response,
                streams=Event,
                framing=NAMED_EVENTS,
            ),
            Endpoint("DELETE", one, self.delete, "Delete a stored response", gives=Deleted),
            Endpoint("POST", f"{one}/cancel", self.cancel, "Cancel a background response", gives=Response),
            Endpoint(
                "GET",
                f"{one}/input_items",
                self.list_items,
                "List the input items of a stored response",
                gives=ItemList,
            ),
        ]

    async def create(self, request: Request) -> Reply:
        body = await self._read(request)
        reply, earlier = await self.start_reply(request, body)
        if body.background:
            log = self._background.start(_owner(request), reply, earlier)
            if not body.stream:
                return json_reply(reply.writer.response)
            return StreamedReply(log.follow(FROM_START), reply.writer.error, NAMED_EVENTS)
        events = reply.events(earlier, list)
        if body.stream:
            return StreamedReply(events, reply.writer.error, NAMED_EVENTS, reply.writer.counts)
        return WholeReply(events, fold)

    async def start_reply(
        self, request: Request, body: ResponseRequest, events: EarlyEvents | None = None
    ) -> tuple[ResponseReply, Sequence[InputItem]]:
        """Return the reply to a validated request, and the items that it continues. Raises InvalidRequest.

        `events` are sent while the request waits for its model; None: events of this API.
        """
        fields = body.origin_fields()
        origin, owner = origin_of(request, fields), _owner(request)
        earlier = await self._earlier(body.previous_response_id, owner)
        queue = QueuedEvents(self._models, body)
        served = await self._models.chat(
            request, body.model, fields, streams=bool(body.stream), events=events or queue, keep_alive=body.ttl
        )
        return ResponseReply(served, body, origin, owner, self._stored, queue.response), earlier

    async def instructions_of(self, request: Request, response_id: str | None) -> str | None:
        """Return the instructions of a stored response, or None."""
        found = None if response_id is None else await self._stored.get(response_id, _owner(request))
        return None if found is None else stored_responses.instructions_of(found)

    async def count(self, request: Request) -> HTTPResponse:
        """Count the tokens of a prompt without generating a reply."""
        body = await self._read(request)
        conversation = body.conversation_after(await self._earlier(body.previous_response_id, _owner(request)))
        served = await self._models.chat(request, body.model)
        with convert_errors("input"):
            prompt = await served.service.prompt(conversation)
        return json_reply(InputTokens(len(prompt.ids)))

    async def compact(self, request: Request) -> WholeReply[Compaction]:
        body = await read_body(request, COMPACT)
        earlier = await self._earlier(body.previous_response_id, _owner(request))
        origin = origin_of(request, OriginFields(Purpose.CHAT))
        served = await self._models.chat(request, body.model)
        return WholeReply(compaction(served.service, body, earlier, origin), single_compaction)

    async def retrieve(self, request: Request) -> Reply:
        """Return a response, or stream the events of a background response after the one that the client names."""
        owner, response_id, query = _owner(request), request.path_params["id"], _query(request, _Retrieval)
        if query.stream:
            return await self._follow(request, query.starting_after)
        running = self._background.find(owner, response_id)
        return json_reply(running) if running is not None else _json_response((await self._find(request)).body)

    async def _follow(self, request: Request, after: int) -> Reply:
        log = self._background.log(_owner(request), request.path_params["id"])
        if log is not None:
            return StreamedReply(log.follow(after), error_body, NAMED_EVENTS)
        await self._find(request)
        raise InvalidRequest(
            "stream: the events of this response are no longer stored",
            "Retrieve the whole response, without stream.",
            parameter="stream",
        )

    async def delete(self, request: Request) -> HTTPResponse:
        """Delete a response, and its cached blocks unless another response continues it."""
        owner, response_id = _owner(request), request.path_params["id"]
        await self._background.cancel(owner, response_id)
        self._background.forget(owner, response_id)
        chain = await self._stored.chain(response_id, owner)
        if not await self._stored.delete(response_id, owner):
            _raise_unknown(response_id)
        if not await self._stored.has_successor(response_id, owner):
            gone, staying = stored_responses.conversation_of(chain)
            with contextlib.suppress(TemplateError, InvalidRequest):  # nothing was cached, or the model is gone
                served = await self._models.chat(request, stored_responses.model_of(chain[-1]))
                await served.service.forget(gone, [staying] if staying else (), caller_origin(request))
        return json_reply(Deleted(response_id))

    async def cancel(self, request: Request) -> HTTPResponse:
        """Cancel a background response. Returns the stored response if it has already ended."""
        cancelled = await self._background.cancel(_owner(request), request.path_params["id"])
        if cancelled is not None:
            return json_reply(cancelled)
        body = (await self._find(request)).body
        if not msgspec.json.decode(body)["background"]:
            raise InvalidRequest(
                "Only background responses can be canceled", "To end another response, close its connection."
            )
        return _json_response(body)

    async def list_items(self, request: Request) -> HTTPResponse:
        page = _query(request, _Page)
        items = stored_responses.request_items(await self._find(request))
        if page.order == "desc":
            items.reverse()
        ids = [item.id for item in items]
        start = ids.index(page.after) + 1 if page.after in ids else 0
        listed = items[start : start + page.limit]
        first, last = (listed[0].id, listed[-1].id) if listed else (None, None)
        return json_reply(
            ItemList(data=listed, first_id=first, last_id=last, has_more=start + len(listed) < len(items))
        )

    async def _read(self, request: Request) -> ResponseRequest:
        body = await read_body(request, RESPONSE)
        body.check()
        return body

    async def _earlier(self, previous: str | None, owner: str) -> Sequence[InputItem]:
        """Return the items of a response and of all responses that it continues."""
        if previous is None:
            return []
        chain = await self._stored.chain(previous, owner)
        missing = chain[0].previous if chain else previous
        if missing is not None:
            raise InvalidRequest(
                f"previous_response_id: the response {missing!r} is not stored here",
                "Send its items in input.",
                parameter="previous_response_id",
                code="previous_response_not_found",
            )
        return stored_responses.items_of(chain)

    async def _find(self, request: Request) -> StoredResponse:
        response_id = request.path_params["id"]
        found = await self._stored.get(response_id, _owner(request))
        return found if found is not None else _raise_unknown(response_id)


def _owner(request: Request) -> str:
    """Return the owner whose responses the caller may read."""
    return caller_of(request).cache_salt


def _query(request: Request, kind: type[QueryT]) -> QueryT:
    """Decode the query parameters. Raises InvalidRequest."""
    try:
        return msgspec.convert(dict(request.query_params), kind, strict=False)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"The query string is invalid: {error}") from error


def _raise_unknown(response_id: str) -> NoReturn:
    raise InvalidRequest(f"The response {response_id!r} is not stored here", status=404, code="response_not_found")


def _json_response(body: bytes) -> HTTPResponse:
    return HTTPResponse(body, media_type="application/json")
