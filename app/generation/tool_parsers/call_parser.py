"""Parses the markup of one or several calls. Each possible markup of the format is tried until one is certain."""

from collections.abc import Callable, Sequence

from app.generation.tool_parsers.json_bodies import ArgumentsBody, ObjectsBody
from app.generation.tool_parsers.markup import WAIT, Found, Markup
from app.generation.tool_parsers.parameters_body import ParameterMarkup, ParametersBody
from app.generation.tool_parsers.python_body import PythonBody
from app.generation.tool_parsers.reply_format import BODIES, CallSyntax
from app.generation.tool_parsers.tool_calls import CallBody, CallEvent, CallWriter


class CallMarkup:
    """The markup before and after the body of a call."""

    def __init__(self, written: str, parameters: Sequence[str]) -> None:
        self.body = next(body for body in BODIES if f"{{{body}}}" in written)
        head, _, tail = written.partition(f"{{{self.body}}}")
        self.head, self.tail = Markup(head), Markup(tail)
        self.parameters = [ParameterMarkup(one) for one in parameters]

    def new_body(self, writer: CallWriter, name: str, call_id: str) -> CallBody:
        match self.body:
            case "json":
                return ArgumentsBody(writer, name, call_id)
            case "parameters":
                return ParametersBody(writer, name, call_id, self.parameters, self.tail)
            case "python":
                return PythonBody(writer)
            case body:
                return ObjectsBody(writer, keyed=body == "keyed")


def call_markups(syntax: CallSyntax) -> list[CallMarkup]:
    return [CallMarkup(written, syntax.parameters) for written in syntax.calls]


class CallParser:
    """Parses a call from its start.

    `feed` takes all text since that start, without the text that `consume` has removed.
    """

    def __init__(self, markups: Sequence[CallMarkup], new_writer: Callable[[], CallWriter]) -> None:
        self._candidates = [_Candidate(markup, new_writer()) for markup in markups]
        self.certain = False  # whether the text is certainly a call
        self.done = False
        self.failed = False  # whether the text is not a call, or is no longer one
        self.position = 0  # index of the end of the parsed text

    def feed(self, text: str, *, final: bool = False) -> list[CallEvent]:
        """Return the events that have become certain."""
        while True:
            candidate = self._candidates[0]
            candidate.feed(text, final=final)
            self.position = max(self.position, candidate.position)
            if not candidate.failed or candidate.certain or len(self._candidates) == 1:
                break
            del self._candidates[0]
        self.certain, self.done, self.failed = candidate.certain, candidate.done, candidate.failed
        return candidate.events()

    def consume(self) -> int:
        """Return the length of the text that must not be fed again."""
        candidate = self._candidates[0]
        taken, candidate.position, self.position = candidate.position, 0, 0
        return taken


class _Candidate:
    def __init__(self, markup: CallMarkup, writer: CallWriter) -> None:
        self.certain = self.done = self.failed = False
        self.position = 0
        self._markup = markup
        self._writer = writer
        self._body: CallBody | None = None

    def events(self) -> list[CallEvent]:
        events, self._writer.events = self._writer.events, []
        return events

    def feed(self, text: str, *, final: bool) -> None:
        if self._body is None:
            head = self._markup.head.match(text, 0, final=final)
            if isinstance(head, Found):
                name, call_id = head.holes.get("name", ""), head.holes.get("id", "")
                self._body = self._markup.new_body(self._writer, name, call_id)
                self.position = head.end
            self.failed = head is None
        body = self._body
        if body is not None and not (body.done or body.failed):
            self.position = body.feed(text, self.position, final=final)
            self.certain = self.certain or bool(self._writer.events)
            self.failed = body.failed
        if body is not None and body.done:
            self._read_tail(text, final)

    def _read_tail(self, text: str, final: bool) -> None:
        """Skip the markup that ends a call, if there is any."""
        tail = self._markup.tail.match(text, self.position, final=final)
        if isinstance(tail, Found):
            self.position = tail.end
        self.done = tail is not WAIT or final
