"""Shows client errors as notifications, so that the program continues."""

from collections.abc import Iterator
from contextlib import contextmanager

from textual.css.query import NoMatches
from textual.dom import DOMNode

from tui.client import ClientError
from tui.plain_text import capitalized


@contextmanager
def show_errors(node: DOMNode) -> Iterator[None]:
    """Show a ClientError raised in the body as a notification.

    Failed queries are ignored if the node's screen was closed.
    """
    try:
        yield
    except NoMatches:
        if any(screen in node.ancestors_with_self for screen in node.app.screen_stack):
            raise
    except ClientError as error:
        show_error(node, error)


def show_error(node: DOMNode, error: ClientError) -> None:
    """Show an error and its remedy as a notification."""
    node.app.notify(error.remedy, title=capitalized(error.message), severity="error", timeout=12, markup=False)
