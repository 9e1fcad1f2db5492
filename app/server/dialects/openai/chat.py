"""Chat completions, OpenAI's dialect: what a chunk of a streamed reply is, and the fold that makes the whole reply of
the same chunks. So the two cannot disagree.
"""

from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from msgspec import UNSET, Struct, UnsetType

from app.server.dialects.openai.tokens import FINGERPRINT, PromptLogprobList, Usage
from app.server.usage import FinishText, ProgressReport, ReportedToken, Timings

ChatFinishText: TypeAlias = FinishText | Literal["tool_calls"]


class ChoiceLogprobs(Struct):
    content: list[ReportedToken]
    refusal: None = None


class FunctionDelta(Struct):
    arguments: str
    name: str | UnsetType = UNSET  # with the first delta of a call, as are its id and type


class CallDelta(Struct):
    index: int
    function: FunctionDelta
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET


class Delta(Struct):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET  # the same by its other name
    tool_calls: list[CallDelta] | UnsetType = UNSET


class ChunkChoice(Struct):
    index: int
    delta: Delta
    logprobs: ChoiceLogprobs | None = None
    finish_reason: ChatFinishText | None = None
    token_ids: list[int] | UnsetType = UNSET  # of the tokens since the last chunk of the choice


class ChatCompletionChunk(Struct, kw_only=True):
    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChunkChoice]
    system_fingerprint: str = FINGERPRINT
    usage: Usage | UnsetType = UNSET  # in the last chunk, which has no choice; in all, if asked for
    timings: Timings | UnsetType = UNSET  # likewise
    prompt_progress: ProgressReport | UnsetType = UNSET  # of a chunk that has no choice
    prompt_token_ids: list[int] | UnsetType = UNSET  # with the first choice
    prompt_logprobs: PromptLogprobList | UnsetType = UNSET  # in the last chunk


class CalledFunction(Struct):
    name: str
    arguments: str


class Call(Struct):
    id: str
    function: CalledFunction
    type: Literal["function"] = "function"


class AssistantMessage(Struct):
    content: str | None  # none where it only calls tools
    role: Literal["assistant"] = "assistant"
    refusal: None = None
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[Call] | UnsetType = UNSET


class Choice(Struct):
    index: int
    message: AssistantMessage
    logprobs: ChoiceLogprobs | None
    finish_reason: ChatFinishText | None
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(Struct, kw_only=True):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[Choice]
    usage: Usage
    timings: Timings | UnsetType
    system_fingerprint: str = FINGERPRINT
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobList | UnsetType = UNSET


async def fold(chunks: AsyncGenerator[ChatCompletionChunk]) -> ChatCompletion:
    """The whole reply. The last chunk must be the one about usage."""
    parts: dict[int, _Parts] = {}
    prompt_ids: list[int] | UnsetType = UNSET
    async for chunk in chunks:
        prompt_ids = prompt_ids or chunk.prompt_token_ids
        for choice in chunk.choices:
            parts.setdefault(choice.index, _Parts()).add(choice)
        if chunk.usage is not UNSET and not chunk.choices:
            choices = [parts[index].choice(index) for index in sorted(parts)]
            return ChatCompletion(
                id=chunk.id,
                created=chunk.created,
                model=chunk.model,
                choices=choices,
                usage=chunk.usage,
                timings=chunk.timings,
                prompt_token_ids=prompt_ids,
                prompt_logprobs=chunk.prompt_logprobs,
            )
    raise EOFError("the chunks ended without their usage")


@dataclass(slots=True)
class _Parts:
    """The chunks of one choice."""

    texts: list[str] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    calls: list[tuple[str, str, list[str]]] = field(default_factory=list)  # id, name, and pieces of the arguments
    reported: list[ReportedToken] = field(default_factory=list)
    has_logprobs: bool = False
    token_ids: list[int] | UnsetType = UNSET
    finish: ChatFinishText | None = None

    def add(self, choice: ChunkChoice) -> None:
        delta = choice.delta
        if delta.content is not UNSET:
            self.texts.append(delta.content)
        if delta.reasoning is not UNSET:
            self.thoughts.append(delta.reasoning)
        for call in delta.tool_calls or ():
            self._add_call(call)
        if choice.logprobs is not None:
            self.has_logprobs = True
            self.reported += choice.logprobs.content
        if choice.token_ids is not UNSET:
            self.token_ids = self.token_ids or []
            self.token_ids += choice.token_ids
        self.finish = choice.finish_reason or self.finish

    def _add_call(self, delta: CallDelta) -> None:
        if delta.id is not UNSET and delta.function.name is not UNSET:
            self.calls.append((delta.id, delta.function.name, []))
        self.calls[delta.index][2].append(delta.function.arguments)

    def choice(self, index: int) -> Choice:
        logprobs = ChoiceLogprobs(self.reported) if self.has_logprobs else None
        text, thought = "".join(self.texts), "".join(self.thoughts) or UNSET
        content = None if self.calls and not text else text
        calls = [Call(call_id, CalledFunction(name, "".join(pieces))) for call_id, name, pieces in self.calls]
        message = AssistantMessage(content, reasoning=thought, reasoning_content=thought, tool_calls=calls or UNSET)
        return Choice(index, message, logprobs, self.finish, self.token_ids)
