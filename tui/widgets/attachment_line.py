"""The files attached to the next message, and the line above the prompt that names them."""

from collections.abc import Iterable, Sequence
from contextlib import suppress

from textual import work
from textual.content import Content
from textual.message import Message as Posted

from tui.attachment_sizes import AttachmentSizes
from tui.client import ClientError
from tui.footer_keys import key_name
from tui.show_errors import show_errors
from tui.types import Attachment
from tui.widgets.text_fields import WordButtons, word


class AttachmentLine(WordButtons):
    """Names the attached files and their sizes. It is hidden without files."""

    class Changed(Posted):
        """The files, or their known sizes, have changed."""

    def __init__(self, sizes: AttachmentSizes) -> None:
        super().__init__(id="attached")
        self._sizes = sizes
        self.files: Sequence[Attachment] = ()
        self._removed: Sequence[Attachment] = ()  # by the user, last

    def replace(self, files: Iterable[Attachment]) -> None:
        """Attach these files instead. `restore` does nothing afterwards."""
        self.files, self._removed = tuple(files), ()
        self.count()

    def add(self, file: Attachment) -> None:
        self.files = (*self.files, file)
        self.count()

    def remove_last(self, count: int) -> None:
        """Remove the last `count` files, and notify the user. `restore` attaches them again."""
        kept = len(self.files) - count
        self.files, self._removed = self.files[:kept], self.files[kept:]
        names = ", ".join(file.name for file in self._removed)
        self.app.notify(f"Removed {names}. {key_name('ctrl+z')} in the empty prompt puts it back.", markup=False)
        self._draw()

    def restore(self) -> bool:
        """Attach the files again that were removed last. Returns whether there were any."""
        if not self._removed:
            return False
        self.files, self._removed = (*self.files, *self._removed), ()
        self._draw()
        return True

    @work(exclusive=True, group="count", description="count")
    async def count(self) -> None:
        """Show the files, with their tokens when they are counted."""
        self._draw()
        with show_errors(self), suppress(ClientError):  # the size in characters remains
            for file in self.files:
                await self._sizes.count(file)
                self._draw()

    def _draw(self) -> None:
        names = ", ".join(self._sizes.describe(file) for file in self.files)
        self.update(Content.assemble(f"+ {names}  ", word("remove", "detach")))
        self.display = bool(names)
        self.post_message(self.Changed())
