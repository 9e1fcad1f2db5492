"""The chat that is open, as the screen knows it. It may not exist yet: then it is made with its first message."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from tui.branches import Branches
from tui.types import Chat, ChatId, ChatSettings, ChatSummary, Message, MessageId, Role


@dataclass(slots=True)
class OpenChat:
    """State, and nothing else. Whoever changes it tells the client first."""

    summary: ChatSummary | None = None  # None: it does not exist yet
    settings: ChatSettings = field(default_factory=ChatSettings)
    private: bool = False
    branches: Branches = field(default_factory=Branches)
    leaf: MessageId | None = None
    left_out: Mapping[MessageId, str] = field(default_factory=dict)  # and the summary that ends there, if one does

    @classmethod
    def of(cls, chat: Chat) -> "OpenChat":
        opened = cls(chat.summary, chat.settings, chat.summary.private, Branches(chat.messages), chat.leaf)
        opened.leave_out(chat)
        return opened

    def leave_out(self, chat: Chat) -> None:
        """What the chat leaves out, as it is now."""
        summaries = {summary.message: summary.text for summary in chat.summaries}
        self.left_out = {message: summaries.get(message, "") for message in chat.left_out}

    @property
    def id(self) -> ChatId | None:
        return None if self.summary is None else self.summary.id

    @property
    def title(self) -> str:
        """That of the chat, behind a word that a private one never loses."""
        title = "" if self.summary is None else self.summary.title
        if self.private:
            return f"Private · {title}" if title else "Private chat"
        return title or "New chat"

    def rename(self, title: str) -> None:
        if self.summary is not None:
            self.summary = replace(self.summary, title=title)

    def put(self, message: Message) -> None:
        """A new message at the end of the branch that is shown."""
        self.branches.put(message)
        self.leaf = message.id

    def set_failure(self, question: MessageId, why: str) -> Message:
        """Why no reply to it began; empty where that is not so."""
        self.branches.put(replace(self.branches[question], error=why))
        return self.branches[question]

    def path(self) -> list[Message]:
        return self.branches.path(self.leaf)

    def last_of(self, role: Role) -> Message | None:
        """The last message of the branch that this side wrote."""
        return next((message for message in reversed(self.path()) if message.role is role), None)
