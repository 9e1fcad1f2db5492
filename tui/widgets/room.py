"""Empty room, as high as the documents that stood there or will once they are near to what is seen."""

from collections.abc import Iterator
from dataclasses import dataclass

from textual.geometry import Size
from textual.widget import Widget

_UNKNOWN = Size(0, 0)


@dataclass(slots=True, eq=False)
class Piece:
    """What one document shows, or would."""

    text: str
    adjoined: bool = False  # by the next one, with no line between them
    taken: Size = _UNKNOWN  # by that document, when it was laid out

    def height(self, width: int) -> int:
        """In another width, and of what was not laid out yet, that is an estimate."""
        if width != self.taken.width:
            self.taken = Size(width, sum(1 + len(line) // max(1, width) for line in self.text.splitlines()))
        return self.taken.height


class Room(Widget):
    """That of some pieces, one behind the other. However many there are, it costs a layout as much as one."""

    DEFAULT_CSS = "Room { height: auto; }"

    def __init__(self, pieces: list[Piece]) -> None:
        super().__init__()
        self._pieces = pieces

    @property
    def pieces(self) -> list[Piece]:
        return self._pieces

    def keep(self, pieces: list[Piece]) -> None:
        """Be the room of these."""
        self._pieces = pieces
        self.refresh(layout=True)

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        return sum(piece.height(width) for piece in self._pieces)

    def between(self, first: int, end: int) -> Iterator[tuple[int, Piece]]:
        """The pieces that lie in these of its lines, wholly or in part, and where they begin."""
        top, laid_out = 0, self._pieces if self.size.width else []
        for piece in laid_out:
            bottom = top + piece.height(self.size.width)
            if bottom > first and top < end:
                yield top, piece
            top = bottom
