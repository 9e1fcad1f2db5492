"""The nouns of chats: what the chat and the rest of the program tell each other, as plain data.

Times are seconds, moments are seconds since the epoch, sizes are bytes. Knows no protocol, no storage and no widget.
"""

import enum
from dataclasses import dataclass, fields
from typing import NewType, Protocol

from tui.plain_text import sanitize

ChatId = NewType("ChatId", str)
MessageId = NewType("MessageId", str)


@dataclass(frozen=True, slots=True)
class Sanitized:
    """What crosses the port: its texts are made harmless as it is built."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, str):
                object.__setattr__(self, field.name, sanitize(value))


# --- replies ---------------------------------------------------------------------------------------------------------


class Finish(enum.Enum):
    """Why a reply ended."""

    COMPLETE = "complete"
    LENGTH = "length"  # the limit of tokens was reached
    STOPPED = "stopped"  # somebody stopped it
    FAILED = "failed"  # the engine could not go on
    CUT_OFF = "cut_off"  # the program ended in the middle; found when the chat is opened again


class TokenSources(Protocol):
    """Where the tokens of a prompt came from. The engine's own report, which the client hands on."""

    @property
    def device(self) -> int: ...  # found where the engine computes

    @property
    def host(self) -> int: ...  # found in RAM

    @property
    def disk(self) -> int: ...  # found in files

    @property
    def computed(self) -> int: ...

    @property
    def cached(self) -> int: ...  # those of the three tiers together


@dataclass(frozen=True, slots=True)
class Usage(Sanitized):
    """What one reply cost. Filled by the client from the engine's own report; where that has no details, with what
    was told of them or measured here."""

    sources: TokenSources  # of the prompt
    reply_tokens: int
    queue_seconds: float  # from the question to the begin of the work
    prompt_seconds: float  # from there to the first token
    reply_seconds: float  # from there to the last one
    miss: str = ""  # one sentence why more than the new end was computed; empty where nothing was missed
    is_detailed: bool = (
        True  # False: the tokens of the prompt are told, at most, and when the first one came is measured
    )

    @property
    def prompt_tokens(self) -> int:
        return self.sources.cached + self.sources.computed

    @property
    def first_token_seconds(self) -> float:
        return self.queue_seconds + self.prompt_seconds

    @property
    def tokens_per_second(self) -> float:
        return (self.reply_tokens - 1) / self.reply_seconds if self.reply_seconds > 0 else 0.0


@dataclass(frozen=True, slots=True)
class ReplyStarted(Sanitized):
    """The first event: the reply is a message of the chat from now on, and is kept as it grows."""

    message: MessageId
    model: str  # that writes it


@dataclass(frozen=True, slots=True)
class PromptProgress(Sanitized):
    """How much of the prompt is read, in tokens. May come often, or never."""

    done: int  # those that were cached included
    total: int
    cached: int = 0


@dataclass(frozen=True, slots=True)
class ReasoningDelta(Sanitized):
    """More of what the model thinks before it answers."""

    text: str


@dataclass(frozen=True, slots=True)
class TextDelta(Sanitized):
    """More of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class ReplyEnd(Sanitized):
    """The last event. A reply that fails in the middle ends with FAILED and the error, and keeps its text."""

    finish: Finish
    usage: Usage | None = None  # None where the engine could not say
    error: str = ""  # for FAILED: what happened and what can be done


ReplyEvent = ReplyStarted | PromptProgress | ReasoningDelta | TextDelta | ReplyEnd


# --- chats -----------------------------------------------------------------------------------------------------------


class Role(enum.Enum):
    """Who wrote a message."""

    USER = "user"
    ASSISTANT = "assistant"


@dataclass(frozen=True, slots=True)
class Attachment(Sanitized):
    """A text file beside a message. The client writes it into the prompt, in front of the message's text."""

    name: str  # filled by the chat: the file's name without its folder
    text: str  # filled by the chat: the whole file


@dataclass(frozen=True, slots=True)
class Message(Sanitized):
    """One message of a tree. Filled by the client; a reply is told anew as its events come."""

    id: MessageId
    parent: MessageId | None  # None: the first of its chat; several of them are branches, too
    role: Role
    text: str
    created: float
    attachments: tuple[Attachment, ...] = ()  # of a user's message
    reasoning: str = ""  # of a reply, as the next ones
    reasoning_seconds: float = 0.0
    model: str = ""
    finish: Finish | None = None  # None: it is still being written
    usage: Usage | None = None
    error: str = ""  # of one that failed, and of a question to which no reply began: what happened


@dataclass(frozen=True, slots=True)
class Sampling(Sanitized):
    """How the next token is chosen. None: what suits the model."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    max_tokens: int | None = None  # also the reserve of the context budget
    seed: int | None = None
    thinking: bool | None = None  # whether the model thinks before it answers, if it can do both


class FullContext(enum.Enum):
    """What happens when a chat is longer than the context."""

    ASK = "ask"
    SUMMARIZE = "summarize"  # a summary takes the place of the oldest messages
    DROP_OLDEST = "drop_oldest"
    STOP = "stop"


@dataclass(frozen=True, slots=True)
class ChatSettings(Sanitized):
    """Of one chat. Filled by the person; the client keeps it."""

    system: str = ""
    sampling: Sampling = Sampling()
    full_context: FullContext = FullContext.ASK


@dataclass(frozen=True, slots=True)
class Preset(Sanitized):
    """Settings with a name, for any chat."""

    name: str
    settings: ChatSettings


@dataclass(frozen=True, slots=True)
class ChatSummary(Sanitized):
    """A chat in a list. Filled by the client."""

    id: ChatId
    title: str  # the person's, or the client's own after the first reply; before that the first words, also of a draft
    updated: float
    message_count: int  # 0: it is a draft
    pinned: bool = False
    archived: bool = False
    private: bool = False  # never on a disk, and gone when the program ends


@dataclass(frozen=True, slots=True)
class Summary(Sanitized):
    """What the model is told in place of messages that are left out. Filled by the client."""

    message: MessageId  # the last of them
    text: str


@dataclass(frozen=True, slots=True)
class Chat(Sanitized):
    """A chat that is open: all branches of it. Filled by the client."""

    summary: ChatSummary
    settings: ChatSettings
    messages: tuple[Message, ...]  # each behind its parent; those of one parent in the order in which they came
    leaf: MessageId | None  # the last message of the branch that is shown; None in an empty chat
    draft: str = ""  # what was typed and not sent
    left_out: frozenset[MessageId] = frozenset()  # not sent to the model any more; they are still shown
    summaries: tuple[Summary, ...] = ()  # of each branch the last one is sent in their place


@dataclass(frozen=True, slots=True)
class SearchHit(Sanitized):
    """A place where a text was found. Filled by the client."""

    chat: ChatSummary
    message: MessageId
    before: str  # a few words in front of it
    match: str
    after: str


@dataclass(frozen=True, slots=True)
class Notice(Sanitized):
    """Something that happened to the store of chats. Filled by the client."""

    message: str
    remedy: str = ""
    is_saved: bool = True  # whether chats are saved from now on


class ExportFormat(enum.Enum):
    MARKDOWN = "markdown"  # the branch that is shown
    JSON = "json"  # all branches; can be imported


# --- the context -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ContextBudget(Sanitized):
    """How full a context is, in tokens. Filled by the client; with what the chat template adds."""

    limit: int | None  # None: nobody tells it
    system: int
    history: int  # the messages of a branch that are sent, and what was typed
    reserve: int  # kept free for the reply

    @property
    def used(self) -> int:
        """The whole prompt."""
        return self.system + self.history

    @property
    def free(self) -> int | None:
        """Negative: so much too long. None: nobody knows."""
        return None if self.limit is None else self.limit - self.used - self.reserve

    @property
    def lacking(self) -> int:
        """So much too long, as far as anybody knows."""
        return max(0, -(self.free or 0))


@dataclass(frozen=True, slots=True)
class TrimPlan(Sanitized):
    """What would be left out. Filled by the client; nothing has happened yet."""

    how: FullContext  # SUMMARIZE or DROP_OLDEST
    messages: tuple[MessageId, ...]  # the oldest first
    tokens: int  # that this frees; less the length of a summary

    def suffices(self, budget: ContextBudget) -> bool:
        """Whether a context that is too full has enough room then."""
        return self.tokens >= budget.lacking
