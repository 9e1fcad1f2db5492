"""Parses the text of a reply, while it is generated, into text, reasoning, and tool calls.

Text outside of markup is plain text, and so is invalid markup: no reply is an error. The events do not depend on how
the text is split into pieces. Parsing takes time linear in the length of the text.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

from app.generation.events import ContentEvent, ReasoningDelta, TextDelta, ToolCallEnd, ToolCallStart
from app.generation.tool_parsers.call_parser import CallMarkup, CallParser, call_markups
from app.generation.tool_parsers.markup import Found, Markup, NotYet
from app.generation.tool_parsers.relaxed_json import longest_overlap
from app.generation.tool_parsers.reply_format import ReplyFormat
from app.generation.tool_parsers.tool_calls import CallEvent, CallWriter, Tools


@dataclass(frozen=True, slots=True)
class ParsedEvent:
    """An event, and its range of characters in the text of the reply."""

    event: ContentEvent
    start: int
    end: int


class _Mode(Enum):
    TEXT = auto()
    THINKING = auto()
    ANSWER = auto()  # everything up to the end of the reply is plain text


class FormatMarkup:
    """The compiled markup of a format. Immutable, and shared by all replies."""

    def __init__(self, written: ReplyFormat) -> None:
        thinking, calls = written.thinking, written.calls
        self.reasoning_starts = [Markup(one) for one in thinking.begin] if thinking else []
        self.reasoning_ends = [Markup(one) for one in thinking.end] if thinking else []
        self.calls: list[CallMarkup] = call_markups(calls) if calls else []
        heads = [call.head for call in self.calls]
        self.unmarked = [call for call in self.calls if not call.head.first]
        around = [Markup(one.strip()) for one in calls.around] if calls else []
        self.silent = [*(Markup(one) for one in written.messages.silent), *around, *self.reasoning_ends]
        self.answer_marks = [Markup(written.messages.answer_mark)] if written.messages.answer_mark else []
        self.is_plain = not (self.reasoning_starts or self.calls or self.silent or self.answer_marks)
        tails = [*around, *(call.tail for call in self.calls)]
        self.call_literals = [text for markup in (*heads, *tails) for text in markup.literals[:1]]
        self.openings = [*written.messages.openings, *(begin.written for begin in self.reasoning_starts)]
        self.in_text = _MarkupSearch([*self.reasoning_starts, *heads, *self.silent, *self.answer_marks])
        self.in_reasoning = _MarkupSearch([*self.reasoning_ends, *self.reasoning_starts])
        everything = [*self.reasoning_starts, *self.silent, *self.answer_marks]
        for call in self.calls:
            everything += [call.head, call.tail]
            everything += [markup for one in call.parameters for markup in (one.head, one.close)]
        self._literals = "\n".join(text for markup in everything for text in markup.literals)

    def may_contain(self, control: str) -> bool:
        """Return the end of the prompt that is already the start of the reply's markup."""
        return bool(control) and (control in self._literals or control in _IN_ARGUMENTS)

    def opening(self, prompt: str) -> str:
        """Return the start of the reply that is already in the prompt, as far as it is markup."""
        end = prompt.rstrip()
        return max((one for one in self.openings if end.endswith(one.rstrip())), key=len, default="")

    def thinks(self, opening: str) -> bool:
        """Whether the opening of a reply starts the reasoning."""
        return any(opening == begin.written for begin in self.reasoning_starts)

    def skips_reasoning(self, prompt: str) -> bool:
        """Whether a prompt ends with the end of the reasoning, so that the reply has none."""
        end = prompt.rstrip()
        return any(end.endswith(one.written) for one in self.reasoning_ends)


_IN_ARGUMENTS = '<|"|><escape>'


class _MarkupSearch:
    """Finds where one of several markups may start in a text."""

    def __init__(self, markups: Sequence[Markup]) -> None:
        self._firsts = sorted({markup.first for markup in markups if markup.first}, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, self._firsts)) or r"(?!)")

    def search(self, text: str, *, final: bool) -> int:
        """Return the position of the first possible start, or the length of the text before any possible start."""
        if found := self._pattern.search(text):
            return found.start()
        held = 0 if final else max((longest_overlap(text, 0, first) for first in self._firsts), default=0)
        return len(text) - held


class ReplyParser:
    """Parses one reply."""

    def __init__(
        self, markup: FormatMarkup, tools: Tools, *, opening: str = "", parallel: bool = True, answers: bool = False
    ) -> None:
        """Create a parser.

        `opening` is the start of the reply at the end of the prompt. Without `parallel`, the reply ends after its first
        call. `answers` means that the prompt ends within an answer after an answer mark, so all that follows is text.
        """
        self.ended = False
        self.num_calls = 0
        self._markup = markup
        self._tools = tools
        self._parallel = parallel
        self._mode = _Mode.ANSWER if answers else _Mode.TEXT
        self._buffer = ""
        self._base = 0  # position of the buffer in the text of the reply
        self._call: CallParser | None = None
        self._no_call = 0  # number of characters at the start of the buffer that do not belong to a call
        self._space = ""  # white space after the text so far; dropped if markup follows
        self._is_after_markup = False  # True directly after markup, where white space is dropped
        self._is_at_start = True
        self._opened = self._read(opening, final=False)
        self._base = -len(self._buffer)

    @property
    def is_text(self) -> bool:
        """Whether the text that follows is plain text, unless it is markup."""
        return self._mode is not _Mode.THINKING and self._call is None

    @property
    def is_thinking(self) -> bool:
        """Whether the text that follows is reasoning, unless it is markup."""
        return self._mode is _Mode.THINKING

    def may_contain(self, control: str) -> bool:
        return self._markup.may_contain(control)

    def push(self, text: str) -> list[ParsedEvent]:
        """Return the events that are certain after `text`."""
        events, self._opened = self._opened, []
        return events + self._read(text, final=False)

    def finish(self, *, cut_off: bool = False) -> list[ParsedEvent]:
        """Return the events that were held back, when no text follows.

        If the token limit has `cut_off` the reply, the start of a closing mark at its end is dropped.
        """
        events, self._opened = self._opened, []
        if cut_off:
            self._buffer = self._buffer[: len(self._buffer) - self._cut_mark()]
        events += self._read("", final=True)
        if self._space and not self.ended:
            self._emit_text(events, self._space, self._base - len(self._space))
            self._space = ""
        return events

    def _cut_mark(self) -> int:
        """Return the number of characters at the end of the reasoning that are the start of its end mark."""
        if self._mode is not _Mode.THINKING:
            return 0
        return max((longest_overlap(self._buffer, 0, end.written) for end in self._markup.reasoning_ends), default=0)

    def _read(self, text: str, *, final: bool) -> list[ParsedEvent]:
        self._buffer += text
        events: list[ParsedEvent] = []
        while (self._buffer or final) and not self.ended:
            before = self._progress()
            if self._call is not None:
                waits = self._read_call(self._call, events, final)
            elif self._mode is _Mode.THINKING:
                waits = self._read_reasoning(events, final)
            elif self._mode is _Mode.ANSWER:
                self._emit_prefix(events, len(self._buffer))
                break
            else:
                waits = self._read_text(events, final)
            if waits or before == self._progress():
                break
        return events

    def _progress(self) -> tuple[object, ...]:
        return self._mode, self._call, self._base, self._no_call

    # -- parsing steps: each returns whether it needs more text

    def _read_text(self, events: list[ParsedEvent], final: bool) -> bool:
        if self._markup.unmarked and self._is_at_start and not self._buffer.isspace():
            self._is_at_start = False
            if self._buffer.lstrip()[:1] in ("{", "["):
                self._begin_call(self._markup.unmarked, only_known=True)
                return False
        if final and self._is_cut_off():
            self._drop(len(self._buffer))
            return True
        self._emit_prefix(events, self._markup.in_text.search(self._buffer, final=final))
        if not self._buffer:
            return True
        for markup in self._markup.reasoning_starts:
            found = markup.match(self._buffer, 0, final=final)
            if found is not None:
                return self._enter(found, _Mode.THINKING)
        possible = [call for call in self._markup.calls if call.head.first and _begins(self._buffer, call.head.first)]
        if possible and not self._no_call:
            self._begin_call(possible)
            return False
        for markups, mode in ((self._markup.answer_marks, _Mode.ANSWER), (self._markup.silent, _Mode.TEXT)):
            for markup in markups:
                found = markup.match(self._buffer, 0, final=final)
                if found is not None:
                    return self._enter(found, mode)
        self._emit_prefix(events, max(self._no_call, 1))
        return False

    def _is_cut_off(self) -> bool:
        """Whether the rest of the reply is markup that a limit cut off, at a position where only markup is possible.

        Only markup is possible before an answer mark and after a call.
        """
        answers = [mark.first for mark in self._markup.answer_marks]
        rest, marks = self._buffer.strip(), [*answers, *self._markup.call_literals]
        is_alone = self._is_at_start and bool(answers)
        is_alone = is_alone or (self._is_after_markup and self.num_calls > 0)
        return is_alone and bool(rest) and any(mark.startswith(rest) for mark in marks)

    def _read_reasoning(self, events: list[ParsedEvent], final: bool) -> bool:
        self._emit_prefix(events, self._markup.in_reasoning.search(self._buffer, final=final))
        if not self._buffer:
            return True
        for markups, mode in (
            (self._markup.reasoning_ends, _Mode.TEXT),
            (self._markup.reasoning_starts, _Mode.THINKING),
        ):
            for markup in markups:
                found = markup.match(self._buffer, 0, final=final)
                if found is not None:
                    return self._enter(found, mode)
        self._emit_prefix(events, 1)
        return False

    def _read_call(self, call: CallParser, events: list[ParsedEvent], final: bool) -> bool:
        start = self._base
        call_events = call.feed(self._buffer, final=final)
        if call.certain:
            self._space = ""
            self._drop(call.consume())
            for event in call_events:
                self._emit_call(events, event, start)
        elif call.failed or final:
            self._call = None
            self._no_call = max(call.position, 1)
            return False
        if call.done or call.failed or final:
            self._call = None
            self._is_after_markup = True
            return False
        return True

    def _begin_call(self, markups: Sequence[CallMarkup], *, only_known: bool = False) -> None:
        def new_writer() -> CallWriter:
            return CallWriter(self._tools, self.num_calls, only_known=only_known)

        self._call = CallParser(markups, new_writer)

    def _emit_call(self, events: list[ParsedEvent], event: CallEvent, start: int) -> None:
        if self.ended:
            return
        events.append(ParsedEvent(event, start, self._base))
        if isinstance(event, ToolCallStart):
            self.num_calls += 1
        elif isinstance(event, ToolCallEnd):
            self.ended = not self._parallel

    # -- state changes of a step

    def _enter(self, found: Found | NotYet, mode: _Mode) -> bool:
        """Enter the mode that follows a piece of markup."""
        if not isinstance(found, Found):
            return True
        self._drop(found.end)
        self._mode = mode
        self._space = ""
        self._is_after_markup = True
        return False

    def _drop(self, size: int) -> None:
        self._buffer = self._buffer[size:]
        self._base += size
        self._no_call = 0

    def _emit_prefix(self, events: list[ParsedEvent], size: int) -> None:
        """Emit the start of the buffer as text or reasoning. White space at its end is held back."""
        if not size:
            return
        text = self._buffer[:size]
        self._drop(size)
        if self._is_after_markup:
            text = text.lstrip()
        if not text:
            return
        self._is_after_markup = False
        text = self._space + text
        body = text.rstrip()
        self._space = text[len(body) :]
        if self._markup.is_plain:
            body, self._space = text, ""
        if body:
            self._is_at_start = False
            self._emit_text(events, body, self._base - len(text))

    def _emit_text(self, events: list[ParsedEvent], text: str, start: int) -> None:
        text = text[max(0, -start) :]  # without the text that is already in the prompt
        if not text:
            return
        start = max(0, start)
        event = ReasoningDelta(text) if self._mode is _Mode.THINKING else TextDelta(text)
        events.append(ParsedEvent(event, start, start + len(text)))


def _begins(text: str, literal: str) -> bool:
    return text.startswith(literal) or literal.startswith(text)
