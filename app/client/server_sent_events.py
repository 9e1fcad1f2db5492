"""The data of server-sent events, from bytes that arrive in parts of any size.

https://html.spec.whatwg.org/multipage/server-sent-events.html, as far as APIs that stream JSON use it.
"""


class EventReader:
    """Splits a stream into the data of its events, up to the closing [DONE]."""

    def __init__(self) -> None:
        self.ended = False  # [DONE] has arrived
        self._unread = b""

    def feed(self, part: bytes) -> list[bytes]:
        """The data of the events that are complete now. Lines end at \\n alone: JSON may hold other separators."""
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
