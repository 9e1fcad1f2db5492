"""Text completions of OpenAI's API: the chunks of a streamed reply, written from the events of the service.

`fold` makes a whole reply from the same chunks, so the two cannot disagree. Control tokens in a prompt are encoded as
such, for clients that write a chat's markup themselves.
"""

import codecs
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Literal

import msgspec
from msgspec import UNSET, Struct, UnsetType

from app.generation.events import ChatEvent, PromptLogprobs, PromptProgress, ReplyEnd, TextDelta, TokenCounts
from app.generation.service import ChatService
from app.server.dialects.openai.completion_requests import CompletionRequest
from app.server.dialects.openai.reports import (
    FINGERPRINT,
    ChunkReports,
    Identity,
    PromptLogprobList,
    Usage,
    prompt_logprobs,
)
from app.server.http.errors import InvalidRequest, convert_errors
from app.server.text_prompts import infill_prompt, text_prompt
from app.server.usage import (
    FinishText,
    ProgressReport,
    Timings,
    TokenText,
    finish_text,
    finite_logprob,
    id_text,
    token_text,
)
from app.text.infilling import Gap
from app.text.tokenizer import Tokenizer
from engine.request import Origin, TokenLogprobs


class CompletionLogprobs(Struct):
    """Parallel lists, with one entry for each token."""

    tokens: list[str] = msgspec.field(default_factory=list)
    token_logprobs: list[float | None] = msgspec.field(default_factory=list)  # null for the first token of a prompt
    top_logprobs: list[dict[str, float] | None] = msgspec.field(default_factory=list)
    # position in `text` of the token's first whole character
    text_offset: list[int] = msgspec.field(default_factory=list)

    def extend(self, more: "CompletionLogprobs") -> None:
        self.tokens += more.tokens
        self.token_logprobs += more.token_logprobs
        self.top_logprobs += more.top_logprobs
        self.text_offset += more.text_offset


class CompletionChoice(Struct):
    """A choice of a chunk or of a whole reply."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: FinishText | None = None
    # log-probabilities of the choice's prompt; never in a stream
    prompt_logprobs: PromptLogprobList | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET  # sent in the choice's first chunk
    token_ids: list[int] | UnsetType = UNSET


class Completion(Struct, kw_only=True):
    """A chunk or a whole reply."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    system_fingerprint: str = FINGERPRINT
    usage: Usage | UnsetType = UNSET  # sent in the last chunk, which has no choice, or in all chunks on request
    timings: Timings | UnsetType = UNSET  # sent in the same chunks as `usage`
    prompt_progress: ProgressReport | UnsetType = UNSET  # sent only in chunks without a choice


async def fold(chunks: AsyncGenerator[Completion]) -> Completion:
    """Return the whole reply. The last chunk must have the usage."""
    parts: dict[int, _Parts] = {}
    async for chunk in chunks:
        for choice in chunk.choices:
            parts.setdefault(choice.index, _Parts()).add(choice)
        if chunk.usage is not UNSET and not chunk.choices:
            chunk.choices = [parts[index].choice(index) for index in sorted(parts)]
            return chunk
    raise EOFError("the chunks ended without their usage")


@dataclass(slots=True)
class _Parts:
    """The chunks of one choice."""

    texts: list[str] = field(default_factory=list)
    logprobs: CompletionLogprobs | None = None
    finish: FinishText | None = None
    prompt_logprobs: PromptLogprobList | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET

    def add(self, choice: CompletionChoice) -> None:
        self.texts.append(choice.text)
        self.finish = choice.finish_reason or self.finish
        if choice.logprobs is not None:
            self.logprobs = self.logprobs or CompletionLogprobs()
            self.logprobs.extend(choice.logprobs)
        self.prompt_logprobs = self.prompt_logprobs or choice.prompt_logprobs
        self.prompt_token_ids = self.prompt_token_ids or choice.prompt_token_ids
        if choice.token_ids is not UNSET:
            self.token_ids = self.token_ids or []
            self.token_ids += choice.token_ids

    def choice(self, index: int) -> CompletionChoice:
        return CompletionChoice(
            index,
            "".join(self.texts),
            self.logprobs,
            self.finish,
            self.prompt_logprobs,
            self.prompt_token_ids,
            self.token_ids,
        )


async def chunks(
    service: ChatService, body: CompletionRequest, identity: Identity, origin: Origin, counts: TokenCounts
) -> AsyncGenerator[list[Completion]]:
    """Yield the chunks of a reply in batches, and at the end the usage if the request asks for it.

    The first batch is empty during prefill: no chunk with a choice is sent before the first token. Adds to `counts`.
    Raises the errors of `ChatService.reply`. Errors about the request become InvalidRequest.
    """
    options = body.generation_options(service)
    given = body.prompts()
    prompts = [await _encode(service, prompt, body) for prompt in given]
    echoes = [_echo(service.tokenizer, body, *prompt) for prompt in zip(given, prompts, strict=True)]
    writer = _ChunkWriter(service, body, echoes, identity, counts)
    replies = service.reply(prompts, options, origin, counts)
    has_started = False
    with convert_errors("prompt"):
        async with aclosing(replies) as batches:
            async for batch in batches:
                chunks_of_batch = [chunk for index, event in batch for chunk in writer.write(index, event)]
                if chunks_of_batch or not has_started:
                    yield chunks_of_batch
                has_started = True
    if body.reports_usage:
        yield [writer.usage()]


async def _encode(service: ChatService, prompt: str | tuple[int, ...], body: CompletionRequest) -> tuple[int, ...]:
    """Encode a prompt. Raises InvalidRequest."""
    if not body.suffix:
        return body.truncate(await text_prompt(service, prompt), service.context_length)
    if not isinstance(prompt, str):
        raise InvalidRequest("suffix: the prompt must be a string.", parameter="suffix")
    return await infill_prompt(service, Gap(prompt, body.suffix))


@dataclass(frozen=True, slots=True)
class _Echo:
    """The part of a prompt that its reply repeats."""

    text: str = ""
    first_token: int | None = None  # first token of the prompt, if its log-probabilities are reported
    # whether the echoed text contains that token; a BOS token that the server added is not in it
    has_first: bool = True


def _echo(
    tokenizer: Tokenizer, body: CompletionRequest, given: str | tuple[int, ...], prompt: tuple[int, ...]
) -> _Echo:
    if not body.echo:
        return _Echo()
    first = None if body.logprobs is None else prompt[0]
    if not isinstance(given, str) or body.truncate_prompt_tokens is not None:
        return _Echo(tokenizer.decode(prompt, show_control=True), first)
    is_bos_added = prompt[0] == tokenizer.bos_id and not given.startswith(token_text(tokenizer, prompt[0]))
    return _Echo(given, first, has_first=not is_bos_added)


class _ChunkWriter:
    """Writes the chunks of one reply."""

    def __init__(
        self,
        service: ChatService,
        body: CompletionRequest,
        echoes: Sequence[_Echo],
        identity: Identity,
        counts: TokenCounts,
    ) -> None:
        """Prepare the chunks. `echoes` has an entry for each prompt. All prompts have the same number of choices."""
        self._body = body
        self._tokenizer = service.tokenizer
        self._identity = identity
        self._echoes = echoes
        self._choices_each = body.n or 1
        self._counts = counts
        self._reports = ChunkReports(body, counts)
        self._choices: dict[int, _ChoiceWriter] = {}
        self._prompt_logprobs: dict[int, tuple[TokenLogprobs, ...]] = {}  # keyed by the index of the choice

    def write(self, index: int, event: ChatEvent) -> Iterator[Completion]:
        self._reports.count_event(index, event)
        match event:
            case PromptProgress():
                if self._body.return_progress and index % self._choices_each == 0:
                    chunk = self._chunk()
                    chunk.prompt_progress = ProgressReport.of(event)
                    yield chunk
            case PromptLogprobs(logprobs):
                self._prompt_logprobs[index] = (*self._prompt_logprobs.get(index, ()), *logprobs)
            case TextDelta() | ReplyEnd():
                if index not in self._choices and (first := self._first_choice(index)) != CompletionChoice(index, ""):
                    yield self._chunk(first)
                chunk = self._chunk(self._choice(index, event))
                self._reports.add_to_chunk(chunk)
                yield chunk

    def _first_choice(self, index: int) -> CompletionChoice:
        """Return the first part of a choice: the echo of its prompt, and the reports about the prompt."""
        text = id_text if self._body.return_tokens_as_token_ids else token_text
        shown = self._body.skip_special_tokens is False
        writer = self._choices[index] = _ChoiceWriter(self._tokenizer, index, text, shows_control=shown)
        prompt, reported = index // self._choices_each, self._prompt_logprobs.get(index, ())
        choice = writer.first(self._echoes[prompt], reported)
        if self._body.prompt_logprobs is not None:
            choice.prompt_logprobs = prompt_logprobs(self._tokenizer, reported)
        if self._body.return_token_ids:
            choice.prompt_token_ids = [*self._counts.prompts[prompt]]
        return choice

    def _choice(self, index: int, event: TextDelta | ReplyEnd) -> CompletionChoice:
        if isinstance(event, TextDelta):
            return self._choices[index].part(event)
        return CompletionChoice(index, "", finish_reason=finish_text(event.finish))

    def usage(self) -> Completion:
        chunk = self._chunk()
        self._reports.add_totals(chunk)
        return chunk

    def _chunk(self, *choices: CompletionChoice) -> Completion:
        identity = self._identity
        return Completion(id=identity.id, created=identity.created, model=identity.model, choices=list(choices))


class _ChoiceWriter:
    """Writes the parts of one choice, and tracks the position of its tokens in the text."""

    def __init__(self, tokenizer: Tokenizer, index: int, text: TokenText, *, shows_control: bool) -> None:
        self._shows_control = shows_control
        self._tokenizer = tokenizer
        self._index = index
        self._text = text
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._offset = 0

    def first(self, echo: _Echo, reported: Sequence[TokenLogprobs]) -> CompletionChoice:
        """Return the part before the reply. `reported` are the prompt's tokens from the second on."""
        if echo.first_token is None:
            return CompletionChoice(self._index, echo.text)
        columns = CompletionLogprobs()
        self._start_row(columns, echo.first_token, shown=echo.has_first)
        columns.token_logprobs.append(None)  # no token precedes the first one, so nothing predicts it
        columns.top_logprobs.append(None)
        columns.extend(self._columns(reported, shown=True))
        return CompletionChoice(self._index, echo.text, columns)

    def part(self, delta: TextDelta) -> CompletionChoice:
        columns = self._columns(delta.logprobs, shown=self._shows_control) if delta.logprobs else None
        return CompletionChoice(self._index, delta.text, columns)

    def _columns(self, reported: Sequence[TokenLogprobs], *, shown: bool) -> CompletionLogprobs:
        columns = CompletionLogprobs()
        for token in reported:
            self._start_row(columns, token.token_id, shown=shown)
            columns.token_logprobs.append(finite_logprob(token.logprob))
            columns.top_logprobs.append(self._alternatives(token))
        return columns

    def _start_row(self, columns: CompletionLogprobs, token_id: int, *, shown: bool) -> None:
        """Add a token. With `shown`, the text contains the token even if it is a control token."""
        columns.tokens.append(self._text(self._tokenizer, token_id))
        columns.text_offset.append(self._offset)
        self._offset += len(self._decoder.decode(self._tokenizer.token_bytes(token_id, show_control=shown)))

    def _alternatives(self, token: TokenLogprobs) -> dict[str, float]:
        """Return log-probabilities keyed by token text. If several tokens have the same text, the likeliest is kept.

        The sampled token is included.
        """
        alternatives: dict[str, float] = {}
        for token_id, logprob in (*token.top, (token.token_id, token.logprob)):
            alternatives.setdefault(self._text(self._tokenizer, token_id), finite_logprob(logprob))
        return alternatives
