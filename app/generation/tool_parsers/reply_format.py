"""The format of a model's replies.

The markup of a call (see markup.py) contains one of these bodies:

    {json}         the arguments as a JSON object, after the tool's name
    {objects}      JSON objects with the tool's name and the arguments, in a list or in sequence
    {keyed}        likewise, but with the tool's name as key and the arguments as value
    {parameters}   parameters in sequence, each in the markup of `parameters`
    {python}       Python calls
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

BODIES = ("json", "objects", "keyed", "parameters", "python")


@dataclass(frozen=True, slots=True)
class ThinkingSyntax:
    """The marks around the reasoning of a model."""

    begin: Sequence[str]  # start marks; models of this format write the first one
    end: Sequence[str]


@dataclass(frozen=True, slots=True)
class CallSyntax:
    """The syntax in which a model calls tools."""

    name: str
    calls: Sequence[str]  # markup of a call; the first that matches is used
    parameters: Sequence[str] = ()  # markup of one parameter, with {key} and {value}, optionally {type}
    around: Sequence[str] = ()  # markup around all calls: the first starts them, the second ends them
    unmarked: bool = False  # whether a reply may be a call if it starts like one but has no marks
    # The next two fields define the form that models write, if the parser accepts other forms as well.
    object: str = '{"name": "{name}", "arguments": {arguments}}'  # an object in {objects} or {keyed}
    listed: bool = False  # whether objects are written as a list
    any: str = ""
    # values of {type}: for strings, and for all other types; None: the JSON type
    text_words: tuple[str, str] | None = None


@dataclass(frozen=True, slots=True)
class MessageSyntax:
    """The markup around whole messages, if a reply has several."""

    mark: str  # text that identifies the templates of this format
    silent: Sequence[str]  # markup that is not part of the text
    openings: Sequence[str] = ()  # texts at the end of a prompt that are already the start of some markup
    answer: str = ""  # markup before the answer
    answer_mark: str = ""  # mark after which everything is text of the answer


NO_MESSAGES = MessageSyntax("", ())


@dataclass(frozen=True, slots=True)
class ReplyFormat:
    """The format of one model's replies. By default, a whole reply is text."""

    thinking: ThinkingSyntax | None = None
    calls: CallSyntax | None = None
    messages: MessageSyntax = NO_MESSAGES

    def without_calls(self) -> "ReplyFormat":
        """Return the format for replies without tools, in which calls are text."""
        return replace(self, calls=None)


PLAIN = ReplyFormat()
