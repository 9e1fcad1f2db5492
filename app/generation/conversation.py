"""A conversation that a model continues: its messages, its tools, and how much the model thinks.

Every API fills these types from its own fields, and every chat template reads them. Messages hold text only.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import Annotated, Final, Literal, TypeAlias

from msgspec import Meta

from app.errors import AppError
from app.generation.attachments import Attachment, numbers_of

Json: TypeAlias = "bool | int | float | str | Sequence[Json] | Mapping[str, Json] | None"

# Roles that templates look up. A client may send any other role, which is treated as untrusted text.
ROLES: Final = frozenset(("system", "developer", "user", "assistant", "tool"))
SYSTEM_ROLES: Final[Sequence[str]] = ("system", "developer")

MAX_TOOLS: Final = 512

ToolName: TypeAlias = Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_.:/-]{1,128}$")]
ReasoningEffort: TypeAlias = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
ThinkingBudget: TypeAlias = Annotated[int, Meta(ge=-1, le=2**31 - 1)]  # tokens; -1: no limit

_NO_ARGUMENTS: dict[str, Json] = {"type": "object", "properties": {}}
_NO_REASONING = ("none", "minimal")


class InvalidMessage(AppError):
    """A message cannot be given to a model."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool by the assistant. `arguments` is the parsed JSON object."""

    name: str
    arguments: Mapping[str, Json]
    id: str | None = None

    @classmethod
    def parse(cls, name: str, arguments: str, id: str | None = None) -> "ToolCall":  # noqa: A002
        """Parse a call whose arguments are JSON text. An empty string means no arguments.

        Raises InvalidMessage if the text is not a JSON object.
        """
        try:
            return cls(name, parse_arguments(arguments), id)
        except ValueError as error:
            raise InvalidMessage(
                f"The arguments of a call of the tool {name!r} are invalid: {error}",
                "Send the arguments of every tool call as one JSON object.",
            ) from error

    def to_template(self, *, arguments_as_text: bool = False) -> dict[str, Json]:
        """Return the call as chat templates expect it. Most expect the arguments as an object, a few as JSON text."""
        arguments = (
            json.dumps(self.arguments, ensure_ascii=False, default=dict) if arguments_as_text else self.arguments
        )
        function: dict[str, Json] = {"name": self.name, "arguments": arguments}
        call: dict[str, Json] = {"type": "function", "function": function}
        return call if self.id is None else {"id": self.id, **call}


@dataclass(frozen=True, slots=True)
class Message:
    """One message. `content` is empty if there is none, since many templates fail on a missing one."""

    role: str  # one of ROLES, or a role that the model's template defines
    content: str = ""
    reasoning: str | None = None  # text that the assistant wrote while thinking, before its content
    tool_calls: tuple[ToolCall, ...] = ()  # calls in an assistant message
    tool_call_id: str | None = None  # in a tool message: id of the call that the message answers
    name: str | None = None  # in a tool message: name of the tool; in others: name of the speaker

    def to_template(self, *, arguments_as_text: bool = False) -> dict[str, Json]:
        """Return the message as chat templates expect it. Fields without a value are absent, except `content`.

        The reasoning has two keys, because templates differ: `thinking` (gpt-oss) and `reasoning_content` (others). The
        keys have the order of transformers, because some templates print the whole message.
        """
        fields: dict[str, Json] = {
            "thinking": self.reasoning,
            "role": self.role,
            "content": self.content,
            "reasoning_content": self.reasoning,
            "tool_calls": [call.to_template(arguments_as_text=arguments_as_text) for call in self.tool_calls] or None,
            "tool_call_id": self.tool_call_id,
            "name": self.name,
        }
        return {key: value for key, value in fields.items() if value is not None}

    def with_texts(self, change: Callable[[str], str]) -> "Message":
        """Return the message with `change` applied to every text that a user, a tool, or the model wrote."""
        return replace(
            self,
            role=self.role if self.role in ROLES else change(self.role),
            content=change(self.content),
            reasoning=None if self.reasoning is None else change(self.reasoning),
            tool_calls=tuple(
                replace(call, name=change(call.name), arguments=object_with_texts(call.arguments, change))
                for call in self.tool_calls
            ),
            name=None if self.name is None else change(self.name),
        )


def with_texts(value: Json, change: Callable[[str], str], *, fields: bool = False) -> Json:
    """Apply `change` to every string in a JSON value, including the keys of objects.

    With `fields`, keys that are identifiers stay, because templates look them up.
    """
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return object_with_texts(value, change, fields=fields)
    if isinstance(value, Sequence):
        return [with_texts(item, change, fields=fields) for item in value]
    return value


def object_with_texts(
    value: Mapping[str, Json], change: Callable[[str], str], *, fields: bool = False
) -> dict[str, Json]:
    """Apply `change` to an object, as `with_texts` does."""
    return {
        name if fields and name.isidentifier() else change(name): with_texts(item, change, fields=fields)
        for name, item in value.items()
    }


def parse_arguments(text: str) -> dict[str, Json]:
    """Parse the arguments of a tool call. An empty string means no arguments.

    Raises ValueError if the text is not a JSON object, or if it is nested too deeply.
    """
    try:
        parsed = json.loads(text or "{}")
    except RecursionError as error:
        raise ValueError(str(error)) from error
    if not isinstance(parsed, dict):
        raise ValueError(f"a JSON object is expected, not {type(parsed).__name__}")
    return parsed


def merge_system_messages(messages: Sequence[Message]) -> Iterator[Message]:
    """Prepend each system message to the next user message. System messages at the end become a user message."""
    texts: list[str] = []
    for message in messages:
        if message.role in SYSTEM_ROLES:
            texts.append(message.content)
        elif message.role == "user" and texts:
            yield replace(message, content="\n\n".join((*texts, message.content)))
            texts = []
        else:
            yield message
    if texts:
        yield Message("user", "\n\n".join(texts))


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool that the model may call."""

    name: str
    # the tool in OpenAI's form, as templates print it, with every field that the client sent
    definition: Mapping[str, Json]
    parameters: Json  # JSON schema of the arguments
    strict: bool = False  # whether calls of the tool must follow that schema


def function_tool(
    name: str, description: str | None, parameters: Mapping[str, Json] | None, *, strict: bool | None = None
) -> Tool:
    """Return a tool for a function. Its definition has every key that templates print; some fail on a missing key."""
    schema = parameters or _NO_ARGUMENTS
    function: dict[str, Json] = {"name": name, "description": description or "", "parameters": schema}
    return Tool(name, {"type": "function", "function": function}, schema, bool(strict))


class ToolUse(Enum):
    """Whether a reply calls tools."""

    FREE = auto()
    FORCED = auto()  # the reply calls at least one tool and contains no text


@dataclass(frozen=True, slots=True)
class ToolOptions:
    """The tools of a request, and which of them the reply may call."""

    tools: Sequence[Tool]
    named: Sequence[str] | None = None  # tools that may be called; None: all. The others stay in the prompt.
    use: ToolUse = ToolUse.FREE

    @property
    def allowed(self) -> Sequence[Tool] | None:
        return None if self.named is None else [tool for tool in self.tools if tool.name in self.named]

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield each conflict between the fields, with the name of the field at fault."""
        names = [tool.name for tool in self.tools]
        if len(set(names)) < len(names):
            yield "tools", "two tools have the same name."
        if (self.named or self.use is ToolUse.FORCED) and not names:
            yield "tool_choice", "it requires `tools`."
        for name in self.named or ():
            if names and name not in names:
                yield "tool_choice", f"there is no tool named {name}."


@dataclass(frozen=True, slots=True)
class ThinkingOptions:
    """Options for how long a model thinks before it answers."""

    effort: ReasoningEffort | None
    budget: int | None  # maximum number of reasoning tokens; None: no limit
    enabled: bool | None  # whether the model thinks; None: the default of the template

    @classmethod
    def of(
        cls, effort: ReasoningEffort | None, budgets: Sequence[int | None] = (), enabled: bool | None = None
    ) -> "ThinkingOptions":
        """Combine the thinking fields of a request.

        An effort overrides `enabled`. The smallest budget applies; a negative budget means no limit.
        """
        given = [budget for budget in budgets if budget is not None and budget >= 0]
        if effort == "none" or (effort is None and enabled is False):
            given.append(0)  # a budget of 0 works for templates that cannot turn thinking off
        if effort is not None:
            enabled = effort not in _NO_REASONING
        return cls(effort, min(given, default=None), False if 0 in given else enabled)

    def template_variables(self, given: Mapping[str, Json] | None = None) -> dict[str, Json]:
        """Return the variables of the chat template, under the names that templates use.

        The variables `given` by the client take precedence.
        """
        variables: dict[str, Json] = {} if self.effort is None else {"reasoning_effort": self.effort}
        if self.enabled is not None:
            variables |= {"enable_thinking": self.enabled, "thinking": self.enabled}
        return variables | dict(given or {})


@dataclass(frozen=True, slots=True)
class Conversation:
    """The messages of a chat, and the options that shape the next one."""

    messages: Sequence[Message]
    tools: Sequence[Tool] = ()
    allowed: Sequence[Tool] | None = None  # tools that may be called; None: all of `tools`
    use: ToolUse = ToolUse.FREE
    parallel_calls: bool | None = None  # whether a reply may contain more than one call; None: depends on the model
    thinking_budget: int | None = None  # limit of reasoning tokens; None: no limit
    variables: Mapping[str, Json] = field(default_factory=dict)  # further variables for the template
    reply_prefix: str = ""  # start of the next message, which the model continues
    add_generation_prompt: bool = True  # whether the prompt ends with the text that the template writes before a reply
    context: tuple[int, ...] = ()  # ids of an earlier prompt and its reply, which the messages follow
    attachments: Sequence[Attachment] = ()  # images and documents of the request, which words replace in the messages
    removed_lines: tuple[str, ...] = ()  # names of lines that were removed because they change with every request

    @property
    def left_out(self) -> tuple[str, ...]:
        """The parts of the request that the messages lack: names of lines, and numbers of attachments."""
        return (*self.removed_lines, *numbers_of(self.attachments))

    @property
    def callable_tools(self) -> Sequence[Tool]:
        return self.tools if self.allowed is None else self.allowed
