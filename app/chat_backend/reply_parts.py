"""The parts of a streamed reply."""

from typing import NamedTuple, TypeAlias

from app.generation.events import PromptProgress, ReasoningDelta, TextDelta
from app.history.records import State, StoredUsage


class Accepted(NamedTuple):
    """The server accepted the request. Servers that give replies no id do not send it."""

    reply: str  # its id


class Ended(NamedTuple):
    """The last part of a reply."""

    state: State
    usage: StoredUsage | None


ReplyPart: TypeAlias = Accepted | PromptProgress | ReasoningDelta | TextDelta | Ended
