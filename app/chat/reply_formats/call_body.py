"""What stands in the middle of a call: the noun that has a reader for each way of writing it.

Refuses to know what stands around it.
"""

import re
from typing import Protocol

_SPACES = re.compile(r"\s*")


class CallBody(Protocol):
    """Reads while the text comes, and tells a CallWriter."""

    done: bool
    failed: bool

    def feed(self, text: str, position: int, *, final: bool) -> int:
        """Up to where `text` is read now, all in front of `position` having been. What is not read is to be fed again
        with what follows; `final` if nothing does."""
        ...


def behind_space(text: str, position: int) -> int:
    return match_end(_SPACES, text, position)


def match_end(pattern: "re.Pattern[str]", text: str, position: int) -> int:
    match = pattern.match(text, position)
    return match.end() if match else position
