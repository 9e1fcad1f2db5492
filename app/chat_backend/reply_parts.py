"""The parts of a streamed reply."""

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

from app.generation.events import PromptProgress, ReasoningDelta, TextDelta
from app.history.records import State, StoredUsage


class Accepted(NamedTuple):
    """The server accepted the request. Servers that give replies no id do not send it."""

    reply: str  # its id


class Call(NamedTuple):
    """A tool call of the model."""

    name: str
    arguments: str  # JSON, not validated


class Ended(NamedTuple):
    """The last part of a reply. With calls, the model waits for their results."""

    state: State
    usage: StoredUsage | None
    calls: Sequence[Call] = ()


ReplyPart: TypeAlias = Accepted | PromptProgress | ReasoningDelta | TextDelta | Ended
