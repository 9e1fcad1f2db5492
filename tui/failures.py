"""What becomes of an error of the client: the person is told, and the program goes on."""

from collections.abc import Iterator
from contextlib import contextmanager

from textual.dom import DOMNode

from tui.client import ClientError


@contextmanager
def told(node: DOMNode) -> Iterator[None]:
    """Show a ClientError that is raised inside, and go on behind it."""
    try:
        yield
    except ClientError as error:
        tell(node, error)


def tell(node: DOMNode, error: ClientError) -> None:
    """Show an error and its remedy."""
    node.app.notify(error.remedy, title=error.message, severity="error", timeout=12, markup=False)
