"""The tokens of one reply, as they come, to events: its text, its thoughts and its calls.

Joins the detokenizer, which knows tokens and stop strings, and the parser, which knows what texts mean; and keeps
log-probabilities with what their tokens are a part of. Refuses to know requests and engines.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from app.generation.events import PLAIN_REPLY, ReasoningDelta, ReplyOptions, SpokenEvent, TextDelta, ToolCallDelta
from app.generation.reply_formats.reply_format import PLAIN
from app.generation.reply_formats.reply_parser import FormatMarkup, Heard, ReplyParser
from app.text.detokenizer import IncrementalDetokenizer
from app.text.tokenizer import Tokenizer
from engine.request import TokenLogprobs

_TEXT = FormatMarkup(PLAIN)


class ReplyReader:
    """Reads one reply. Without a parser, all of it is text."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: Sequence[str],
        parser: ReplyParser | None = None,
        options: ReplyOptions = PLAIN_REPLY,
        *,
        continues_text: bool = False,
    ) -> None:
        self.ended = False
        self.thought_tokens = 0  # the mark that ends thoughts among them
        self._told: list[str] = []
        self._tokenizer = tokenizer
        self._text = IncrementalDetokenizer(
            tokenizer,
            stop,
            include_stop=options.includes_stop,
            show_control=options.shows_control,
            continues_text=continues_text,
        )
        self._parser = ReplyParser(_TEXT, {}) if parser is None else parser
        self._control = frozenset(tokenizer.control_tokens.values())
        self._length = 0  # of what the parser was given
        self._logprobs: deque[tuple[int, TokenLogprobs]] = deque()  # that belong to no event yet, and where they begin

    @property
    def told(self) -> str:
        """The text of the tokens so far, as far as it is certain; markup included."""
        return "".join(self._told)

    @property
    def stopped(self) -> str | None:
        """The stop string that was found."""
        return self._text.stopped

    def take(self, token_id: int, logprobs: TokenLogprobs | None, *, hidden: bool) -> list[SpokenEvent]:
        """What is certain now that this token follows; `hidden` if it is no part of the text, since it ends it."""
        self.thought_tokens += self._parser.is_thinking
        if logprobs is not None:
            self._logprobs.append((self._length, logprobs))
        if hidden:
            return []
        if token_id not in self._control:
            return self._push(self._text.push(token_id))
        shown = self._tokenizer.token_bytes(token_id, show_control=True).decode(errors="replace")
        if not self._parser.may_hold(shown):
            return self._push(self._text.push(token_id))
        return self._push(self._text.finish() + shown)

    def finish(self, *, cut_off: bool = False) -> list[SpokenEvent]:
        """What was held back, now that no token follows. `cut_off`: see `ReplyParser.finish`."""
        events = [] if self.stopped is not None else self._push(self._text.finish())
        events += self._with_logprobs(self._parser.finish(cut_off=cut_off))
        if self._logprobs and self._parser.is_text and not self._parser.num_calls:
            events.append(TextDelta("", tuple(logprobs for _, logprobs in self._logprobs)))
        return events

    def _push(self, text: str) -> list[SpokenEvent]:
        self._told.append(text)
        self._length += len(text)
        heard = self._parser.push(text) if text else []
        self.ended = self._parser.ended
        return self._with_logprobs(heard)

    def _with_logprobs(self, heard: Sequence[Heard]) -> list[SpokenEvent]:
        return [self._reported(one) for one in heard]

    def _reported(self, heard: Heard) -> SpokenEvent:
        """The event with the log-probabilities of the tokens that begin in it. Those of markup are dropped."""
        event = heard.event
        if not self._logprobs or not isinstance(event, TextDelta | ReasoningDelta | ToolCallDelta):
            return event
        own: list[TokenLogprobs] = []
        while self._logprobs and self._logprobs[0][0] < heard.end:
            start, logprobs = self._logprobs.popleft()
            if start >= heard.start:
                own.append(logprobs)
        return replace(event, logprobs=tuple(own)) if own else event
