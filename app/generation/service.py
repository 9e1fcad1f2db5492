"""The chat service: a conversation in, events of replies out."""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing, suppress
from typing import TypeVar

from app.errors import GrammarsUnavailable, InvalidGrammar, TextTooLong
from app.generation.cache_report import NOTHING
from app.generation.cache_reporter import AskedPrompt, CacheReporter
from app.generation.conversation import Conversation
from app.generation.default_sampling import API_DEFAULTS, DefaultSampling
from app.generation.events import (
    NO_LIMITS,
    PLAIN_REPLY,
    ChatEvent,
    GeneratedTokens,
    PromptLogprobs,
    PromptProgress,
    ReplyEnd,
    ReplyOptions,
    SpokenEvent,
    TimeLimits,
    joined,
)
from app.generation.grammars import GrammarCompiler
from app.generation.messages import Message
from app.generation.model_replies import Abilities, ChatPrompt
from app.generation.prompt_encoder import PromptEncoder, Reply
from app.generation.recent_prompts import num_common
from app.generation.reply_formats.reply_parser import ReplyParser
from app.generation.reply_reader import ReplyReader
from app.generation.stable_ids import StableIds
from app.generation.template import ChatTemplateRenderer
from app.generation.token_filter import TokenFilter
from app.generation.token_streams import TokenStreams
from app.process.work_pool import Check, WorkPool
from app.text.infilling import Gap, Infilling
from app.text.long_texts import Limit
from app.text.sequence_breakers import SequenceBreakers
from app.text.tokenizer import Tokenizer
from engine.errors import PromptTooLong
from engine.request import PROGRAM, FinishReason, Origin, Request, TokenEvent
from engine.sampling_params import SamplingParams

STUCK_SECONDS = 60.0  # without a request that is prepared, or given up, while some are waiting


class Preparation:
    """Used on one event loop; `problem` may be called from any thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` tells seconds that only grow."""
        self._clock = clock
        self._waiting = 0
        self._moved_at = clock()

    @contextlib.contextmanager
    def of_request(self) -> Iterator[None]:
        """A request waits for its prompt and its grammar while the body runs."""
        if not self._waiting:
            self._moved_at = self._clock()
        self._waiting += 1
        try:
            yield
        finally:
            self._waiting -= 1
            self._moved_at = self._clock()

    def problem(self) -> str:
        """Why requests wait in vain, or an empty string while they get on."""
        silence = self._clock() - self._moved_at if self._waiting else 0.0
        return f"no request was prepared for the engine for {silence:.0f} s" if silence >= STUCK_SECONDS else ""


IDLE_SECONDS = 1.0
REMEMBERED_SECONDS = 0.5  # a reply is remembered as far as it is, again and again
PROMPT_THREADS = 4  # one of them may wait for the process that renders templates
TEXT_THREADS = 2
MAX_COUNTED = 1 << 20  # tokens of a text that is encoded for its own sake, and not to be read by the model

T = TypeVar("T")


class ChatService:
    """Answers conversations with one model, any number at a time."""

    def __init__(
        self,
        name: str,
        tokenizer: Tokenizer,
        streams: TokenStreams,
        renderer: ChatTemplateRenderer,
        stable_ids: StableIds | None = None,
        *,
        sampling: DefaultSampling = API_DEFAULTS,
        generic_tools: bool = True,
    ) -> None:
        """`stable_ids` is where the ids of replies are kept; None: in memory alone. `sampling` fills in what requests
        leave open. With `generic_tools`, models without tools in their template are told of them as text."""
        self.name = name
        self.tokenizer = tokenizer
        self.streams = streams
        self.sampling = sampling
        self._encoding = WorkPool("rendering and encoding prompts", PROMPT_THREADS)
        # Texts and ids that clients want to have counted or translated wait for each other, and prompts do not wait.
        self.texts = WorkPool("encoding texts", TEXT_THREADS)
        self.preparation = Preparation()
        ids = StableIds() if stable_ids is None else stable_ids
        self._prompts = PromptEncoder(tokenizer, renderer, ids, generic_tools=generic_tools)
        self.cache = CacheReporter(tokenizer)
        self.grammars = GrammarCompiler(tokenizer)
        self.breakers = SequenceBreakers(tokenizer, self._encoding)
        self._infilling = Infilling.of(tokenizer.control_tokens)

    @property
    def context_length(self) -> int:
        return self.streams.context_length

    @property
    def vocab_size(self) -> int:
        """Ids below this are in the vocabulary, of the model and of its tokenizer."""
        return min(self.streams.vocab_size, self.tokenizer.vocab_size)

    def problem(self) -> str:
        """Why requests would wait in vain, or an empty string while they are served."""
        parts = (self.streams, self._encoding, self.texts, self.preparation)
        return next(filter(None, (part.problem() for part in parts)), "")

    async def stop(self) -> None:
        """End every request, and the work on those that are not requests of the engine yet."""
        await asyncio.gather(self.streams.stop(), self._encoding.close(), self.texts.close())

    async def encode(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """The prompt for the assistant's next turn; what people wrote stays text. Raises TemplateError."""
        return await self._encoding.run(lambda check: self._prompts.encode(messages, Limit(check=check)))

    async def prompt(self, conversation: Conversation) -> ChatPrompt:
        """The prompt for the assistant's next turn. Raises PromptTooLong, TemplateError, and ToolsUnsupported for tools
        that the model's template tells it nothing of."""

        def make(limit: Limit) -> ChatPrompt:
            ids, rendered = self._prompts.encode_conversation(conversation, limit)
            return ChatPrompt(ids, self._prompts.replies, conversation, rendered)

        return await self._within_context(make)

    async def _within_context(self, encode: Callable[[Limit], T]) -> T:
        """The result of encoding a prompt. Raises PromptTooLong for one that certainly does not fit the context."""
        length = self.context_length
        try:
            return await self._encoding.run(lambda check: encode(Limit.of_context(length, check)))
        except TextTooLong as error:
            raise PromptTooLong.of(error.least, length, self.streams.longest_context, is_exact=False) from error

    async def next_turn(self, before: tuple[int, ...], conversation: Conversation) -> ChatPrompt:
        """The prompt that begins with the ids `before`, which end with a reply, and goes on with a conversation. Raises
        as `prompt` does."""

        def make(limit: Limit) -> ChatPrompt:
            ids, rendered = self._prompts.encode_next_turn(before, conversation, limit)
            return ChatPrompt(ids, self._prompts.replies, conversation, rendered)

        return await self._within_context(make)

    async def length(self, conversation: Conversation) -> int:
        """How many tokens its prompt would be, whatever the context holds. Raises TextTooLong beyond MAX_COUNTED, and
        what else `prompt` raises."""

        def count(check: Check) -> int:
            return len(self._prompts.encode_conversation(conversation, Limit(MAX_COUNTED, check=check))[0])

        return await self.texts.run(count)

    async def decoded(self, ids: Sequence[int]) -> str:
        """The text of ids of the vocabulary, control tokens included."""

        def decode(check: Check) -> str:
            return b"".join(self.tokenizer.shown_bytes(ids, check)).decode(errors="replace")

        return await self.texts.run(decode)

    async def tokenized(self, text: str, *, parse_special: bool = False) -> list[int]:
        """The ids of a text, whatever the context holds. Raises TextTooLong beyond MAX_COUNTED."""

        def encode(check: Check) -> list[int]:
            return self.tokenizer.encode(text, parse_special=parse_special, limit=Limit(MAX_COUNTED, check=check))

        return await self.texts.run(encode)

    async def abilities(self) -> Abilities:
        """Found out by rendering its template, the first time. Raises TemplateUnavailable."""

        def find_out(check: Check) -> Abilities:
            replies = self._prompts.replies
            return Abilities(replies.tool_support, replies.thinks, self._infilling is not None)

        return await self._encoding.run(find_out)

    async def token_filter(self, allowed: frozenset[int] | None, words: Sequence[str]) -> TokenFilter | None:
        """A filter that lets `allowed` token ids pass (None: all), and never completes one of the `words`."""
        return await self._encoding.run(lambda _: TokenFilter.of(self.tokenizer, allowed, words))

    async def prepare_when_idle(self) -> None:
        """Do what the first grammar would wait for as soon as nothing is generated: it takes a core for a while."""
        await asyncio.sleep(IDLE_SECONDS)
        while self.streams.num_running or self.streams.num_waiting:
            await asyncio.sleep(IDLE_SECONDS)
        with suppress(InvalidGrammar, GrammarsUnavailable):  # the first grammar reports it
            await self.grammars.prepare()

    async def encode_text(self, text: str) -> tuple[int, ...]:
        """A prompt that is no conversation: its text as it stands, control tokens in it included. Raises
        PromptTooLong."""
        return await self._within_context(lambda limit: self._prompts.encode_text(text, limit))

    async def encode_mixed(self, parts: Sequence[str | int]) -> tuple[int, ...]:
        """A prompt of texts and ids, one after the other. Raises PromptTooLong."""
        return await self._within_context(lambda limit: self._prompts.encode_mixed(parts, limit))

    async def encode_infill(self, gap: Gap) -> tuple[int, ...] | None:
        """A prompt for what is missing between two texts; None for a model that has no tokens to be asked that with.
        Raises PromptTooLong."""
        if (infilling := self._infilling) is None:
            return None
        return await self._within_context(lambda limit: self._prompts.encode_infill(infilling, gap, limit))

    async def forget(
        self, messages: Sequence[Message], staying: Sequence[Sequence[Message]] = (), origin: Origin = PROGRAM
    ) -> None:
        """Forget what was computed and generated in a conversation, on disk as well, but for the beginning that it has
        in common with one that stays. Raises TemplateError."""
        ids = await self.encode(messages)
        others = [await self.encode(other) for other in staying]
        self.streams.forget(ids, origin, kept=max((num_common(ids, other) for other in others), default=0))
        await self.texts.run(lambda check: self._prompts.forget(messages, Limit(check=check)))

    async def generate(
        self,
        prompt_ids: tuple[int, ...],
        params: SamplingParams,
        *,
        origin: Origin = PROGRAM,
        continues_text: bool = False,
        new_parser: Callable[[], ReplyParser] | None = None,
    ) -> AsyncGenerator[ChatEvent]:
        """Continue a prompt; `continues_text` where the reply goes on in the middle of a text, not as a turn. Without
        a parser, all of it is text.

        Closing the generator ends the request at once, in any phase. The last event is a ReplyEnd. Raises
        PromptTooLong, InvalidSampling or EngineError before the first event.
        """
        asked = [(prompt_ids, params)]
        batches = self.generate_several(asked, origin=origin, continues_text=continues_text, new_parser=new_parser)
        async with aclosing(batches):
            async for batch in batches:
                for _, event in batch:
                    yield event

    async def generate_several(
        self,
        asked: Sequence[tuple[tuple[int, ...], SamplingParams]],
        *,
        origin: Origin = PROGRAM,
        continues_text: bool = False,
        new_parser: Callable[[], ReplyParser] | None = None,
        limits: TimeLimits = NO_LIMITS,
        pause: float = 0.0,
        options: ReplyOptions = PLAIN_REPLY,
    ) -> AsyncGenerator[list[tuple[int, ChatEvent]]]:
        """Continue several prompts at once. Yields what has come meanwhile, never nothing: each event with the index
        of its reply. Of each reply this is what `generate` yields, within `limits` and by `options`; with a `pause`,
        what has come in so many seconds is yielded as one, but for the first and the end.

        A prompt that several of them continue, one after the other, is read once. One that asks for a beam search has
        as many replies as that has results, best first; they come when it has ended.
        """
        end_ids = self.tokenizer.end_of_generation_ids
        replies: dict[int, _Reply] = {}
        started = time.monotonic()
        with self.streams.open(pause) as stream:
            for prompt_ids, several in _families(asked):
                requests = stream.submit_several(prompt_ids, several, end_ids, origin)
                prompt = self.cache.asked(requests[0])
                for request in requests:
                    parser = new_parser() if new_parser is not None else None
                    stop = request.params.stop
                    reader = ReplyReader(self.tokenizer, stop, parser, options, continues_text=continues_text)
                    reply = _Reply(
                        len(replies),
                        request,
                        prompt,
                        self._prompts,
                        self.tokenizer,
                        reader,
                        limits,
                        options,
                        started,
                        continues_text=continues_text,
                    )
                    replies[request.id] = reply
            try:
                async for tokens in stream:
                    batch: list[tuple[int, ChatEvent]] = []
                    for token in tokens:
                        reply = replies[token.request_id]
                        batch += [(reply.index, event) for event in reply.events(token)]
                        if reply.ended:
                            stream.abort(token.request_id, FinishReason.STOP)  # at a stop string, where it still runs
                    if batch:
                        yield joined(batch) if pause else batch
            finally:
                for reply in replies.values():
                    reply.end()


def _families(
    asked: Sequence[tuple[tuple[int, ...], SamplingParams]],
) -> list[tuple[tuple[int, ...], list[SamplingParams]]]:
    """Each run of equal prompts as one. A prompt is read again for each that reports on it, or searches."""
    families: list[tuple[tuple[int, ...], list[SamplingParams]]] = []
    for prompt_ids, params in asked:
        alone = params.prompt_logprobs is not None or params.beams is not None
        if families and families[-1][0] == prompt_ids and not alone:
            families[-1][1].append(params)
        else:
            families.append((prompt_ids, [params]))
    return families


class _Reply:
    """Folds the token events of one request into chat events."""

    def __init__(
        self,
        index: int,
        request: Request,
        prompt: AskedPrompt,
        prompts: PromptEncoder,
        tokenizer: Tokenizer,
        reader: ReplyReader,
        limits: TimeLimits,
        options: ReplyOptions,
        started: float,
        *,
        continues_text: bool,
    ) -> None:
        self.index = index
        self.ended = False
        self._request = request
        self._prompt = prompt
        self._prompts = prompts
        self._tokenizer = tokenizer
        self._reader = reader
        self._limits = limits
        self._options = options
        self._continues_text = continues_text
        self._started = started  # when it was asked for, as time.monotonic says
        self._first_token_at = 0.0
        self._tokens = 0
        self._read = 0  # tokens of the prompt
        self._remembered_at = started

    def events(self, token: TokenEvent) -> list[ChatEvent]:
        """What a token event means to the reader of the reply. Nothing, once a stop string has ended it."""
        if self.ended:
            return []
        events: list[ChatEvent] = [PromptLogprobs(token.prompt_logprobs)] if token.prompt_logprobs else []
        if token.token_id is None and token.finish is None:
            total = len(self._request.prompt_ids)
            self._read = max(self._read, token.num_computed)
            # A request that gave way reads its prompt again in the middle of its reply, which is nobody's news.
            events += [] if self._tokens else [self._progress(min(token.num_computed, total), total)]
        if token.token_id is not None:
            events += self._asked_for(token.token_id)
            events += self._take(token, token.token_id)
        over = self._reader.stopped is not None or self._reader.ended
        finish = FinishReason.STOP if over else token.finish
        if finish is None and self._is_late():
            finish = FinishReason.LENGTH
        if finish is None and time.monotonic() - self._remembered_at > REMEMBERED_SECONDS:
            self._remember()
        if finish is not None:
            events += self._reader.finish(cut_off=finish is FinishReason.LENGTH)
            self.end()
            events.append(self._end(finish, token.error))
        return events

    def _is_late(self) -> bool:
        reading, writing, now = self._limits.reading, self._limits.writing, time.monotonic()
        if not self._tokens:
            return reading is not None and now - self._started - self._request.queue_seconds > reading
        return writing is not None and now - self._first_token_at > writing and "\n" in self._reader.told

    def _asked_for(self, token_id: int) -> list[ChatEvent]:
        """The events before a token's text that the options ask for."""
        total = len(self._request.prompt_ids)
        is_first = self._options.reports_progress and not self._tokens and self._read < total
        events: list[ChatEvent] = [self._progress(total, total)] if is_first else []
        return [*events, GeneratedTokens((token_id,))] if self._options.reports_tokens else events

    def _progress(self, done: int, total: int) -> PromptProgress:
        seconds = time.monotonic() - self._started - self._request.queue_seconds
        return PromptProgress(done, total, self._request.num_cached, max(0.0, seconds))

    def end(self) -> None:
        """Nothing follows, whether or not that was told; any number of times."""
        if self.ended:
            return
        self.ended = True
        request, output_ids = self._request, self._remember()
        if self._reader.stopped is not None:
            output_ids = self._in_front_of_stop(output_ids, self._reader.stopped)
        computed = self._prompt_read + max(0, self._tokens - 1)
        self._prompt.ended(request, output_ids, computed)

    @property
    def _prompt_read(self) -> int:
        """Tokens of the prompt that are computed: all of them, once the reply has begun."""
        return len(self._request.prompt_ids) if self._tokens else self._read

    def _remember(self) -> list[int]:
        """Have the ids so far stand for their text; now and then, since the process may be killed. They are given."""
        self._remembered_at = time.monotonic()
        request, output_ids = self._request, self._request.output_ids[: self._tokens]
        told, stored = self._reader.told, request.origin.stored
        self._prompts.remember(Reply(request.prompt_ids, output_ids, told, self._continues_text, stored))
        return output_ids

    def _in_front_of_stop(self, output_ids: list[int], stop: str) -> list[int]:
        """Without the tokens that the stop string is made of, which whoever goes on from the reply leaves out."""
        end, length = len(output_ids), len(stop.encode())
        while end and length > 0:
            end -= 1
            length -= len(self._tokenizer.token_bytes(output_ids[end]))
        return output_ids[:end]

    def _take(self, token: TokenEvent, token_id: int) -> list[SpokenEvent]:
        self._tokens += 1
        self._first_token_at = self._first_token_at or time.monotonic()
        ends = token.finish is not None and token_id in self._tokenizer.end_of_generation_ids
        hidden = ends or (token_id in self._request.params.stop_token_ids and not self._options.includes_stop)
        return self._reader.take(token_id, token.logprobs, hidden=hidden)

    def _end(self, finish: FinishReason, error: str) -> ReplyEnd:
        request, now = self._request, time.monotonic()
        return ReplyEnd(
            finish=finish,
            stop=self._reader.stopped,
            seed=request.params.seed,
            prompt_tokens=len(request.prompt_ids),
            cache=self._prompt.report(request, self._prompt_read) if self._prompt_read else NOTHING,
            completion_tokens=self._tokens,
            thought_tokens=self._reader.thought_tokens,
            first_token_seconds=(self._first_token_at or now) - self._started,
            total_seconds=now - self._started,
            queue_seconds=request.queue_seconds,
            error=error,
        )
