"""Incremental detokenizer: converts token ids, one at a time, to the text that is certain.

Text is certain if its characters are complete and no stop string can start in it.
"""

import codecs
from collections.abc import Sequence

from app.text.tokenizer import Tokenizer


class IncrementalDetokenizer:
    """The text of one reply. `push` and `finish` together return the decoded reply up to the first stop string.

    The first stop string is the one that is complete first. If several end at the same position, it is the longest of
    them. The stop string and the text after it are left out, unless `include_stop` is set. Time per token does not
    depend on the length of the reply.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: Sequence[str] = (),
        *,
        include_stop: bool = False,
        show_control: bool = False,
        continues_text: bool = False,
    ) -> None:
        """Create the detokenizer of a reply.

        `show_control` includes control tokens, for parsers of markup. `continues_text` means that the reply continues a
        text, so its first word keeps a leading space; otherwise the space that the vocabulary adds is removed. Raises
        ValueError for an empty stop string.
        """
        if "" in stop:
            raise ValueError("a stop string is empty")
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._first_characters = tuple({text[0] for text in stop})
        self._longest_stop = max(map(len, stop), default=0)
        self._include_stop = include_stop
        self._show_control = show_control
        self._strip_space = tokenizer.space_prefix and not continues_text
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._held = ""
        self.stopped: str | None = None  # the stop string that was found

    def push(self, token_id: int) -> str:
        """Return the text that is certain after `token_id`. Empty after a stop string."""
        return self._advance(self._tokenizer.token_bytes(token_id, show_control=self._show_control), final=False)

    def finish(self, *, is_interrupted: bool = False) -> str:
        """Return the text that was held back, when no token follows.

        A character that is not complete becomes U+FFFD. If the reply `is_interrupted` before the model ended it, the
        character is left out.
        """
        if is_interrupted:
            self._decoder.reset()
        return self._advance(b"", final=True)

    def _advance(self, encoded: bytes, *, final: bool) -> str:
        if self.stopped is not None:
            return ""
        new = self._decoder.decode(encoded, final)
        if self._strip_space and new:
            new = new.removeprefix(" ")
            self._strip_space = False
        if not self._stop:
            return new
        text = self._held + new
        if (found := self._first_stop(text)) is not None:
            start, self.stopped = found
            self._held = ""
            return text[: start + len(self.stopped)] if self._include_stop else text[:start]
        certain = len(text) if final else self._certain(text)
        self._held = text[certain:]
        return text[:certain]

    def _first_stop(self, text: str) -> tuple[int, str] | None:
        """Return the start of the stop string that is complete first, and that string."""
        starts = [(text.find(stop), stop) for stop in self._stop]
        ends = [(start + len(stop), start, stop) for start, stop in starts if start >= 0]
        if not ends:
            return None
        _, start, stop = min(ends)
        return start, stop

    def _certain(self, text: str) -> int:
        """Return the length of `text` before the first position where an incomplete stop string may start."""
        for start in range(max(0, len(text) - self._longest_stop + 1), len(text)):
            if text[start] in self._first_characters and any(stop.startswith(text[start:]) for stop in self._stop):
                return start
        return len(text)
