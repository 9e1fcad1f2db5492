"""Text completions, OpenAI's older dialect: one generator of chunks, which is the streamed reply, and a fold that makes
the whole reply of the same chunks. So the two cannot disagree.

A prompt is taken as it is: control tokens in it are control tokens, for clients that write a chat's markup themselves.
"""

import codecs
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Literal

import msgspec
from msgspec import UNSET, Struct, UnsetType

from app.chat.events import ChatEvent, PromptLogprobs, PromptProgress, ReplyEnd, TextDelta
from app.chat.service import ChatService
from app.server.continuation import Continuation, continuation_events, infill_prompt, text_prompt
from app.server.dialects.openai.requests import CompletionRequest
from app.server.dialects.openai.tokens import Identity, Usage, usage_of
from app.server.errors import InvalidRequest
from app.server.token_counts import TokenCounts
from app.server.token_reports import FinishText, ProgressReport, Timings, finish_text, finite, timings_of, token_text
from app.text.infilling import Gap
from app.text.tokenizer import Tokenizer
from engine.request import Origin, TokenLogprobs


class CompletionLogprobs(Struct):
    """Columns, one entry a token."""

    tokens: list[str] = msgspec.field(default_factory=list)
    token_logprobs: list[float | None] = msgspec.field(default_factory=list)  # None: a prompt's first token
    top_logprobs: list[dict[str, float] | None] = msgspec.field(default_factory=list)
    text_offset: list[int] = msgspec.field(default_factory=list)  # where the token's first whole character is in `text`

    def extend(self, more: "CompletionLogprobs") -> None:
        self.tokens += more.tokens
        self.token_logprobs += more.token_logprobs
        self.top_logprobs += more.top_logprobs
        self.text_offset += more.text_offset


class CompletionChoice(Struct):
    """Of a chunk: its part of the choice. Of a whole reply: all of it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: FinishText | None = None


class Completion(Struct, kw_only=True):
    """A chunk and a whole reply look the same."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType = UNSET  # in the last chunk, which has no choice
    timings: Timings | UnsetType = UNSET  # there, too
    prompt_progress: ProgressReport | UnsetType = UNSET


async def chunks(service: ChatService, wanted: CompletionRequest, origin: Origin) -> AsyncGenerator[list[Completion]]:
    """The reply, in batches as it comes; last, if wanted, a chunk that says what it used. Raises what
    `continuation_events` raises."""
    asked, choices = wanted.grammar(), wanted.choices(await service.breakers.tokens(wanted.breakers()))
    given = wanted.prompts()
    prompts = [await _encode(service, prompt, wanted.suffix) for prompt in given]
    echoes = [_echo(service.tokenizer, wanted, *prompt) for prompt in zip(given, prompts, strict=True)]
    counts = TokenCounts()
    writer = _ChunkWriter(service, echoes, choices.count, tells_progress=bool(wanted.return_progress))
    replies = continuation_events(service, Continuation(prompts, choices, asked), origin, counts)
    async with aclosing(replies) as batches:
        async for batch in batches:
            if written := [chunk for index, event in batch for chunk in writer.write(index, event)]:
                yield written
    if wanted.reports_usage:
        yield [writer.usage(counts)]


async def fold(chunks: AsyncGenerator[Completion]) -> Completion:
    """The whole reply. The last chunk must be the one about usage."""
    parts: dict[int, _Parts] = {}
    async for chunk in chunks:
        for choice in chunk.choices:
            parts.setdefault(choice.index, _Parts()).add(choice)
        if chunk.usage is not UNSET:
            chunk.choices = [parts[index].choice(index) for index in sorted(parts)]
            return chunk
    raise EOFError("the chunks ended without their usage")


@dataclass(slots=True)
class _Parts:
    """The chunks of one choice."""

    texts: list[str] = field(default_factory=list)
    logprobs: CompletionLogprobs | None = None
    finish: FinishText | None = None

    def add(self, choice: CompletionChoice) -> None:
        self.texts.append(choice.text)
        self.finish = choice.finish_reason or self.finish
        if choice.logprobs is not None:
            self.logprobs = self.logprobs or CompletionLogprobs()
            self.logprobs.extend(choice.logprobs)

    def choice(self, index: int) -> CompletionChoice:
        return CompletionChoice(index, "".join(self.texts), self.logprobs, self.finish)


class _ChunkWriter:
    """Writes the chunks of one reply."""

    def __init__(
        self, service: ChatService, echoes: Sequence["_Echo"], choices_each: int, *, tells_progress: bool
    ) -> None:
        """`echoes` are of the prompts, each of which has `choices_each` choices; `tells_progress` of their reading."""
        self._tells_progress = tells_progress
        self._tokenizer = service.tokenizer
        self._identity = Identity.new("cmpl", service.name)
        self._echoes = echoes
        self._choices_each = choices_each
        self._choices: dict[int, _ChoiceWriter] = {}

    def write(self, index: int, event: ChatEvent) -> Iterator[Completion]:
        if index not in self._choices:
            self._choices[index] = _ChoiceWriter(self._tokenizer, index)
            yield self._chunk(self._choices[index].beginning(self._echoes[index // self._choices_each]))
        match event:
            case TextDelta():
                yield self._chunk(self._choices[index].part(event))
            case ReplyEnd(finish):
                yield self._chunk(CompletionChoice(index, "", finish_reason=finish_text(finish)))
            case PromptLogprobs(logprobs):
                yield self._chunk(self._choices[index].part(TextDelta("", logprobs)))
            case PromptProgress() if self._tells_progress:
                chunk = self._chunk(CompletionChoice(index, ""))
                chunk.prompt_progress = ProgressReport.of(event)
                yield chunk
            case PromptProgress():
                pass

    def usage(self, counts: TokenCounts) -> Completion:
        chunk = self._chunk()
        chunk.usage, chunk.timings = usage_of(counts), timings_of(counts)
        return chunk

    def _chunk(self, *choices: CompletionChoice) -> Completion:
        identity = self._identity
        return Completion(id=identity.id, created=identity.created, model=identity.model, choices=list(choices))


class _ChoiceWriter:
    """Writes the parts of one choice; knows how far in its text the tokens are."""

    def __init__(self, tokenizer: Tokenizer, index: int) -> None:
        self._tokenizer = tokenizer
        self._index = index
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._offset = 0

    def beginning(self, echo: "_Echo") -> CompletionChoice:
        """What comes before the reply."""
        if echo.first_token is None:
            return CompletionChoice(self._index, echo.text)
        columns = CompletionLogprobs()
        self._begin_row(columns, echo.first_token)
        columns.token_logprobs.append(None)  # nothing predicts it
        columns.top_logprobs.append(None)
        return CompletionChoice(self._index, echo.text, columns)

    def part(self, delta: TextDelta) -> CompletionChoice:
        return CompletionChoice(self._index, delta.text, self._columns(delta.logprobs) if delta.logprobs else None)

    def _columns(self, reported: Sequence[TokenLogprobs]) -> CompletionLogprobs:
        columns = CompletionLogprobs()
        for token in reported:
            self._begin_row(columns, token.token_id)
            columns.token_logprobs.append(finite(token.logprob))
            columns.top_logprobs.append(self._alternatives(token))
        return columns

    def _begin_row(self, columns: CompletionLogprobs, token_id: int) -> None:
        columns.tokens.append(token_text(self._tokenizer, token_id))
        columns.text_offset.append(self._offset)
        self._offset += len(self._decoder.decode(self._tokenizer.token_bytes(token_id)))

    def _alternatives(self, token: TokenLogprobs) -> dict[str, float]:
        """By text, the most likely where two tokens look the same; the picked one is always among them."""
        alternatives: dict[str, float] = {}
        for token_id, logprob in (*token.top, (token.token_id, token.logprob)):
            alternatives.setdefault(token_text(self._tokenizer, token_id), finite(logprob))
        return alternatives


async def _encode(service: ChatService, prompt: str | tuple[int, ...], suffix: str | None) -> tuple[int, ...]:
    """The ids of a prompt. Raises InvalidRequest."""
    if not suffix:
        return await text_prompt(service, prompt)
    if not isinstance(prompt, str):
        raise InvalidRequest("suffix: it goes with a prompt that is a text.", parameter="suffix")
    return await infill_prompt(service, Gap(prompt, suffix))


@dataclass(frozen=True, slots=True)
class _Echo:
    """What a reply repeats of its prompt."""

    text: str = ""
    first_token: int | None = None  # of the prompt, where its tokens are to be reported


def _echo(
    tokenizer: Tokenizer, wanted: CompletionRequest, given: str | tuple[int, ...], prompt: tuple[int, ...]
) -> _Echo:
    if not wanted.echo:
        return _Echo()
    text = given if isinstance(given, str) else tokenizer.decode(given)
    return _Echo(text, None if wanted.logprobs is None else prompt[0])
