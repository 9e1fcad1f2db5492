"""A conversation that a model continues: its messages, its tools, and how much the model thinks.

Every dialect fills these types from its own fields.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Annotated, Final, Literal, TypeAlias

from msgspec import Meta

from app.generation.messages import Json, Message

MAX_TOOLS: Final = 512

ToolName: TypeAlias = Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_.:/-]{1,128}$")]
ReasoningEffort: TypeAlias = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
ThinkingBudget: TypeAlias = Annotated[int, Meta(ge=-1, le=2**31 - 1)]  # tokens; -1: any number

_NO_ARGUMENTS: dict[str, Json] = {"type": "object", "properties": {}}
_NO_THOUGHT = ("none", "minimal")


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool that the model may call."""

    name: str
    definition: Mapping[str, Json]  # as templates print it: OpenAI's form, with all that the client said
    parameters: Json  # JSON schema of its arguments
    strict: bool = False  # whatever calls it keeps to that


def function_tool(
    name: str, description: str | None, parameters: Mapping[str, Json] | None, *, strict: bool | None = None
) -> Tool:
    """A function as a tool. Its definition has every key that templates print, since some fail on a missing one."""
    schema = parameters or _NO_ARGUMENTS
    function: dict[str, Json] = {"name": name, "description": description or "", "parameters": schema}
    return Tool(name, {"type": "function", "function": function}, schema, bool(strict))


class ToolUse(Enum):
    """Whether a reply calls tools."""

    FREE = auto()
    FORCED = auto()  # it calls one at least, and says nothing else


@dataclass(frozen=True, slots=True)
class ToolOptions:
    """The tools of a request, and which of them the reply may call."""

    tools: Sequence[Tool]
    named: Sequence[str] | None = None  # those that may be called; None: any. The others stay in the prompt
    use: ToolUse = ToolUse.FREE

    @property
    def allowed(self) -> Sequence[Tool] | None:
        return None if self.named is None else [tool for tool in self.tools if tool.name in self.named]

    def problems(self) -> Iterator[tuple[str, str]]:
        """Conflicts between the fields, each with the name of the field at fault."""
        names = [tool.name for tool in self.tools]
        if len(set(names)) < len(names):
            yield "tools", "two of them have the same name."
        if (self.named or self.use is ToolUse.FORCED) and not names:
            yield "tool_choice", "it needs tools."
        for name in self.named or ():
            if names and name not in names:
                yield "tool_choice", f"none of the tools is called {name}."


@dataclass(frozen=True, slots=True)
class ThinkingOptions:
    """How much a model thinks before it answers."""

    effort: ReasoningEffort | None
    budget: int | None  # tokens; None: any number
    enabled: bool | None  # None: as the template has it

    @classmethod
    def of(
        cls, effort: ReasoningEffort | None, budgets: Sequence[int | None] = (), enabled: bool | None = None
    ) -> "ThinkingOptions":
        """Merge the fields of a request. An effort wins over `enabled`. The least of the budgets applies; a negative
        budget sets no limit."""
        given = [budget for budget in budgets if budget is not None and budget >= 0]
        if effort == "none" or (effort is None and enabled is False):
            given.append(0)  # for templates that cannot switch it off
        if effort is not None:
            enabled = effort not in _NO_THOUGHT
        return cls(effort, min(given, default=None), False if 0 in given else enabled)

    def template_variables(self, given: Mapping[str, Json] | None = None) -> dict[str, Json]:
        """The variables of the chat template, by the names that templates use. Those of the client, `given`, win."""
        variables: dict[str, Json] = {} if self.effort is None else {"reasoning_effort": self.effort}
        if self.enabled is not None:
            variables |= {"enable_thinking": self.enabled, "thinking": self.enabled}
        return variables | dict(given or {})


@dataclass(frozen=True, slots=True)
class Conversation:
    """The messages, and everything else that decides the next one."""

    messages: Sequence[Message]
    tools: Sequence[Tool] = ()
    allowed: Sequence[Tool] | None = None  # of the tools, those that may be called now; None: all
    use: ToolUse = ToolUse.FREE
    parallel_calls: bool | None = None  # more than one call in a reply; None: as suits the model
    thinking_budget: int | None = None  # tokens that may be thought; None: any number
    variables: Mapping[str, Json] = field(default_factory=dict)  # of the template, besides its own
    begun: str = ""  # what the next message begins with, which the model goes on from
    add_generation_prompt: bool = True  # the prompt ends with what the template writes in front of a reply
    context: tuple[int, ...] = ()  # ids of an earlier prompt and its reply, which the messages follow

    @property
    def callable_tools(self) -> Sequence[Tool]:
        return self.tools if self.allowed is None else self.allowed
