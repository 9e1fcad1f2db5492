"""The parts of a reply, as an endpoint streams them."""

from typing import NamedTuple, TypeAlias

from app.history.records import State, Usage


class Begun(NamedTuple):
    """The server has accepted it. Of a server that gives replies no id, there is none."""

    reply: str  # its id


class PromptProgress(NamedTuple):
    """How much of the prompt is read, in tokens."""

    done: int  # those that were cached included
    total: int
    cached: int


class ReasoningDelta(NamedTuple):
    """More of what the model thinks before it answers."""

    text: str


class TextDelta(NamedTuple):
    """More of the answer."""

    text: str


class Ended(NamedTuple):
    """The last event of a reply."""

    state: State
    usage: Usage | None


ReplyPart: TypeAlias = Begun | PromptProgress | ReasoningDelta | TextDelta | Ended
