"""What a model's replies are made of: the noun that a table fills and a parser reads.

A call is written as one line of markup (see markup.py), in the middle of which stands one of

    {json}         the arguments as a JSON object; the tool is named in front of it
    {objects}      JSON objects with the tool's name and the arguments, in a list or one after the other
    {keyed}        the same with the tool's name for a key and the arguments for its value
    {parameters}   one parameter after the other, each as `parameters` says
    {python}       Python calls

Refuses to know which model has which format.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

BODIES = ("json", "objects", "keyed", "parameters", "python")


@dataclass(frozen=True, slots=True)
class ThinkingSyntax:
    """What stands around the thoughts of a model."""

    begin: Sequence[str]  # markup; the first is what the format's own models write
    end: Sequence[str]


@dataclass(frozen=True, slots=True)
class CallSyntax:
    """How a model calls tools."""

    name: str
    calls: Sequence[str]  # markup of a call; the first that fits what the model writes is it
    parameters: Sequence[str] = ()  # markup of one parameter, with {key} and {value}, perhaps {type}
    around: Sequence[str] = ()  # markup around all calls, which is no text; the first begins them, the second ends them
    unmarked: bool = False  # a reply that begins as a call does may be one
    # What the models of the format write where more is understood:
    object: str = '{"name": "{name}", "arguments": {arguments}}'  # of {objects} and {keyed}
    listed: bool = False  # these, in a list
    any: str = ""
    text_words: tuple[str, str] | None = None  # for {type}: of text and of all else; None: the JSON type


@dataclass(frozen=True, slots=True)
class MessageSyntax:
    """What stands around whole messages, where a reply has several."""

    mark: str  # that only templates of the format hold
    silent: Sequence[str]  # markup that is no part of what is said
    openings: Sequence[str] = ()  # ends of prompts that are the beginning of some markup
    answer: str = ""  # in front of what is said
    answer_mark: str = ""  # that ends all markup: everything behind it is text


NO_MESSAGES = MessageSyntax("", ())


@dataclass(frozen=True, slots=True)
class ReplyFormat:
    """How the replies of one model are read; without anything, they are text."""

    thinking: ThinkingSyntax | None = None
    calls: CallSyntax | None = None
    messages: MessageSyntax = NO_MESSAGES

    def without_calls(self) -> "ReplyFormat":
        """For replies that may call nothing: what looks like a call is text."""
        return replace(self, calls=None)


PLAIN = ReplyFormat()
