"""Chat completions, OpenAI's dialect: one generator of chunks, which is the streamed reply, and a fold that makes the
whole reply of the same chunks. So the two cannot disagree.
"""

from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Literal

from msgspec import UNSET, Struct, UnsetType

from app.chat.events import ChatEvent, PromptLogprobs, PromptProgress, ReplyEnd, TextDelta
from app.chat.service import ChatService
from app.server.choices import generate_choices
from app.server.errors import naming
from app.server.openai_requests import ChatCompletionRequest
from app.server.openai_tokens import FinishText, Identity, Usage, finish_text, finite, token_text, usage_of
from app.server.token_counts import TokenCounts
from app.text.tokenizer import Tokenizer
from engine.request import Origin, TokenLogprobs


class TokenAlternative(Struct):
    token: str
    logprob: float
    bytes: list[int]


class ReportedToken(Struct):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TokenAlternative]


class ChoiceLogprobs(Struct):
    content: list[ReportedToken]
    refusal: None = None


class Delta(Struct):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChunkChoice(Struct):
    index: int
    delta: Delta
    logprobs: ChoiceLogprobs | None = None
    finish_reason: FinishText | None = None


class ChatCompletionChunk(Struct, kw_only=True):
    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: Usage | UnsetType = UNSET  # in the last chunk, which has no choice


class AssistantMessage(Struct):
    content: str
    role: Literal["assistant"] = "assistant"
    refusal: None = None


class Choice(Struct):
    index: int
    message: AssistantMessage
    logprobs: ChoiceLogprobs | None
    finish_reason: FinishText | None


class ChatCompletion(Struct, kw_only=True):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[Choice]
    usage: Usage


async def chunks(
    service: ChatService, wanted: ChatCompletionRequest, origin: Origin
) -> AsyncGenerator[list[ChatCompletionChunk]]:
    """The reply, in batches as it comes; last, if wanted, a chunk that says what it used. Nothing comes before the
    engine has begun with it, so that what is refused or fails at once can be raised: InvalidRequest, InvalidSampling,
    EngineError, ReplyFailed, ReplyAborted."""
    counts = TokenCounts()
    writer = _ChunkWriter(service)
    asked = wanted.grammar()
    choices = wanted.choices(await asked.compiled(service.grammars) if asked else None)
    with naming("messages"):
        prompt = await service.encode(wanted.conversation())
        async with aclosing(generate_choices(service, [prompt], choices, origin, counts)) as batches:
            async for batch in batches:
                if written := [chunk for index, event in batch for chunk in writer.write(index, event)]:
                    yield written
    if wanted.reports_usage:
        yield [writer.usage(counts)]


async def fold(chunks: AsyncGenerator[ChatCompletionChunk]) -> ChatCompletion:
    """The whole reply. The last chunk must be the one about usage."""
    parts: dict[int, _Parts] = {}
    async for chunk in chunks:
        for choice in chunk.choices:
            parts.setdefault(choice.index, _Parts()).add(choice)
        if chunk.usage is not UNSET:
            choices = [parts[index].choice(index) for index in sorted(parts)]
            return ChatCompletion(
                id=chunk.id, created=chunk.created, model=chunk.model, choices=choices, usage=chunk.usage
            )
    raise EOFError("the chunks ended without their usage")


class _ChunkWriter:
    """Writes the chunks of one reply."""

    def __init__(self, service: ChatService) -> None:
        self._tokenizer = service.tokenizer
        self._identity = Identity.new("chatcmpl", service.name)
        self._begun: set[int] = set()

    def write(self, index: int, event: ChatEvent) -> Iterator[ChatCompletionChunk]:
        if index not in self._begun:
            self._begun.add(index)
            yield self._chunk(ChunkChoice(index, Delta("assistant", "")))
        match event:
            case TextDelta(text, logprobs):
                report = _report(self._tokenizer, logprobs) if logprobs else None
                yield self._chunk(ChunkChoice(index, Delta(content=text), report))
            case ReplyEnd(finish):
                yield self._chunk(ChunkChoice(index, Delta(), finish_reason=finish_text(finish)))
            case PromptProgress() | PromptLogprobs():
                pass

    def usage(self, counts: TokenCounts) -> ChatCompletionChunk:
        return self._chunk(usage=usage_of(counts))

    def _chunk(self, *choices: ChunkChoice, usage: Usage | UnsetType = UNSET) -> ChatCompletionChunk:
        identity = self._identity
        return ChatCompletionChunk(
            id=identity.id, created=identity.created, model=identity.model, choices=list(choices), usage=usage
        )


@dataclass(slots=True)
class _Parts:
    """The chunks of one choice."""

    texts: list[str] = field(default_factory=list)
    reported: list[ReportedToken] = field(default_factory=list)
    has_logprobs: bool = False
    finish: FinishText | None = None

    def add(self, choice: ChunkChoice) -> None:
        if choice.delta.content is not UNSET:
            self.texts.append(choice.delta.content)
        if choice.logprobs is not None:
            self.has_logprobs = True
            self.reported += choice.logprobs.content
        self.finish = choice.finish_reason or self.finish

    def choice(self, index: int) -> Choice:
        logprobs = ChoiceLogprobs(self.reported) if self.has_logprobs else None
        return Choice(index, AssistantMessage("".join(self.texts)), logprobs, self.finish)


def _report(tokenizer: Tokenizer, logprobs: Sequence[TokenLogprobs]) -> ChoiceLogprobs:
    return ChoiceLogprobs([_reported(tokenizer, token) for token in logprobs])


def _reported(tokenizer: Tokenizer, token: TokenLogprobs) -> ReportedToken:
    picked = _alternative(tokenizer, token.token_id, token.logprob)
    top = [_alternative(tokenizer, token_id, logprob) for token_id, logprob in token.top]
    return ReportedToken(picked.token, picked.logprob, picked.bytes, top)


def _alternative(tokenizer: Tokenizer, token_id: int, logprob: float) -> TokenAlternative:
    encoded = tokenizer.token_bytes(token_id, show_control=True)
    return TokenAlternative(token_text(tokenizer, token_id), finite(logprob), list(encoded))
