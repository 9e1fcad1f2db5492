"""Text that comes in pieces, given on in lines, or in parts of long lines that end between words.

A voice that reads a screen aloud says what was written at once as one; it is not to be given half words.
"""

_LONG = 100  # characters that wait for the end of their line


class WholeWords:
    """One text."""

    def __init__(self) -> None:
        self._waiting = ""

    def add(self, text: str) -> str:
        """What can be written now."""
        self._waiting += text
        end = self._waiting.rfind("\n") + 1
        if not end and len(self._waiting) > _LONG:
            end = self._waiting.rfind(" ") + 1
        ready, self._waiting = self._waiting[:end], self._waiting[end:]
        return ready

    def rest(self) -> str:
        """What is left at the end."""
        ready, self._waiting = self._waiting, ""
        return ready
