"""Chat service: converts a conversation to a prompt, and yields the events of the replies."""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from typing import TypeVar

from app.errors import GrammarsUnavailable, InvalidGrammar, TextTooLong
from app.generation.attachments import AttachmentRefused
from app.generation.cache_report import CacheReport
from app.generation.cache_tracker import CacheTracker
from app.generation.conversation import Conversation, Message
from app.generation.events import Batch, TokenCounts
from app.generation.grammars import GrammarCompiler
from app.generation.model_format import Capabilities, ChatPrompt
from app.generation.options import API_DEFAULTS, DefaultSampling, GenerationOptions, PreparedRequest
from app.generation.prompt_encoder import PromptEncoder
from app.generation.recent_prompts import common_prefix_len
from app.generation.recent_replies import RecentReplies
from app.generation.replies import Choices, Replies
from app.generation.reply import ReplyContext
from app.generation.reply_token_cache import ReplyTokenCache
from app.generation.request_log import log_request
from app.generation.template import ChatTemplateRenderer
from app.generation.token_filter import TokenFilter
from app.generation.token_streams import TokenStreams
from app.process.work_pool import Check, WorkPool
from app.text.infilling import Gap, Infilling
from app.text.long_texts import TextLimit
from app.text.sequence_breakers import SequenceBreakers
from app.text.tokenizer import Tokenizer
from engine.errors import PromptTooLong
from engine.grammar import Grammar
from engine.kv.parked_cache import ParkedCache
from engine.request import PROGRAM, Origin

IDLE_SECONDS = 1.0
PROMPT_THREADS = 4  # several, because one may be waiting for the template process
TEXT_THREADS = 2
MAX_COUNTED = 1 << 20  # maximum number of tokens of a text that is only counted or tokenized

# the service counts as stuck if requests wait and no preparation is finished for this many seconds
STUCK_SECONDS = 60.0

T = TypeVar("T")


class Preparation:
    """Counts the requests whose prompt and grammar are not ready. Used on one event loop; `problem` is thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` returns seconds that never decrease."""
        self._clock = clock
        self._waiting = 0
        self._moved_at = clock()

    @contextlib.contextmanager
    def track(self) -> Iterator[None]:
        """Count a request as waiting while the body runs."""
        if not self._waiting:
            self._moved_at = self._clock()
        self._waiting += 1
        try:
            yield
        finally:
            self._waiting -= 1
            self._moved_at = self._clock()

    @property
    def is_busy(self) -> bool:
        """Whether any request is not ready."""
        return self._waiting > 0

    def problem(self) -> str:
        """Return the reason why requests are stuck, or an empty string if no request is stuck."""
        silence = self._clock() - self._moved_at if self._waiting else 0.0
        return f"no request was prepared for {silence:.0f} s" if silence >= STUCK_SECONDS else ""


class ChatService:
    """Generates replies with one model, for any number of requests at a time."""

    def __init__(
        self,
        name: str,
        tokenizer: Tokenizer,
        streams: TokenStreams,
        renderer: ChatTemplateRenderer,
        reply_tokens: ReplyTokenCache | None = None,
        recent: RecentReplies | None = None,
        *,
        sampling: DefaultSampling = API_DEFAULTS,
        generic_tools: bool = True,
        refuses_attachments: bool = False,
    ) -> None:
        """Create the service of one model.

        `reply_tokens` caches the ids of replies; None: in memory only. `recent` records the replies. `sampling` has the
        default values of sampling fields. `generic_tools` presents tools as text to a model whose template does not
        support them. With `refuses_attachments`, conversations with images or documents are refused.
        """
        self.name = name
        self.tokenizer = tokenizer
        self.streams = streams
        self.sampling = sampling
        self.recent = RecentReplies() if recent is None else recent
        self._encoding = WorkPool("rendering and encoding prompts", PROMPT_THREADS)
        # Separate from the pool for prompts, so that tokenizing and counting texts does not delay prompts.
        self.texts = WorkPool("encoding texts", TEXT_THREADS)
        self.preparation = Preparation()
        ids = ReplyTokenCache() if reply_tokens is None else reply_tokens
        self._prompts = PromptEncoder(tokenizer, renderer, ids, generic_tools=generic_tools)
        self.cache = CacheTracker(tokenizer)
        self.grammars = GrammarCompiler(tokenizer)
        self._breakers = SequenceBreakers(tokenizer, self._encoding)
        self._infilling = Infilling.of(tokenizer.control_tokens)
        self._refuses_attachments = refuses_attachments

    @property
    def context_length(self) -> int:
        return self.streams.context_length

    @property
    def vocab_size(self) -> int:
        """Number of token ids that both the model and its tokenizer have. All ids are below it."""
        return min(self.streams.vocab_size, self.tokenizer.vocab_size)

    @property
    def failure(self) -> str:
        """The error that ended the engine for good; empty if there was none."""
        return self.streams.failure

    def problem(self) -> str:
        """Return the reason why requests are stuck, or an empty string if no request is stuck."""
        parts = (self.streams, self._encoding, self.texts, self.preparation)
        return next(filter(None, (part.problem() for part in parts)), "")

    async def stop(self, *, parks: bool = False) -> ParkedCache | None:
        """End every request, including those that are not submitted to the engine yet, and all grammar processes.

        If it `parks`, return the KV cache.
        """
        return await self._close(self.streams.stop(parks=parks))

    async def suspend(self) -> ParkedCache | None:
        """Close the engine and all processes, and return the KV cache. The requests wait in the streams."""
        return await self._close(self.streams.suspend())

    async def _close(self, streams: Awaitable[ParkedCache | None]) -> ParkedCache | None:
        """Close the threads and the processes, while `streams` closes the engine and returns its KV cache."""
        parked, _, _ = await asyncio.gather(streams, self._encoding.close(), self.texts.close())
        await self.grammars.close()
        return parked

    async def encode(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """Return the prompt for the assistant's next turn. Raises TemplateError."""
        return await self._encoding.run(lambda check: self._prompts.encode(messages, TextLimit(check=check)))

    async def prompt(self, conversation: Conversation) -> ChatPrompt:
        """Return the prompt for the assistant's next turn. It follows the conversation's context, if that has one.

        Raises PromptTooLong, TemplateError, AttachmentRefused, and ToolsUnsupported for tools that the model cannot
        use.
        """
        self._check_attachments(conversation)

        def make(limit: TextLimit) -> ChatPrompt:
            if conversation.context:
                ids, rendered = self._prompts.encode_next_turn(conversation.context, conversation, limit)
            else:
                ids, rendered = self._prompts.encode_conversation(conversation, limit)
            template = self._prompts.format
            marks = template.marks(conversation, rendered, ids) if self.streams.has_states else ()
            return ChatPrompt(ids, template, conversation, rendered, marks)

        return await self._within_context(make)

    def _check_attachments(self, conversation: Conversation) -> None:
        if self._refuses_attachments and conversation.attachments:
            raise AttachmentRefused(conversation.attachments[0])

    async def _within_context(self, encode: Callable[[TextLimit], T]) -> T:
        """Encode a prompt on a worker thread. Raises PromptTooLong if it certainly exceeds the context length."""
        length = self.context_length
        try:
            return await self._encoding.run(lambda check: encode(TextLimit.of_context(length, check)))
        except TextTooLong as error:
            raise PromptTooLong.of(error.least, length, self.streams.longest_context, is_exact=False) from error

    async def count_tokens(self, conversation: Conversation) -> int:
        """Return the number of tokens of a conversation's prompt, which may exceed the context length.

        Raises TextTooLong beyond MAX_COUNTED, TemplateError, AttachmentRefused, and ToolsUnsupported.
        """
        self._check_attachments(conversation)

        def count(check: Check) -> int:
            return len(self._prompts.encode_conversation(conversation, TextLimit(MAX_COUNTED, check=check))[0])

        return await self.texts.run(count)

    async def detokenize(self, ids: Sequence[int]) -> str:
        """Return the text of token ids, including control tokens."""

        def decode(check: Check) -> str:
            return b"".join(self.tokenizer.shown_bytes(ids, check)).decode(errors="replace")

        return await self.texts.run(decode)

    async def tokenize(self, text: str, *, parse_special: bool = False) -> list[int]:
        """Return the ids of a text, which may exceed the context length. Raises TextTooLong beyond MAX_COUNTED."""

        def encode(check: Check) -> list[int]:
            return self.tokenizer.encode(text, parse_special=parse_special, limit=TextLimit(MAX_COUNTED, check=check))

        return await self.texts.run(encode)

    async def capabilities(self) -> Capabilities:
        """Return the supported features. The first call renders the template. Raises TemplateUnavailable."""

        def probe(check: Check) -> Capabilities:
            replies = self._prompts.format
            return Capabilities(replies.tool_support, replies.thinks, self._infilling is not None)

        return await self._encoding.run(probe)

    async def prepare_when_idle(self) -> None:
        """Prepare the grammar compiler once the engine is idle, because preparing uses a core for up to 2 s."""
        await asyncio.sleep(IDLE_SECONDS)
        while self.streams.num_running or self.streams.num_waiting:
            await asyncio.sleep(IDLE_SECONDS)
        with suppress(InvalidGrammar, GrammarsUnavailable):  # the first request with a grammar reports the error
            await self.grammars.prepare()

    async def encode_text(self, text: str) -> tuple[int, ...]:
        """Return the ids of a text that is not a conversation.

        Control tokens in it are parsed. Raises PromptTooLong.
        """
        return await self._within_context(lambda limit: self._prompts.encode_text(text, limit))

    async def encode_mixed(self, parts: Sequence[str | int]) -> tuple[int, ...]:
        """Return the ids of a sequence of texts and ids. Raises PromptTooLong."""
        return await self._within_context(lambda limit: self._prompts.encode_mixed(parts, limit))

    async def encode_infill(self, gap: Gap) -> tuple[int, ...] | None:
        """Return a prompt for the text between two others. None: the model does not support infilling.

        Raises PromptTooLong.
        """
        if (infilling := self._infilling) is None:
            return None
        return await self._within_context(lambda limit: self._prompts.encode_infill(infilling, gap, limit))

    async def forget(
        self, messages: Sequence[Message], staying: Sequence[Sequence[Message]] = (), origin: Origin = PROGRAM
    ) -> None:
        """Forget the KV cache and the replies of a conversation, also on disk.

        Keeps the longest prefix that it shares with one of the conversations `staying`. Raises TemplateError.
        """
        ids = await self.encode(messages)
        others = [await self.encode(other) for other in staying]
        self.streams.forget(ids, origin, kept=max((common_prefix_len(ids, other) for other in others), default=0))
        await self.texts.run(lambda check: self._prompts.forget(messages, TextLimit(check=check)))

    async def reply(
        self,
        prompt: Conversation | Sequence[tuple[int, ...]],
        options: GenerationOptions,
        origin: Origin = PROGRAM,
        counts: TokenCounts | None = None,
    ) -> AsyncGenerator[Batch]:
        """Generate the replies to a conversation, or continue prompts of token ids.

        Yields batches of at least one event, each event with the index of its reply. Replies are numbered in the order
        of the prompts. If the options have more candidates than replies to return, only the best candidates are
        yielded, best first, after all have ended. Adds to `counts`. Closing the generator ends all replies.

        Before the first event, raises TemplateError, AttachmentRefused, ToolsUnsupported, PromptTooLong,
        InvalidGrammar, InvalidSampling, or EngineError. Later, raises ReplyFailed or ReplyAborted if the engine ended a
        reply, and InvalidGrammar if the grammar turned out to be too complex.
        """
        counts = TokenCounts() if counts is None else counts
        if isinstance(prompt, Conversation):
            counts.cache = counts.cache.plus(CacheReport(left_out=prompt.left_out))
        with self.preparation.track():
            prepared = await self._prepare(prompt, options)
        counts.set_prompts(prepared.prompts)
        with (
            log_request(self.name, origin, counts, self.recent) as log,
            self.streams.open(options.pause) as stream,
        ):
            context = ReplyContext(self.tokenizer, self._prompts, options, prepared.continues_text)
            replies, choices = Replies(context, stream, self.cache), Choices(prepared, counts, log)
            replies.submit(prepared, origin)
            with closing(replies):
                async for tokens in stream:
                    batch, failure = choices.select(replies.events(tokens))
                    if batch:
                        yield batch
                    if failure is not None:
                        raise failure
        if best := choices.best():
            yield best

    async def _prepare(
        self, prompt: Conversation | Sequence[tuple[int, ...]], options: GenerationOptions
    ) -> PreparedRequest:
        """Render and encode the prompt, and compile the grammar. Raises what `reply` raises before its first event."""
        breakers = await self._breakers.tokens(options.breakers) if options.breakers else frozenset[int]()
        token_filter = await self._token_filter(options)
        prediction = await self._predicted_tokens(options.prediction)

        def with_grammar(grammar: Grammar | None) -> GenerationOptions:
            inner = grammar if token_filter is None else replace(token_filter, reply=grammar)
            return options.prepared(inner, breakers, prediction)

        if isinstance(prompt, Conversation):
            chat = await self.prompt(prompt)
            grammar, field = await chat.compile_grammar(self.grammars, options.grammar)
            return PreparedRequest(
                [chat.ids],
                with_grammar(grammar),
                field,
                chat.new_parser,
                continues_text=bool(prompt.reply_prefix),
                marks=chat.marks,
            )
        if options.grammar is None:
            return PreparedRequest(prompt, with_grammar(None))
        grammar = await options.grammar.compile(self.grammars)
        return PreparedRequest(prompt, with_grammar(grammar), options.grammar.field)

    async def _predicted_tokens(self, text: str) -> tuple[int, ...]:
        """Return the ids of a text that the reply may repeat. A text that is too long is not used."""
        if not text:
            return ()
        try:
            return tuple(await self.tokenize(text))
        except TextTooLong:
            return ()

    async def _token_filter(self, options: GenerationOptions) -> TokenFilter | None:
        """Return the filter for allowed tokens and forbidden words, if the options have any."""
        allowed, words = options.allowed_ids, options.bad_words
        if allowed is None and not words:
            return None
        return await self._encoding.run(lambda _: TokenFilter.of(self.tokenizer, allowed, words))
