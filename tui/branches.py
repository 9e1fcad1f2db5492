"""The messages of a chat as a tree of branches."""

from collections import defaultdict
from collections.abc import Iterable, Iterator

from tui.types import Finish, Message, MessageId


class Branches:
    """All messages of one chat, and the children of each message."""

    def __init__(self, messages: Iterable[Message] = ()) -> None:
        self._messages: dict[MessageId, Message] = {}
        self._children: defaultdict[MessageId | None, list[MessageId]] = defaultdict(list)
        self._elsewhere: set[MessageId] = set()  # replies that another window is generating
        for message in messages:
            self.put(message)

    def put(self, message: Message) -> None:
        """Add a message after its parent, or replace the message of the same id."""
        if message.id not in self._messages:
            self._children[message.parent].append(message.id)
        self._messages[message.id] = message
        if message.finish is Finish.ELSEWHERE:
            self._elsewhere.add(message.id)
        else:
            self._elsewhere.discard(message.id)

    @property
    def has_replies_elsewhere(self) -> bool:
        """Whether another window is generating one of the replies."""
        return bool(self._elsewhere)

    def __getitem__(self, message: MessageId) -> Message:
        return self._messages[message]

    def __contains__(self, message: MessageId) -> bool:
        return message in self._messages

    def __iter__(self) -> Iterator[Message]:
        return iter(self._messages.values())

    def __len__(self) -> int:
        return len(self._messages)

    def path(self, leaf: MessageId | None) -> list[Message]:
        """Return the messages from the first one to `leaf`. A missing message ends the path."""
        path = []
        while leaf is not None and (message := self._messages.get(leaf)) is not None:
            path.append(message)
            leaf = message.parent
        return path[::-1]

    def children(self, message: MessageId | None) -> tuple[MessageId, ...]:
        """Return the messages that follow `message`; for None, the first messages of the chat."""
        return tuple(self._children.get(message, ()))

    def siblings(self, message: MessageId) -> tuple[MessageId, ...]:
        """Return the message and its alternatives (the children of the same parent), oldest first."""
        return self.children(self._messages[message].parent)

    def newest_leaf(self, message: MessageId) -> MessageId:
        """Return the last message of the branch that continues from `message` with the newest child of each message."""
        while children := self._children.get(message):
            message = children[-1]
        return message

    def neighbor_leaf(self, message: MessageId, step: int) -> MessageId | None:
        """Return the newest leaf of the sibling `step` positions after this message, or None if there is none."""
        siblings = self.siblings(message)
        index = siblings.index(message) + step
        return self.newest_leaf(siblings[index]) if 0 <= index < len(siblings) else None
