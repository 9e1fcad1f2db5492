"""Shows client errors as notifications, so that the program continues."""

from collections.abc import Iterator
from contextlib import contextmanager

from textual.css.query import NoMatches
from textual.dom import DOMNode
from textual.message import Message

from tui.client import ClientError
from tui.plain_text import capitalized


class CommandFailed(Message):
    """A command failed, and the user may want to correct it."""

    def __init__(self, command: str) -> None:
        super().__init__()
        self.command = command


@contextmanager
def show_errors(node: DOMNode, command: str = "") -> Iterator[None]:
    """Show a ClientError raised in the body as a notification, and return `command`, which failed, to the prompt.

    Failed queries are ignored if the node's screen was closed.
    """
    try:
        yield
    except NoMatches:
        if any(screen in node.ancestors_with_self for screen in node.app.screen_stack):
            raise
    except ClientError as error:
        show_error(node, error)
        if command:
            node.post_message(CommandFailed(command))


def show_error(node: DOMNode, error: ClientError) -> None:
    """Show an error and its remedy as a notification."""
    node.app.notify(error.remedy, title=capitalized(error.message), severity="error", timeout=12, markup=False)
