"""Chats, messages, and drafts as the history stores them, and the errors of the history as a whole."""

import enum
from typing import TypeVar

import msgspec
from msgspec import Struct, field

from app.errors import AppError
from engine.request import TokenSources


class HistoryTooNew(AppError):
    """A newer version of the program wrote the history."""


class HistoryUnavailable(AppError):
    """The history's files cannot be opened or written."""


class HistoryDamaged(AppError):
    """The history's file is damaged."""


class HistoryInUse(HistoryDamaged):
    """The history's file is damaged, and cannot be replaced while other processes have it open."""


class NoSuchChat(AppError):
    """No chat has that number."""

    def __init__(self) -> None:
        super().__init__("this chat does not exist", "It may have been deleted in another window.")


PartT = TypeVar("PartT", bound=Struct)


class Role(enum.StrEnum):
    USER = "user"
    ASSISTANT = "assistant"


class State(enum.StrEnum):
    """The state of a message."""

    COMING = "coming"  # a reply that is being generated, or whose process was killed
    WHOLE = "whole"
    CUT = "cut"  # the token limit ended it
    STOPPED = "stopped"  # the user stopped it
    EDITED = "edited"  # the user's version of a reply
    FAILED = "failed"  # an error ended it


class WhenFull(enum.StrEnum):
    """The action when a chat exceeds the context."""

    ASK = "ask"
    SUMMARIZE = "summarize"
    DROP_OLDEST = "drop_oldest"
    STOP = "stop"


class SamplingChoice(Struct, frozen=True, omit_defaults=True):
    """Sampling parameters that the user chose. None: the model's default."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_tokens: int | None = None
    seed: int | None = None
    thinking: bool | None = None


class ChatSettings(Struct, frozen=True, omit_defaults=True):
    """Settings of one chat or of a preset."""

    system: str = ""
    sampling: SamplingChoice = SamplingChoice()
    when_full: WhenFull = WhenFull.ASK
    disabled_tools: tuple[str, ...] = ()  # qualified names of tools


class Trim(Struct, frozen=True, omit_defaults=True):
    """Messages that are not sent to the model, and the summaries that replace them."""

    left_out: tuple[int, ...] = ()  # ids of messages
    # the older format: one summary, for all branches, of all messages that were left out at that time
    summary: str = ""
    summaries: dict[int, str] = {}  # keyed by the last message that each replaces

    @property
    def by_message(self) -> dict[int, str]:
        """The summaries, keyed by the last message that each replaces. Includes a summary in the older format."""
        old = {self.left_out[-1]: self.summary} if self.summary and self.left_out else {}
        return {**old, **self.summaries}

    def first(self, count: int) -> "Trim":
        """Return the state when `count` messages were left out."""
        before = self.left_out[:count]
        return Trim(before, summaries={message: text for message, text in self.by_message.items() if message in before})


class Attachment(Struct, frozen=True):
    """A text file that was sent with a message."""

    name: str
    text: str


class ToolStep(Struct, frozen=True, omit_defaults=True):
    """A tool call in a reply, and the text that the model wrote before it."""

    name: str
    arguments: str  # JSON
    result: str
    is_error: bool = False
    text: str = ""
    reasoning: str = ""
    joins_previous: bool = False  # called in the same turn of the model as the previous step


class Attachments(Struct, frozen=True, omit_defaults=True):
    """The column `attachments`: the files of a question, or the tool calls of a reply."""

    files: tuple[Attachment, ...] = ()
    steps: tuple[ToolStep, ...] = ()


class StoredUsage(Struct, frozen=True, omit_defaults=True):
    """The tokens and seconds that a reply took, as far as the server reported them."""

    # the next four fields count prompt tokens by source: GPU memory or the CPU engine's memory, RAM, disk, or computed
    device_tokens: int = 0
    host_tokens: int = field(default=0, name="ram_tokens")
    disk_tokens: int = 0
    computed_tokens: int = 0
    reply_tokens: int = 0
    queue_seconds: float = 0.0
    prompt_seconds: float = 0.0
    reply_seconds: float = 0.0
    miss: str = ""  # why cached tokens of the prompt were not reused, in a sentence
    error: str = ""  # why the reply failed
    is_detailed: bool = True  # False: the server did not report cache sources and queue time
    drafted_tokens: int = 0  # tokens of the reply that were drafted from earlier text
    accepted_tokens: int = 0  # drafted tokens that turned out right
    retry_temperature: float | None = None  # set if a retry with greedy decoding was sampled, so that it differs
    is_context_full: bool = False  # whether the reply was cut because the context was full, not at max_tokens
    num_left_out: int = 0  # number of messages of the chat that were left out of the prompt

    @property
    def total_tokens(self) -> int:
        """Number of tokens of the prompt and the reply."""
        return self.device_tokens + self.host_tokens + self.disk_tokens + self.computed_tokens + self.reply_tokens

    @property
    def sources(self) -> TokenSources:
        return TokenSources(self.device_tokens, self.host_tokens, self.disk_tokens, self.computed_tokens)


class Chat(Struct, frozen=True, kw_only=True):
    """A chat without its messages. Times are in seconds since the epoch."""

    id: int
    title: str = ""
    is_title_given: bool = False  # whether the user set the title
    settings: ChatSettings = ChatSettings()
    trim: Trim = Trim()
    is_pinned: bool = False
    is_archived: bool = False
    created: float = 0.0
    changed: float = 0.0
    shown: int | None = None  # id of the last message of the shown branch
    num_messages: int = 0
    beginning: str = ""  # first words of its first message


class StoredMessage(Struct, frozen=True, kw_only=True):
    """One message of a chat."""

    id: int
    chat: int
    parent: int | None  # id of the previous message
    role: Role
    text: str
    attachments: tuple[Attachment, ...] = ()
    reasoning: str = ""
    reasoning_seconds: float = 0.0
    steps: tuple[ToolStep, ...] = ()  # calls before the text of a reply
    model: str = ""  # name of the model that wrote the message
    state: State = State.WHOLE
    usage: StoredUsage | None = None
    created: float = 0.0


class Preset(Struct, frozen=True):
    """Named settings, for any chat."""

    name: str
    settings: ChatSettings = ChatSettings()


class Hit(Struct, frozen=True):
    """A search match, with the text around it."""

    chat: Chat
    message: int
    role: Role | None  # author of the message; None if the match is in the title
    before: str
    match: str
    after: str


def written(part: Struct | None) -> str:
    """Return a structured value as stored JSON; "" for None."""
    return "" if part is None else msgspec.json.encode(part).decode()


def read(content: str, kind: type[PartT]) -> PartT:
    """Decode a stored value. If it is damaged, return a record with default values."""
    try:
        return msgspec.json.decode(content, type=kind)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return kind()


def storable(text: str) -> str:
    """Replace lone surrogates and NUL with U+FFFD, so that SQLite and all readers accept the text."""
    return text.replace("\0", "\ufffd").encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def path_to(messages: dict[int, StoredMessage], leaf: int | None) -> list[StoredMessage]:
    """Return the branch that ends in `leaf`, oldest message first. In a damaged tree, stops at a missing or repeated
    message.
    """
    branch: list[StoredMessage] = []
    seen: set[int] = set()
    while leaf is not None and leaf in messages and leaf not in seen:
        seen.add(leaf)
        branch.append(messages[leaf])
        leaf = messages[leaf].parent
    return branch[::-1]
