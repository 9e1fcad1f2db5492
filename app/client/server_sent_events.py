"""Parses server-sent events from bytes that arrive in parts of any size.

Source: https://html.spec.whatwg.org/multipage/server-sent-events.html. Supports only the features that JSON APIs use.
"""


class EventReader:
    """Splits a stream into the data of its events, until [DONE]."""

    def __init__(self) -> None:
        self.ended = False  # [DONE] has arrived
        self._unread = b""

    def feed(self, part: bytes) -> list[bytes]:
        """Return the data of the events that are complete now.

        Only \\n ends a line: JSON can contain other separators.
        """
        *lines, self._unread = (self._unread + part).split(b"\n")
        found = []
        for line in lines:
            if line.startswith(b"data:"):
                data = line[5:].strip()
                if data == b"[DONE]":
                    self.ended = True
                    break
                found.append(data)
        return found
