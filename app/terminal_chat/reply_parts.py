"""What a reply is made of while it comes from a server: the nouns between the endpoint and those who keep the reply.

Imports no client of HTTP, so that the screens are there before one is.
"""

from dataclasses import dataclass
from typing import TypeAlias

from app.chat.events import PromptProgress, ReasoningDelta, TextDelta
from app.history.records import State, Usage


@dataclass(frozen=True, slots=True)
class Ended:
    """The last event of a reply."""

    state: State
    usage: Usage | None


ReplyPart: TypeAlias = PromptProgress | ReasoningDelta | TextDelta | Ended
