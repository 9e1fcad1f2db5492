"""The inputs of earlier messages, which the arrow keys and a search recall in the prompt."""

from collections.abc import Sequence

from tui.plain_text import sanitize


class InputHistory:
    """Earlier inputs, the position of the shown one, and changed inputs that were not sent.

    The inputs of a private chat are forgotten when it is left.
    """

    def __init__(self) -> None:
        self._inputs: list[str] = []  # the newest last
        self._private: list[str] | None = None  # inputs of the open private chat
        self._index = 0  # index of the shown input; equal to the number of inputs for new text
        self._unsent: dict[int, str] = {}  # changed inputs that were not sent, by index

    @property
    def is_private(self) -> bool:
        return self._private is not None

    @property
    def entries(self) -> Sequence[str]:
        """All earlier inputs, the newest last."""
        return self._inputs if self._private is None else [*self._inputs, *self._private]

    @property
    def unsent(self) -> Sequence[str]:
        """Changed inputs that are not shown."""
        return list(self._unsent.values())

    def remember(self, inputs: Sequence[str]) -> None:
        """Add inputs of earlier runs. `inputs`: newest first."""
        self._inputs[:0] = [sanitize(text) for text in reversed(inputs)]
        self._index += len(inputs)
        self._unsent = {index + len(inputs): text for index, text in self._unsent.items()}

    def change_chat(self, *, is_private: bool) -> None:
        """Keep the changed inputs, and use those of another chat."""
        self.set_aside()
        self._private = [] if is_private else None
        self._index = len(self.entries)

    def draft(self, text: str) -> str:
        """Return the text that was typed and not sent. The prompt shows `text`; an unchanged input does not count."""
        inputs = [*self.entries, ""]
        is_looked_at = text and text == inputs[self._index]
        return self._unsent.get(len(inputs) - 1, "") if is_looked_at else text

    def shows(self, text: str) -> bool:
        """Whether `text` is an earlier input that was recalled and not changed."""
        entries = self.entries
        return self._index < len(entries) and text == entries[self._index]

    def recall(self, step: int, text: str) -> str | None:
        """Return the input `step` positions after the shown `text`, which is kept if it was changed. None: there is
        none.
        """
        inputs, index = [*self.entries, ""], self._index + step
        if not 0 <= index < len(inputs):
            return None
        if text != inputs[self._index]:
            self._unsent[self._index] = text
        self._index = index
        return self._unsent.pop(index, inputs[index])

    def append(self, text: str) -> None:
        """Add the newest input, unless it is empty or repeats the one before."""
        if text.strip() and list(self.entries[-1:]) != [text]:
            (self._inputs if self._private is None else self._private).append(text)

    def put_away(self, text: str) -> None:
        """Add a text that is replaced and not sent, so that it can be recalled."""
        if text not in self.entries:
            self.append(text)

    def set_aside(self) -> None:
        """Append all changed inputs, and start new text."""
        for text in self._unsent.values():
            self.append(text)
        self._unsent.clear()
        self._index = len(self.entries)
