"""What a model is asked to go on with: the noun that every dialect of the endpoint fills.

Refuses to know wire formats, templates and models.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Final

from app.generation.messages import Json, Message

MAX_TOOLS: Final = 512


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool that the model may call."""

    name: str
    definition: Mapping[str, Json]  # as templates print it: OpenAI's form, with all that the client said
    parameters: Json  # JSON schema of its arguments
    strict: bool = False  # whatever calls it keeps to that


class ToolUse(Enum):
    """Whether a reply calls tools."""

    FREE = auto()
    FORCED = auto()  # it calls one at least, and says nothing else


@dataclass(frozen=True, slots=True)
class Conversation:
    """The messages, and all else that has a say in the next one."""

    messages: Sequence[Message]
    tools: Sequence[Tool] = ()
    allowed: Sequence[Tool] | None = None  # of the tools, those that may be called now; None: all
    use: ToolUse = ToolUse.FREE
    parallel_calls: bool | None = None  # more than one call in a reply; None: as suits the model
    thinking_budget: int | None = None  # tokens that may be thought; None: any number
    variables: Mapping[str, Json] = field(default_factory=dict)  # of the template, besides its own
    begun: str = ""  # what the next message begins with, which the model goes on from
    add_generation_prompt: bool = True  # the prompt ends with what the template writes in front of a reply

    @property
    def callable_tools(self) -> Sequence[Tool]:
        return self.tools if self.allowed is None else self.allowed
