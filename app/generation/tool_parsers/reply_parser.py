"""The text of a reply, while it comes, to what it says: its text, what the model thinks, and the tools it calls.

What belongs to no markup is text; what begins like markup and turns out to be none is text as well, so that nothing a
model writes is an error. However a text is cut into pieces, the events say the same.

Knows one reply and its format. Refuses to know tokens, models and templates. Work is linear in the text.
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
    """An event, and where in the text of the reply it was heard."""

    event: ContentEvent
    start: int
    end: int


class _Mode(Enum):
    TEXT = auto()
    THINKING = auto()
    ANSWER = auto()  # text to the end, whatever it looks like


class FormatMarkup:
    """The markup of a format, ready to be found. Immutable, and shared by all replies."""

    def __init__(self, written: ReplyFormat) -> None:
        thinking, calls = written.thinking, written.calls
        self.begin_thinking = [Markup(one) for one in thinking.begin] if thinking else []
        self.end_thinking = [Markup(one) for one in thinking.end] if thinking else []
        self.calls: list[CallMarkup] = call_markups(calls) if calls else []
        heads = [call.head for call in self.calls]
        self.unmarked = [call for call in self.calls if not call.head.first]
        around = [Markup(one.strip()) for one in calls.around] if calls else []
        self.silent = [*(Markup(one) for one in written.messages.silent), *around, *self.end_thinking]
        self.answer_marks = [Markup(written.messages.answer_mark)] if written.messages.answer_mark else []
        self.is_plain = not (self.begin_thinking or self.calls or self.silent or self.answer_marks)
        tails = [*around, *(call.tail for call in self.calls)]
        self.call_literals = [text for markup in (*heads, *tails) for text in markup.literals[:1]]
        self.openings = [*written.messages.openings, *(begin.written for begin in self.begin_thinking)]
        self.in_text = _Watched([*self.begin_thinking, *heads, *self.silent, *self.answer_marks])
        self.in_thoughts = _Watched([*self.end_thinking, *self.begin_thinking])
        everything = [*self.begin_thinking, *self.silent, *self.answer_marks]
        for call in self.calls:
            everything += [call.head, call.tail]
            everything += [markup for one in call.parameters for markup in (one.head, one.close)]
        self._literals = "\n".join(text for markup in everything for text in markup.literals)

    def may_hold(self, control: str) -> bool:
        """Whether a control token may be a part of markup, or of what stands in it."""
        return bool(control) and (control in self._literals or control in _IN_ARGUMENTS)

    def opening(self, prompt: str) -> str:
        """The beginning of the reply that is in the prompt, as far as it is markup."""
        end = prompt.rstrip()
        return max((one for one in self.openings if end.endswith(one.rstrip())), key=len, default="")

    def thinks(self, opening: str) -> bool:
        """Whether thoughts have begun behind an opening."""
        return any(opening == begin.written for begin in self.begin_thinking)

    def has_thought(self, prompt: str) -> bool:
        """Whether a prompt ends with the end of thoughts, so that there are none."""
        end = prompt.rstrip()
        return any(end.endswith(one.written) for one in self.end_thinking)


_IN_ARGUMENTS = '<|"|><escape>'


class _Watched:
    """Where in a text one of several pieces of markup may begin."""

    def __init__(self, markups: Sequence[Markup]) -> None:
        self._firsts = sorted({markup.first for markup in markups if markup.first}, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, self._firsts)) or r"(?!)")

    def search(self, text: str, *, final: bool) -> int:
        """The place, or where all of `text` has none, its end."""
        if found := self._pattern.search(text):
            return found.start()
        held = 0 if final else max((longest_overlap(text, 0, first) for first in self._firsts), default=0)
        return len(text) - held


class ReplyParser:
    """Reads one reply."""

    def __init__(
        self, markup: FormatMarkup, tools: Tools, *, opening: str = "", parallel: bool = True, answers: bool = False
    ) -> None:
        """`opening` is the beginning of the reply, where the prompt ends with it. Without `parallel`, the reply has
        ended when its first call has. If it `answers`, the prompt ends in a marked answer, and all that follows is
        text."""
        self.ended = False
        self.num_calls = 0
        self._markup = markup
        self._tools = tools
        self._parallel = parallel
        self._mode = _Mode.ANSWER if answers else _Mode.TEXT
        self._buffer = ""
        self._base = 0  # of the buffer, in the text of the reply
        self._reader: CallParser | None = None
        self._no_call = 0  # what the buffer begins with is no call, as far as this
        self._space = ""  # white space behind what was told: nothing, where markup follows
        self._behind_markup = False  # white space there is not told
        self._nothing_said = True
        self._opened = self._read(opening, final=False)
        self._base = -len(self._buffer)

    @property
    def is_text(self) -> bool:
        """Whether what follows is text, if it is not markup."""
        return self._mode is not _Mode.THINKING and self._reader is None

    @property
    def is_thinking(self) -> bool:
        """Whether what follows is thought, if it is not markup."""
        return self._mode is _Mode.THINKING

    def may_hold(self, control: str) -> bool:
        return self._markup.may_hold(control)

    def push(self, text: str) -> list[ParsedEvent]:
        """What is certain now that `text` follows."""
        heard, self._opened = self._opened, []
        return heard + self._read(text, final=False)

    def finish(self, *, cut_off: bool = False) -> list[ParsedEvent]:
        """What was held back, now that nothing follows. Of a reply that was `cut_off` by its limit, the beginning of a
        closing mark is dropped: the rest of the mark would have made it no text."""
        heard, self._opened = self._opened, []
        if cut_off:
            self._buffer = self._buffer[: len(self._buffer) - self._cut_mark()]
        heard += self._read("", final=True)
        if self._space and not self.ended:
            self._hear(heard, self._space, self._base - len(self._space))
            self._space = ""
        return heard

    def _cut_mark(self) -> int:
        """How many characters at the end of thoughts begin the mark that ends them."""
        if self._mode is not _Mode.THINKING:
            return 0
        return max((longest_overlap(self._buffer, 0, end.written) for end in self._markup.end_thinking), default=0)

    def _read(self, text: str, *, final: bool) -> list[ParsedEvent]:
        self._buffer += text
        heard: list[ParsedEvent] = []
        while (self._buffer or final) and not self.ended:
            before = self._progress()
            if self._reader is not None:
                waits = self._read_call(self._reader, heard, final)
            elif self._mode is _Mode.THINKING:
                waits = self._read_thoughts(heard, final)
            elif self._mode is _Mode.ANSWER:
                self._say(heard, len(self._buffer))
                break
            else:
                waits = self._read_text(heard, final)
            if waits or before == self._progress():
                break
        return heard

    def _progress(self) -> tuple[object, ...]:
        return self._mode, self._reader, self._base, self._no_call

    # -- each returns whether it waits for more text

    def _read_text(self, heard: list[ParsedEvent], final: bool) -> bool:
        if self._markup.unmarked and self._nothing_said and not self._buffer.isspace():
            self._nothing_said = False
            if self._buffer.lstrip()[:1] in ("{", "["):
                self._begin_call(self._markup.unmarked, only_known=True)
                return False
        if final and self._is_cut_off():
            self._drop(len(self._buffer))
            return True
        self._say(heard, self._markup.in_text.search(self._buffer, final=final))
        if not self._buffer:
            return True
        for markup in self._markup.begin_thinking:
            found = markup.match(self._buffer, 0, final=final)
            if found is not None:
                return self._enter(found, _Mode.THINKING)
        begun = [call for call in self._markup.calls if call.head.first and _begins(self._buffer, call.head.first)]
        if begun and not self._no_call:
            self._begin_call(begun)
            return False
        for markups, mode in ((self._markup.answer_marks, _Mode.ANSWER), (self._markup.silent, _Mode.TEXT)):
            for markup in markups:
                found = markup.match(self._buffer, 0, final=final)
                if found is not None:
                    return self._enter(found, mode)
        self._say(heard, max(self._no_call, 1))
        return False

    def _is_cut_off(self) -> bool:
        """Whether the rest is the beginning of markup that a limit has cut off, where nothing else may be: in front of
        a marked answer, or behind a call."""
        answers = [mark.first for mark in self._markup.answer_marks]
        rest, marks = self._buffer.strip(), [*answers, *self._markup.call_literals]
        is_alone = self._nothing_said and bool(answers)
        is_alone = is_alone or (self._behind_markup and self.num_calls > 0)
        return is_alone and bool(rest) and any(mark.startswith(rest) for mark in marks)

    def _read_thoughts(self, heard: list[ParsedEvent], final: bool) -> bool:
        self._say(heard, self._markup.in_thoughts.search(self._buffer, final=final))
        if not self._buffer:
            return True
        for markups, mode in (
            (self._markup.end_thinking, _Mode.TEXT),
            (self._markup.begin_thinking, _Mode.THINKING),
        ):
            for markup in markups:
                found = markup.match(self._buffer, 0, final=final)
                if found is not None:
                    return self._enter(found, mode)
        self._say(heard, 1)
        return False

    def _read_call(self, reader: CallParser, heard: list[ParsedEvent], final: bool) -> bool:
        start = self._base
        events = reader.feed(self._buffer, final=final)
        if reader.certain:
            self._space = ""
            self._drop(reader.take())
            for event in events:
                self._tell(heard, event, start)
        elif reader.failed or final:
            self._reader = None
            self._no_call = max(reader.position, 1)
            return False
        if reader.done or reader.failed or final:
            self._reader = None
            self._behind_markup = True
            return False
        return True

    def _begin_call(self, markups: Sequence[CallMarkup], *, only_known: bool = False) -> None:
        def new_writer() -> CallWriter:
            return CallWriter(self._tools, self.num_calls, only_known=only_known)

        self._reader = CallParser(markups, new_writer)

    def _tell(self, heard: list[ParsedEvent], event: CallEvent, start: int) -> None:
        if self.ended:
            return
        heard.append(ParsedEvent(event, start, self._base))
        if isinstance(event, ToolCallStart):
            self.num_calls += 1
        elif isinstance(event, ToolCallEnd):
            self.ended = not self._parallel

    # -- what a step changes

    def _enter(self, found: Found | NotYet, mode: _Mode) -> bool:
        """Behind a piece of markup."""
        if not isinstance(found, Found):
            return True
        self._drop(found.end)
        self._mode = mode
        self._space = ""
        self._behind_markup = True
        return False

    def _drop(self, size: int) -> None:
        self._buffer = self._buffer[size:]
        self._base += size
        self._no_call = 0

    def _say(self, heard: list[ParsedEvent], size: int) -> None:
        """The beginning of the buffer, as text or thoughts. White space at its end waits for what follows."""
        if not size:
            return
        said = self._buffer[:size]
        self._drop(size)
        if self._behind_markup:
            said = said.lstrip()
        if not said:
            return
        self._behind_markup = False
        said = self._space + said
        body = said.rstrip()
        self._space = said[len(body) :]
        if self._markup.is_plain:
            body, self._space = said, ""
        if body:
            self._nothing_said = False
            self._hear(heard, body, self._base - len(said))

    def _hear(self, heard: list[ParsedEvent], text: str, start: int) -> None:
        text = text[max(0, -start) :]  # the prompt's part of it was said by nobody
        if not text:
            return
        start = max(0, start)
        event = ReasoningDelta(text) if self._mode is _Mode.THINKING else TextDelta(text)
        heard.append(ParsedEvent(event, start, start + len(text)))


def _begins(text: str, literal: str) -> bool:
    return text.startswith(literal) or literal.startswith(text)
