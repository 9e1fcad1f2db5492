"""The events of a response that waits for its model."""

import msgspec

from app.server.dialects.openai.errors import ErrorBody
from app.server.dialects.responses.events import Error, Failed
from app.server.dialects.responses.requests import ResponseRequest
from app.server.dialects.responses.response import Response, ResponseError
from app.server.dialects.responses.writer import NUM_QUEUE_EVENTS, queue_events
from app.server.http.endpoint import NAMED_EVENTS
from app.server.http.holds import EarlyEvents
from app.server.served_models import ServedModels


class QueuedEvents(EarlyEvents):
    """Reports a response as queued. `response` is set then."""

    def __init__(self, models: ServedModels, body: ResponseRequest) -> None:
        super().__init__(NAMED_EVENTS)
        self.response: Response | None = None
        self._models = models
        self._body = body

    async def opening(self) -> bytes:
        name = (await self._models.names.find(self._body.model)).reply_name
        sampling = (await self._models.describe(self._body.model)).sampling
        self.response = Response.create(self._body, name, sampling)
        return b"".join(map(NAMED_EVENTS.frame, queue_events(self.response)))

    def failure(self, error: msgspec.Raw) -> bytes:
        """Return a failed response, and the error for clients that read only that event."""
        detail = msgspec.json.decode(error, type=ErrorBody).error
        code, number = detail.code or detail.type, NUM_QUEUE_EVENTS
        ended = Error(sequence_number=number + 1, code=code, message=detail.message, param=detail.param)
        if self.response is None:
            return NAMED_EVENTS.frame(ended)
        failed = self.response.failed([], ResponseError(code, detail.message))
        return NAMED_EVENTS.frame(Failed(sequence_number=number, response=failed)) + NAMED_EVENTS.frame(ended)
