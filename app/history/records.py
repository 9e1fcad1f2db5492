"""Chats, messages, and drafts as the history stores them, and the errors of the history as a whole."""

import enum
from typing import TypeVar

import msgspec
from msgspec import Struct, field

from app.errors import AppError
from engine.request import TokenSources


class HistoryTooNew(AppError):
    """A newer version of the program has written it."""


class HistoryUnavailable(AppError):
    """Its files cannot be opened or written."""


class HistoryDamaged(AppError):
    """Its file is damaged."""


class HistoryInUse(HistoryDamaged):
    """Its file is damaged and cannot be replaced while other processes have it open."""


class NoSuchChat(AppError):
    """There is no chat with that number."""


PartT = TypeVar("PartT", bound=Struct)


class Role(enum.StrEnum):
    USER = "user"
    ASSISTANT = "assistant"


class State(enum.StrEnum):
    """How complete a message is."""

    COMING = "coming"  # a reply that is being written, or whose writer was killed
    WHOLE = "whole"
    CUT = "cut"  # a limit of tokens ended it
    STOPPED = "stopped"  # the user did
    FAILED = "failed"  # an error did


class WhenFull(enum.StrEnum):
    """What happens when a chat is longer than the context."""

    ASK = "ask"
    SUMMARIZE = "summarize"
    DROP_OLDEST = "drop_oldest"
    STOP = "stop"


class SamplingChoice(Struct, frozen=True, omit_defaults=True):
    """How replies are sampled, as far as somebody chose; what is None is left to the model's own defaults."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    max_tokens: int | None = None
    seed: int | None = None
    thinking: bool | None = None


class ChatSettings(Struct, frozen=True, omit_defaults=True):
    """Of one chat, or under the name of a preset."""

    system: str = ""
    sampling: SamplingChoice = SamplingChoice()
    when_full: WhenFull = WhenFull.ASK


class Trim(Struct, frozen=True, omit_defaults=True):
    """What of a chat the model is not told any more, and what it is told in its place."""

    left_out: tuple[int, ...] = ()  # messages
    summary: str = ""  # as chats had one that belonged to no branch: of all that was left out then
    summaries: dict[int, str] = {}  # by the last of the messages that each stands for

    @property
    def by_message(self) -> dict[int, str]:
        """The summaries, by the last of the messages that each stands for."""
        old = {self.left_out[-1]: self.summary} if self.summary and self.left_out else {}
        return {**old, **self.summaries}


class Attachment(Struct, frozen=True):
    """A text file that was sent with a message."""

    name: str
    text: str


class Attachments(Struct, frozen=True, omit_defaults=True):
    files: tuple[Attachment, ...] = ()


class StoredUsage(Struct, frozen=True, omit_defaults=True):
    """What a reply cost, as far as whoever generated it said so. Tokens and seconds."""

    device_tokens: int = 0  # of the prompt, by where they were found
    host_tokens: int = field(default=0, name="ram_tokens")
    disk_tokens: int = 0
    computed_tokens: int = 0
    reply_tokens: int = 0
    queue_seconds: float = 0.0
    prompt_seconds: float = 0.0
    reply_seconds: float = 0.0
    miss: str = ""  # why more than the new end of the prompt was computed, in a sentence
    error: str = ""  # of a reply that failed
    is_detailed: bool = True  # False: nobody told where the prompt's tokens came from, or how long it waited

    @property
    def sources(self) -> TokenSources:
        return TokenSources(self.device_tokens, self.host_tokens, self.disk_tokens, self.computed_tokens)


class Chat(Struct, frozen=True, kw_only=True):
    """A conversation without its messages. Times are seconds since the epoch."""

    id: int
    title: str = ""
    is_title_given: bool = False  # by the user
    settings: ChatSettings = ChatSettings()
    trim: Trim = Trim()
    is_pinned: bool = False
    is_archived: bool = False
    created: float = 0.0
    changed: float = 0.0
    shown: int | None = None  # the last message of the branch that was shown last
    num_messages: int = 0
    beginning: str = ""  # the first words of its first message


class StoredMessage(Struct, frozen=True, kw_only=True):
    """One message of a chat."""

    id: int
    chat: int
    parent: int | None  # the message before it
    role: Role
    text: str
    attachments: tuple[Attachment, ...] = ()
    reasoning: str = ""
    reasoning_seconds: float = 0.0
    model: str = ""  # that wrote it
    state: State = State.WHOLE
    usage: StoredUsage | None = None
    created: float = 0.0


class Preset(Struct, frozen=True):
    """Settings under a name, for any chat."""

    name: str
    settings: ChatSettings = ChatSettings()


class Hit(Struct, frozen=True):
    """A place where something was found."""

    chat: Chat
    message: int
    before: str
    match: str
    after: str


def written(part: Struct | None) -> str:
    """A structured part as it is stored; nothing for None."""
    return "" if part is None else msgspec.json.encode(part).decode()


def read(content: str, kind: type[PartT]) -> PartT:
    """The part that was stored; where it is damaged, one that says nothing."""
    try:
        return msgspec.json.decode(content, type=kind)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return kind()


def storable(text: str) -> str:
    """Text that SQLite and every reader of it takes: a lone surrogate and NUL become U+FFFD."""
    return text.replace("\0", "\ufffd").encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def path_to(messages: dict[int, StoredMessage], leaf: int | None) -> list[StoredMessage]:
    """The branch that ends in `leaf`, its first message first. A damaged tree gives what of it makes sense."""
    branch: list[StoredMessage] = []
    seen: set[int] = set()
    while leaf is not None and leaf in messages and leaf not in seen:
        seen.add(leaf)
        branch.append(messages[leaf])
        leaf = messages[leaf].parent
    return branch[::-1]
