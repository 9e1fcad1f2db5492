"""The line of an attachment in a sent message: its name, its size, and on request its text."""

from contextlib import suppress

from textual import work
from textual.content import Content

from tui.attachment_sizes import AttachmentSizes
from tui.client import ClientError
from tui.types import Attachment
from tui.widgets.folded import Folded


class AttachedFile(Folded):
    """The name and the size of one attachment. Unfolded, it shows the text."""

    def __init__(self, file: Attachment, sizes: AttachmentSizes) -> None:
        super().__init__("", file.text)
        self._file = file
        self._sizes = sizes

    def on_mount(self) -> None:
        self.count()

    @work(exclusive=True, group="count")
    async def count(self) -> None:
        """Show the size in tokens, and until they are counted, in characters."""
        self._describe()
        with suppress(ClientError):  # the size in characters remains
            await self._sizes.count(self._file)
            self._describe()

    def _describe(self) -> None:
        self._line = Content(self._sizes.describe(self._file))
        self._show()
