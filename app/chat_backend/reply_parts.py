"""The parts of a reply, as an endpoint streams them."""

from typing import NamedTuple, TypeAlias

from app.generation.events import PromptProgress, ReasoningDelta, TextDelta
from app.history.records import State, StoredUsage


class Accepted(NamedTuple):
    """The server has accepted the request. Servers that give replies no id send none of these."""

    reply: str  # its id


class Ended(NamedTuple):
    """The last part of a reply."""

    state: State
    usage: StoredUsage | None


ReplyPart: TypeAlias = Accepted | PromptProgress | ReasoningDelta | TextDelta | Ended
