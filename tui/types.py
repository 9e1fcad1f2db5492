"""Data types of the client protocols about chats.

Durations are in seconds, points in time in seconds since the epoch, and sizes in bytes. The client creates all objects,
unless noted.
"""

import enum
from dataclasses import dataclass, fields, replace
from typing import NewType, Protocol, Self

from tui.plain_text import sanitize, single_line

ChatId = NewType("ChatId", str)
MessageId = NewType("MessageId", str)
CallId = NewType("CallId", str)


@dataclass(frozen=True, slots=True)
class Sanitized:
    """Base class of all data types of the client protocols. Sanitizes its strings when it is created."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, str):
                object.__setattr__(self, field.name, sanitize(value))


# --- replies ---------------------------------------------------------------------------------------------------------


class Finish(enum.Enum):
    """Why a reply ended."""

    COMPLETE = "complete"
    LENGTH = "length"  # it reached max_tokens
    CONTEXT_FULL = "context_full"  # it reached the end of the context
    STOPPED = "stopped"  # the user stopped it
    EDITED = "edited"  # the user's version of a reply
    FAILED = "failed"  # the engine raised an error
    CUT_OFF = "cut_off"  # the program ended during the reply; noticed when the chat is opened again
    ELSEWHERE = "elsewhere"  # another window is generating it
    UNANSWERED = "unanswered"  # a message of the user has no reply, and no window is generating one


class TokenSources(Protocol):
    """Numbers of a prompt's tokens by source, as the engine reports them."""

    @property
    def device(self) -> int: ...  # tokens found in device memory

    @property
    def host(self) -> int: ...  # tokens found in RAM

    @property
    def disk(self) -> int: ...  # tokens found in files

    @property
    def computed(self) -> int: ...

    @property
    def cached(self) -> int: ...  # sum of the three tiers


@dataclass(frozen=True, slots=True)
class Usage(Sanitized):
    """The cost of one reply, as the engine reports it.

    If the engine reports no details, only token counts are exact, and the times are measured by the client.
    """

    sources: TokenSources  # sources of the prompt's tokens
    reply_tokens: int
    queue_seconds: float  # seconds from the request to the start of prefill
    prompt_seconds: float  # seconds from the start of prefill to the first token
    reply_seconds: float  # seconds from the first token to the last token
    miss: str = ""  # reason for a cache miss, in one sentence; empty if there is none
    # False: the engine reports only token counts, and the client measures the time to the first token
    is_detailed: bool = True
    drafted_tokens: int = 0  # tokens of the reply that were drafted from earlier text
    accepted_tokens: int = 0  # drafted tokens that turned out right
    retry_temperature: float | None = None  # set if a retry with greedy decoding was sampled, so that it differs

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
    """The first event of a reply. From now on, the reply is a stored message of the chat."""

    message: MessageId
    model: str  # the model that generates it


@dataclass(frozen=True, slots=True)
class PromptProgress(Sanitized):
    """Progress of prefill in prompt tokens. May arrive often, or never."""

    done: int  # prefilled tokens, including cached ones
    total: int
    cached: int = 0


@dataclass(frozen=True, slots=True)
class ReasoningDelta(Sanitized):
    """More reasoning text."""

    text: str
    tokens: int = 1  # number of tokens since the last delta; 1 if the server does not report it


@dataclass(frozen=True, slots=True)
class TextDelta(Sanitized):
    """More text of the answer."""

    text: str
    tokens: int = 1  # number of tokens since the last delta; 1 if the server does not report it


@dataclass(frozen=True, slots=True)
class ReplyEnd(Sanitized):
    """The last event. A reply that fails halfway ends with FAILED and the error; its text is kept."""

    finish: Finish
    usage: Usage | None = None  # None: the engine did not report it
    error: str = ""  # for FAILED: what happened and what to do


@dataclass(frozen=True, slots=True)
class ToolCalled(Sanitized):
    """The model called a tool. If `asks`, the call waits for `Tools.answer`."""

    call: CallId
    name: str  # qualified with the server's name
    arguments: str  # JSON
    asks: bool = False


@dataclass(frozen=True, slots=True)
class ToolReturned(Sanitized):
    """A tool call has ended, and the model receives the result."""

    call: CallId
    result: str
    is_error: bool = False


@dataclass(frozen=True, slots=True)
class EngineRestarting(Sanitized):
    """The engine has stopped, and restarts before the reply starts."""


ReplyEvent = (
    EngineRestarting | ToolCalled | ToolReturned | ReplyStarted | PromptProgress | ReasoningDelta | TextDelta | ReplyEnd
)


# --- chats -----------------------------------------------------------------------------------------------------------


class Role(enum.Enum):
    """The author of a message."""

    USER = "user"
    ASSISTANT = "assistant"


AUTHORS = {Role.USER: "You", Role.ASSISTANT: "Reply"}  # how lists of messages name the author


@dataclass(frozen=True, slots=True)
class Attachment(Sanitized):
    """A text file that belongs to a message. The client writes it into the prompt before the message's text."""

    name: str  # name of the file without its folder; set by the screens
    text: str  # the whole file; set by the screens


@dataclass(frozen=True, slots=True)
class ToolStep(Sanitized):
    """A tool call in a reply, with the text and reasoning that the model wrote before it."""

    name: str
    arguments: str  # JSON
    result: str
    is_error: bool = False
    text: str = ""
    reasoning: str = ""


@dataclass(frozen=True, slots=True)
class Message(Sanitized):
    """One message of the tree. The screens replace a reply's message as its events arrive."""

    id: MessageId
    parent: MessageId | None  # None: first message of the chat; several such messages are branches
    role: Role
    text: str
    created: float
    attachments: tuple[Attachment, ...] = ()  # set only in a user's message
    reasoning: str = ""  # this field and the fields below are set only in a reply
    reasoning_seconds: float = 0.0
    steps: tuple[ToolStep, ...] = ()  # tool calls that precede the text
    model: str = ""
    finish: Finish | None = None  # None: it is still being generated; in a user's message: ELSEWHERE, UNANSWERED, None
    usage: Usage | None = None
    error: str = ""  # reason why the reply failed, or why no reply to this question started; further lines are details

    @property
    def full_text(self) -> str:
        """The text, preceded by the texts that a reply contains before its tool calls."""
        return "\n\n".join(filter(None, (*(step.text.strip() for step in self.steps), self.text)))


@dataclass(frozen=True, slots=True)
class Sampling(Sanitized):
    """Sampling parameters. None means the model's default."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_tokens: int | None = None  # this many tokens are also reserved in the context budget
    seed: int | None = None
    thinking: bool | None = None  # whether the model reasons before it answers, if it supports both


class FullContext(enum.Enum):
    """The action when a chat exceeds the context."""

    ASK = "ask"
    SUMMARIZE = "summarize"  # replace the oldest messages with a summary
    DROP_OLDEST = "drop_oldest"
    STOP = "stop"


@dataclass(frozen=True, slots=True)
class ChatSettings(Sanitized):
    """Settings of one chat. The user sets them; the client stores them."""

    system: str = ""
    sampling: Sampling = Sampling()
    full_context: FullContext = FullContext.ASK
    disabled_tools: frozenset[str] = frozenset()  # qualified names of tools


DEFAULT_PRESET = "default"
"""The name of the preset that new chats start with."""
NO_PRESET = "none"
"""The name that selects the settings of the model, unless the user has saved a preset with it."""


@dataclass(frozen=True, slots=True)
class Preset(Sanitized):
    """Named settings that can be applied to any chat."""

    name: str
    settings: ChatSettings


NEW_CHAT = "New chat"
"""The name of a chat without a title."""


@dataclass(frozen=True, slots=True)
class ChatSummary(Sanitized):
    """A chat in a list."""

    id: ChatId
    # set by the user, or written by the model after the first reply; before that, the first words of the chat or draft
    title: str
    updated: float
    message_count: int  # 0: the chat has only a draft
    pinned: bool = False
    archived: bool = False
    private: bool = False  # never written to disk, and lost when the program ends
    replying_elsewhere: bool = False  # whether another window is generating a reply in it

    @property
    def name(self) -> str:
        """The title on one line, as lists show it."""
        return single_line(self.title) or NEW_CHAT


@dataclass(frozen=True, slots=True)
class Summary(Sanitized):
    """A summary that is sent to the model instead of the messages that are left out."""

    message: MessageId  # last of the summarized messages
    text: str


@dataclass(frozen=True, slots=True)
class Chat(Sanitized):
    """An open chat with all its branches."""

    summary: ChatSummary
    settings: ChatSettings
    messages: tuple[Message, ...]  # each after its parent; siblings in order of creation
    leaf: MessageId | None  # the last message of the shown branch; None in an empty chat
    draft: str = ""  # text that the user typed but did not send
    left_out: frozenset[MessageId] = frozenset()  # messages that are shown, but not sent to the model
    summaries: tuple[Summary, ...] = ()  # in each branch, the last one is sent instead of what it summarizes


@dataclass(frozen=True, slots=True)
class SearchHit(Sanitized):
    """A search result: the match and the text around it."""

    chat: ChatSummary
    message: MessageId
    role: Role | None  # author of the message; None if the match is in the title
    before: str  # a few words before the match
    match: str
    after: str


@dataclass(frozen=True, slots=True)
class Notice(Sanitized):
    """An event of the store that the user should know about."""

    message: str
    remedy: str = ""
    is_saved: bool = True  # whether chats are saved from now on


class ExportFormat(enum.Enum):
    MARKDOWN = "markdown"  # the shown branch
    JSON = "json"  # all branches; can be imported


# --- tools -----------------------------------------------------------------------------------------------------------


class Permission(enum.Enum):
    """The user's answer to a tool call."""

    ONCE = "once"
    CHAT = "chat"  # allows this tool in this chat until the program ends
    ALWAYS = "always"  # allows this tool in all chats
    DENY = "deny"


@dataclass(frozen=True, slots=True)
class ToolInfo(Sanitized):
    name: str  # qualified with the server's name
    description: str
    is_always_allowed: bool = False


@dataclass(frozen=True, slots=True)
class ToolServer(Sanitized):
    """A tool server from mcp.json."""

    name: str
    state: str  # disabled, starting, ready, or failed
    reason: str = ""  # reason why it failed
    tools: tuple[ToolInfo, ...] = ()
    left_out: int = 0  # number of tools that are too many or too large to be offered


# --- the context -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ContextBudget(Sanitized):
    """How full a context is, in tokens. Tokens that the chat template adds are included."""

    limit: int | None  # None: unknown
    system: int
    history: int  # tokens of the branch's messages that are sent, and of the typed text
    reserve: int  # tokens reserved for the reply

    @property
    def used(self) -> int:
        """Number of tokens of the whole prompt."""
        return self.system + self.history

    @property
    def unused(self) -> int | None:
        """Number of tokens after the prompt, those for the reply included; None if the limit is unknown."""
        return None if self.limit is None else self.limit - self.used

    def grown(self, tokens: int) -> Self:
        """Return the budget after `tokens` tokens of a reply, for which room was reserved."""
        return replace(self, history=self.history + tokens, reserve=max(0, self.reserve - tokens))

    @property
    def free(self) -> int | None:
        """Number of free tokens beside the reserve; negative if over the limit, None if the limit is unknown."""
        return None if self.limit is None else self.limit - self.used - self.reserve

    @property
    def lacking(self) -> int:
        """Number of tokens over the limit; 0 if the limit is unknown."""
        return max(0, -(self.free or 0))


@dataclass(frozen=True, slots=True)
class TrimPlan(Sanitized):
    """The messages to leave out. Creating a plan changes nothing."""

    how: FullContext  # SUMMARIZE or DROP_OLDEST
    messages: tuple[MessageId, ...]  # oldest first
    tokens: int  # number of tokens freed, minus the length of a summary

    def suffices(self, budget: ContextBudget) -> bool:
        """Whether this plan frees enough tokens for the budget."""
        return self.tokens >= budget.lacking
