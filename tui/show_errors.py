"""What becomes of an error of the client: the person is told, and the program goes on. And of an answer that comes when
the screen that asked has gone: nothing."""

from collections.abc import Iterator
from contextlib import contextmanager

from textual.css.query import NoMatches
from textual.dom import DOMNode

from tui.client import ClientError


@contextmanager
def show_errors(node: DOMNode) -> Iterator[None]:
    """Show a ClientError that is raised inside, and go on behind it."""
    try:
        yield
    except NoMatches:
        if any(screen in node.ancestors_with_self for screen in node.app.screen_stack):
            raise
    except ClientError as error:
        show_error(node, error)


def show_error(node: DOMNode, error: ClientError) -> None:
    """Show an error and its remedy."""
    node.app.notify(error.remedy, title=error.message, severity="error", timeout=12, markup=False)
