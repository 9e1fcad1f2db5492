"""The plain chat's commands for branches, and for copying the last reply."""

from collections.abc import Awaitable, Callable, Iterable, Iterator

from tui import figures
from tui.branches import Branches
from tui.client import Client, ClientError
from tui.clipboard import Clipboard
from tui.types import Chat, Message, MessageId, Role

_START = 60  # characters of a message in the list of branches


class PlainBranches:
    """Lists the branches of the open chat, shows one of them, and copies its last reply."""

    def __init__(
        self,
        client: Client,
        say: Callable[[str], None],
        current: Callable[[], Awaitable[Chat]],
        clipboard: Clipboard,
    ) -> None:
        """`say` writes a line, and `current` returns the open chat."""
        self._client = client
        self._say = say
        self._current = current
        self._clipboard = clipboard

    async def show(self, rest: str) -> None:
        """List the branches with numbers, or show the branch with the number `rest`."""
        chat = await self._current()
        tree = Branches(chat.messages)
        leaves = [message.id for message in chat.messages if not tree.children(message.id)]
        if rest:
            if not rest.isdecimal() or not 0 < int(rest) <= len(leaves):
                raise ClientError("this chat has no branch with this number", "/branches lists all branches.")
            leaf = leaves[int(rest) - 1]
            await self._client.chats.show_branch(chat.summary.id, leaf)
            for line in branch_lines(tree.path(leaf)):
                self._say(line)
            return
        for number, leaf in enumerate(leaves, 1):
            shown = " (shown)" if leaf == chat.leaf else ""
            self._say(f"{number}. {figures.message_line(_first_of_its_own(tree, leaf), _START)}{shown}")
        self._say("/branches NUMBER shows one." if len(leaves) > 1 else "This chat has no other branches.")

    async def copy(self, rest: str) -> None:
        """Copy the last reply of the open branch to the clipboard."""
        replies = [one for one in shown_branch(await self._current()) if one.role is Role.ASSISTANT and one.text]
        if not replies:
            raise ClientError("no reply to copy")
        if (destination := await self._clipboard.copy(replies[-1].text)) is None:
            raise ClientError("no clipboard program accepted the text", "Install wl-copy, xclip, or xsel.")
        self._say(destination.value)


def shown_branch(chat: Chat) -> list[Message]:
    """Return the messages of the branch that a chat shows, oldest first."""
    return Branches(chat.messages).path(chat.leaf)


def branch_lines(branch: Iterable[Message]) -> Iterator[str]:
    """Yield the messages of a branch with their authors."""
    for message in branch:
        yield f"{'You' if message.role is Role.USER else 'Model'}: {message.text}"


def _first_of_its_own(tree: Branches, leaf: MessageId) -> Message:
    """Return the message at which a branch differs from the others."""
    forks = [message for message in tree.path(leaf) if len(tree.siblings(message.id)) > 1]
    return forks[-1] if forks else tree.path(leaf)[0]
