"""The messages of a chat as a tree: which of them lead to one, and which others could stand in its index.

Knows nothing of where they are kept or how they are shown.
"""

from collections import defaultdict
from collections.abc import Iterable

from tui.types import Message, MessageId


class Branches:
    """All messages of one chat."""

    def __init__(self, messages: Iterable[Message] = ()) -> None:
        self._messages: dict[MessageId, Message] = {}
        self._children: defaultdict[MessageId | None, list[MessageId]] = defaultdict(list)
        for message in messages:
            self.put(message)

    def put(self, message: Message) -> None:
        """Add a message behind its parent, or tell anew what one is."""
        if message.id not in self._messages:
            self._children[message.parent].append(message.id)
        self._messages[message.id] = message

    def __getitem__(self, message: MessageId) -> Message:
        return self._messages[message]

    def __contains__(self, message: MessageId) -> bool:
        return message in self._messages

    def __len__(self) -> int:
        return len(self._messages)

    def path(self, leaf: MessageId | None) -> list[Message]:
        """From the first message to `leaf`."""
        path = []
        while leaf is not None:
            path.append(self._messages[leaf])
            leaf = self._messages[leaf].parent
        return path[::-1]

    def children(self, message: MessageId | None) -> tuple[MessageId, ...]:
        """The messages behind this one; behind None, those that a branch may begin with."""
        return tuple(self._children.get(message, ()))

    def siblings(self, message: MessageId) -> tuple[MessageId, ...]:
        """The message and all that could stand in its index, in the order in which they came."""
        return self.children(self._messages[message].parent)

    def newest_leaf(self, message: MessageId) -> MessageId:
        """The end of the branch through `message` that takes the newest message each time."""
        while children := self._children.get(message):
            message = children[-1]
        return message

    def neighbor_leaf(self, message: MessageId, step: int) -> MessageId | None:
        """The end of the branch through the sibling `step` places on; None where there is none."""
        siblings = self.siblings(message)
        index = siblings.index(message) + step
        return self.newest_leaf(siblings[index]) if 0 <= index < len(siblings) else None
