"""The parts of a streamed reply."""

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

from app.generation.events import PromptProgress
from app.history.records import State, StoredUsage

ENGINE_STOPPED = ("the engine stopped during this reply", "It restarts when you retry.")  # message and remedy


class Accepted(NamedTuple):
    """The server accepted the request. Not sent by servers that give replies no id."""

    reply: str  # the server's id of the reply


class ReasoningDelta(NamedTuple):
    """More reasoning text."""

    text: str
    tokens: int  # number of tokens since the last delta


class TextDelta(NamedTuple):
    """More text of the answer."""

    text: str
    tokens: int  # number of tokens since the last delta


class Call(NamedTuple):
    """A tool call that the model requests."""

    name: str
    arguments: str  # JSON, not validated


class Ended(NamedTuple):
    """The last part of a reply. If `calls` is not empty, the model needs their results to continue."""

    state: State
    usage: StoredUsage | None
    calls: Sequence[Call] = ()


ReplyPart: TypeAlias = Accepted | PromptProgress | ReasoningDelta | TextDelta | Ended
