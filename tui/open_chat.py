"""The state of the open chat. A new chat has no id until its first message is sent."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from tui.branches import Branches
from tui.client import Chats
from tui.types import (
    DEFAULT_PRESET,
    NEW_CHAT,
    NO_PRESET,
    Chat,
    ChatId,
    ChatSettings,
    ChatSummary,
    Finish,
    Message,
    MessageId,
    Preset,
    Role,
)


def find_preset(presets: Sequence[Preset], name: str) -> ChatSettings | None:
    """Return the settings of a preset, or None if there is none of this name. Case matters only if names differ in
    nothing else.
    """
    settings = {NO_PRESET: ChatSettings()} | {one.name: one.settings for one in presets}
    if name not in settings:
        name = next((one for one in settings if one.casefold() == name.casefold()), name)
    return settings.get(name)


def name_preset(presets: Sequence[Preset], settings: ChatSettings) -> str:
    """Return the name of the first preset with these settings; "" if there is none."""
    return next((one.name for one in presets if one.settings == settings), "")


async def settings_of_new_chats(chats: Chats) -> ChatSettings:
    """Return the settings of the preset that the user made the default. Raises ClientError."""
    presets = await chats.presets()
    return next((one.settings for one in presets if one.name == DEFAULT_PRESET), ChatSettings())


@dataclass(slots=True)
class OpenChat:
    """The state of the open chat. Callers update the client first, then this state."""

    summary: ChatSummary | None = None  # None: the client has not created the chat yet
    settings: ChatSettings = field(default_factory=ChatSettings)
    private: bool = False
    branches: Branches = field(default_factory=Branches)
    leaf: MessageId | None = None
    # messages that are not sent to the model, with the summary that ends at each one, or ""
    left_out: Mapping[MessageId, str] = field(default_factory=dict)
    stored_count: int = 0  # number of stored messages, as last reported; other windows may have stored some

    @classmethod
    def of(cls, chat: Chat) -> "OpenChat":
        opened = cls(chat.summary, chat.settings, chat.summary.private, Branches(chat.messages), chat.leaf)
        opened.leave_out(chat)
        return opened

    def leave_out(self, chat: Chat) -> None:
        """Copy from `chat` which messages are left out."""
        summaries = {summary.message: summary.text for summary in chat.summaries}
        self.left_out = {message: summaries.get(message, "") for message in chat.left_out}

    @property
    def id(self) -> ChatId | None:
        return None if self.summary is None else self.summary.id

    @property
    def title(self) -> str:
        """The chat's title, with a prefix for a private or archived chat."""
        title = "" if self.summary is None else self.summary.title
        if self.private:
            return f"Private · {title}" if title else "Private chat"
        is_archived = self.summary is not None and self.summary.archived
        return f"Archived · {title or NEW_CHAT}" if is_archived else title or NEW_CHAT

    def rename(self, title: str) -> None:
        if self.summary is not None:
            self.summary = replace(self.summary, title=title)

    def archive(self, *, archived: bool) -> None:
        if self.summary is not None:
            self.summary = replace(self.summary, archived=archived)

    def put(self, message: Message) -> None:
        """Add a message at the end of the shown branch."""
        self.branches.put(message)
        self.leaf = message.id

    @property
    def is_behind(self) -> bool:
        """Whether another window has stored messages in this chat, or is generating a reply in it."""
        return self.stored_count > len(self.branches) or self.branches.has_replies_elsewhere

    def merge(self, messages: Iterable[Message]) -> Sequence[Message]:
        """Add the messages that another window has stored, and return them. The shown branch stays."""
        changed = [it for it in messages if it.id not in self.branches or self._is_written_on(it)]
        for message in changed:
            self.branches.put(message)
        return changed

    def _is_written_on(self, message: Message) -> bool:
        known = self.branches[message.id]
        is_open = known.finish in (Finish.ELSEWHERE, Finish.UNANSWERED) and known != message
        return is_open or (known.role is Role.USER and bool(known.error) and message.finish is not Finish.UNANSWERED)

    def set_failure(self, question: MessageId, why: str) -> Message:
        """Store the reason why the reply to a question did not start; "" clears it."""
        self.branches.put(replace(self.branches[question], error=why, finish=None))
        return self.branches[question]

    @property
    def answered(self) -> MessageId | None:
        """The end of the shown branch, without the reply that is being generated."""
        if self.leaf is None or self.leaf not in self.branches:
            return self.leaf
        end = self.branches[self.leaf]
        return end.parent if end.role is Role.ASSISTANT and end.finish is None else end.id

    def shows(self, message: MessageId) -> bool:
        """Whether the message is on the shown branch."""
        return any(one.id == message for one in self.path())

    def neighbor_branch(self, message: MessageId, step: int) -> tuple[MessageId, MessageId] | None:
        """Return the newest leaf after the sibling `step` positions from a shown message, and that sibling."""
        index = [one.id for one in self.path()].index(message)
        leaf = self.branches.neighbor_leaf(message, step)
        return None if leaf is None else (leaf, self.branches.path(leaf)[index].id)

    def path(self) -> list[Message]:
        return self.branches.path(self.leaf)

    def last_of(self, role: Role) -> Message | None:
        """Return the last message of that role in the shown branch."""
        return next((message for message in reversed(self.path()) if message.role is role), None)
