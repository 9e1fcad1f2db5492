"""A line of a sent message with the name and the size of an attachment."""

from contextlib import suppress

from textual import work
from textual.widgets import Label

from tui.attachment_sizes import AttachmentSizes
from tui.client import ClientError
from tui.types import Attachment


class AttachedFile(Label):
    """The name and the size of one attachment."""

    def __init__(self, file: Attachment, sizes: AttachmentSizes) -> None:
        super().__init__(markup=False, classes="file")
        self._file = file
        self._sizes = sizes

    def on_mount(self) -> None:
        self.count()

    @work(exclusive=True, group="count")
    async def count(self) -> None:
        """Show the size in tokens, and until they are counted, in characters."""
        self._show()
        with suppress(ClientError):  # the size in characters remains
            await self._sizes.count(self._file)
            self._show()

    def _show(self) -> None:
        self.update(f"+ {self._sizes.describe(self._file)}")
