"""Text completions, OpenAI's older dialect: what a chunk of a streamed reply is, and the fold that makes the whole
reply of the same chunks. So the two cannot disagree.
"""

from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Literal

import msgspec
from msgspec import UNSET, Struct, UnsetType

from app.server.dialects.openai.tokens import FINGERPRINT, PromptLogprobList, Usage
from app.server.usage import FinishText, ProgressReport, Timings


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
    prompt_logprobs: PromptLogprobList | UnsetType = UNSET  # of the choice's prompt; never in a stream
    prompt_token_ids: list[int] | UnsetType = UNSET  # with the choice's first part
    token_ids: list[int] | UnsetType = UNSET


class Completion(Struct, kw_only=True):
    """A chunk and a whole reply look the same."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    system_fingerprint: str = FINGERPRINT
    usage: Usage | UnsetType = UNSET  # in the last chunk, which has no choice; in all, if asked for
    timings: Timings | UnsetType = UNSET  # likewise
    prompt_progress: ProgressReport | UnsetType = UNSET  # of a chunk that has no choice


async def fold(chunks: AsyncGenerator[Completion]) -> Completion:
    """The whole reply. The last chunk must be the one about usage."""
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
