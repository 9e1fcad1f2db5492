"""One reply: its tokens become chat events as they arrive.

A ReplyReader converts tokens to text, reasoning, and tool calls. A Reply converts the token events of one engine
request to chat events, which include those of its reader.
"""

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from app.generation.cache_report import EMPTY_REPORT
from app.generation.cache_tracker import TrackedPrompt
from app.generation.events import (
    ChatEvent,
    ContentEvent,
    GeneratedTokens,
    PromptLogprobs,
    PromptProgress,
    ReasoningDelta,
    ReplyEnd,
    TextDelta,
    ToolCallDelta,
)
from app.generation.options import PLAIN_REPLY, GenerationOptions, ReplyOptions
from app.generation.prompt_encoder import PromptEncoder
from app.generation.remembered_replies import GeneratedReply
from app.generation.tool_parsers.reply_format import PLAIN
from app.generation.tool_parsers.reply_parser import FormatMarkup, ParsedEvent, ReplyParser
from app.text.detokenizer import IncrementalDetokenizer
from app.text.tokenizer import Tokenizer
from engine.request import FinishReason, Request, TokenEvent, TokenLogprobs

REMEMBERED_SECONDS = 0.5  # interval in seconds at which the ids of a reply are saved while it is generated

_TEXT = FormatMarkup(PLAIN)


class ReplyReader:
    """Converts the tokens of one reply to text, reasoning, and tool calls. Without a parser, all of it is text."""

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
        self.reasoning_tokens = 0  # number of reasoning tokens, including the mark that ends the reasoning
        self._texts: list[str] = []
        self._tokenizer = tokenizer
        self._detokenizer = IncrementalDetokenizer(
            tokenizer,
            stop,
            include_stop=options.includes_stop,
            show_control=options.shows_control,
            continues_text=continues_text,
        )
        self._parser = ReplyParser(_TEXT, {}) if parser is None else parser
        self._control = frozenset(tokenizer.control_tokens.values())
        self._length = 0  # number of characters passed to the parser
        # log-probabilities that are not yet assigned to an event, with the start offsets of their tokens
        self._logprobs: deque[tuple[int, TokenLogprobs]] = deque()

    @property
    def text(self) -> str:
        """The text so far, including markup, but not the end that may become a stop string."""
        return "".join(self._texts)

    @property
    def stopped(self) -> str | None:
        """The stop string that was found."""
        return self._detokenizer.stopped

    def push(self, token_id: int, logprobs: TokenLogprobs | None, *, hidden: bool) -> list[ContentEvent]:
        """Return the events that are certain after this token. A `hidden` token ends the text and is not part of it."""
        self.reasoning_tokens += self._parser.is_thinking
        if logprobs is not None:
            self._logprobs.append((self._length, logprobs))
        if hidden:
            return []
        if token_id not in self._control:
            return self._parse(self._detokenizer.push(token_id))
        shown = self._tokenizer.token_bytes(token_id, show_control=True).decode(errors="replace")
        if not self._parser.may_contain(shown):
            return self._parse(self._detokenizer.push(token_id))
        return self._parse(self._detokenizer.finish() + shown)

    def finish(self, *, cut_off: bool = False, is_interrupted: bool = False) -> list[ContentEvent]:
        """Return the events that were held back, when no token follows.

        `cut_off`: see `ReplyParser.finish`. `is_interrupted`: whether the model would have continued.
        """
        rest = self._detokenizer.finish(is_interrupted=is_interrupted)
        events = [] if self.stopped is not None else self._parse(rest)
        events += self._with_logprobs(self._parser.finish(cut_off=cut_off))
        if self._logprobs and self._parser.is_text and not self._parser.num_calls:
            events.append(TextDelta("", tuple(logprobs for _, logprobs in self._logprobs)))
        return events

    def _parse(self, text: str) -> list[ContentEvent]:
        self._texts.append(text)
        self._length += len(text)
        parsed = self._parser.push(text) if text else []
        self.ended = self._parser.ended
        return self._with_logprobs(parsed)

    def _with_logprobs(self, parsed: Sequence[ParsedEvent]) -> list[ContentEvent]:
        return [self._reported(one) for one in parsed]

    def _reported(self, parsed: ParsedEvent) -> ContentEvent:
        """Return the event with the log-probabilities of the tokens that start within it. Drops those of markup."""
        event = parsed.event
        if not self._logprobs or not isinstance(event, TextDelta | ReasoningDelta | ToolCallDelta):
            return event
        own: list[TokenLogprobs] = []
        while self._logprobs and self._logprobs[0][0] < parsed.end:
            start, logprobs = self._logprobs.popleft()
            if start >= parsed.start:
                own.append(logprobs)
        return replace(event, logprobs=tuple(own)) if own else event


@dataclass(frozen=True, slots=True)
class ReplyContext:
    """The data that all replies to one request share."""

    tokenizer: Tokenizer
    encoder: PromptEncoder  # saves the ids of replies
    options: GenerationOptions
    continues_text: bool  # whether the replies continue a text, rather than being new turns
    started: float = field(default_factory=time.monotonic)  # time at which the request was submitted


class Reply:
    """Converts the token events of one engine request to chat events."""

    def __init__(
        self, index: int, request: Request, prompt: TrackedPrompt, context: ReplyContext, parser: ReplyParser | None
    ) -> None:
        """`index` is the number of the reply within its request. Without a parser, all of the reply is text."""
        self.index = index
        self.ended = False
        self._request = request
        self._prompt = prompt
        self._context = context
        self._options = context.options.reply
        self._reader = ReplyReader(
            context.tokenizer, request.params.stop, parser, self._options, continues_text=context.continues_text
        )
        self._first_token_at = 0.0
        self._tokens = 0
        self._prefilled = 0  # number of prompt tokens that are prefilled
        self._remembered_at = context.started

    def events(self, token: TokenEvent) -> list[ChatEvent]:
        """Return the chat events of a token event. Empty after a stop string has ended the reply."""
        if self.ended:
            return []
        events: list[ChatEvent] = [PromptLogprobs(token.prompt_logprobs)] if token.prompt_logprobs else []
        if token.token_id is None and token.finish is None:
            total = len(self._request.prompt_ids)
            self._prefilled = max(self._prefilled, token.num_computed)
            # A preempted request may prefill again during its reply, which is not reported.
            events += [] if self._tokens else [self._progress(min(token.num_computed, total), total)]
        if token.token_id is not None:
            events += self._requested(token.token_id)
            events += self._push_token(token, token.token_id)
        over = self._reader.stopped is not None or self._reader.ended
        finish = FinishReason.STOP if over else token.finish
        if finish is None and self._is_late():
            finish = FinishReason.LENGTH
        if finish is None and time.monotonic() - self._remembered_at > REMEMBERED_SECONDS:
            self._remember()
        if finish is not None:
            is_interrupted = finish is not FinishReason.STOP
            events += self._reader.finish(cut_off=finish is FinishReason.LENGTH, is_interrupted=is_interrupted)
            self.end()
            events.append(self._end(finish, token.error))
        return events

    def _is_late(self) -> bool:
        limits = self._context.options.limits
        now = time.monotonic()
        if not self._tokens:
            prefilling = now - self._context.started - self._request.queue_seconds
            return limits.prefill is not None and prefilling > limits.prefill
        is_over = limits.decode is not None and now - self._first_token_at > limits.decode
        return is_over and "\n" in self._reader.text

    def _requested(self, token_id: int) -> list[ChatEvent]:
        """Return the optional events that precede a token's text, if the options request them."""
        total = len(self._request.prompt_ids)
        is_first = self._options.reports_progress and not self._tokens and self._prefilled < total
        events: list[ChatEvent] = [self._progress(total, total)] if is_first else []
        return [*events, GeneratedTokens((token_id,))] if self._options.reports_tokens else events

    def _progress(self, done: int, total: int) -> PromptProgress:
        seconds = time.monotonic() - self._context.started - self._request.queue_seconds
        return PromptProgress(done, total, self._request.num_cached, max(0.0, seconds))

    def end(self) -> None:
        """End the reply, unless it has ended. May be called any number of times."""
        if self.ended:
            return
        self.ended = True
        request, output_ids = self._request, self._remember()
        if self._reader.stopped is not None:
            output_ids = self._before_stop(output_ids, self._reader.stopped)
        computed = self._num_prefilled + max(0, self._tokens - 1)
        self._prompt.finish(request, output_ids, computed)

    @property
    def _num_prefilled(self) -> int:
        """Number of prompt tokens that are prefilled. After the first token of the reply, that is all of them."""
        return len(self._request.prompt_ids) if self._tokens else self._prefilled

    def _remember(self) -> list[int]:
        """Save the ids so far for later prompts, and return them.

        Called often, because the process may be killed at any time.
        """
        self._remembered_at = time.monotonic()
        request, output_ids = self._request, self._request.output_ids[: self._tokens]
        text, continues_text = self._reader.text, self._context.continues_text
        reply = GeneratedReply(request.prompt_ids, output_ids, text, continues_text, request.origin.stored)
        self._context.encoder.remember(reply)
        return output_ids

    def _before_stop(self, output_ids: list[int], stop: str) -> list[int]:
        """Return the ids before a stop string, which the text of later prompts does not contain."""
        end, length = len(output_ids), len(stop.encode())
        while end and length > 0:
            end -= 1
            length -= len(self._context.tokenizer.token_bytes(output_ids[end]))
        return output_ids[:end]

    def _push_token(self, token: TokenEvent, token_id: int) -> list[ContentEvent]:
        self._tokens += 1
        self._first_token_at = self._first_token_at or time.monotonic()
        ends = token.finish is not None and token_id in self._context.tokenizer.end_of_generation_ids
        hidden = ends or (token_id in self._request.params.stop_token_ids and not self._options.includes_stop)
        return self._reader.push(token_id, token.logprobs, hidden=hidden)

    def _end(self, finish: FinishReason, error: str) -> ReplyEnd:
        request, now = self._request, time.monotonic()
        return ReplyEnd(
            finish=finish,
            stop=self._reader.stopped,
            seed=request.params.seed,
            prompt_tokens=len(request.prompt_ids),
            cache=self._prompt.report(request, self._num_prefilled) if self._num_prefilled else EMPTY_REPORT,
            completion_tokens=self._tokens,
            reasoning_tokens=self._reader.reasoning_tokens,
            first_token_seconds=(self._first_token_at or now) - self._context.started,
            total_seconds=now - self._context.started,
            queue_seconds=request.queue_seconds,
            drafts=request.drafts,
            error=error,
        )
