"""Detects the format of a model's replies: renders a reply with its chat template, and parses the result.

If a template renders neither calls nor reasoning, its source is searched for their markup.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from app.errors import TemplateError, TemplateUnavailable
from app.generation.conversation import Json, Message, ToolCall
from app.generation.events import ReasoningDelta, ToolCallDelta, ToolCallStart
from app.generation.template import ChatTemplateRenderer
from app.generation.tool_parsers.formats import CALLS, MESSAGES, THINKING
from app.generation.tool_parsers.markup import Markup
from app.generation.tool_parsers.reply_format import NO_MESSAGES, PLAIN, CallSyntax, ReplyFormat, ThinkingSyntax
from app.generation.tool_parsers.reply_parser import FormatMarkup, ReplyParser

_CALLED, _KEY, _VALUE, _THOUGHT = "zxqcalled", "zxqkey", "zxqvalue", "zxqthought"  # texts that occur in no template
_TAG = re.compile(r"<[|｜][^<>]+[|｜]>")
_HOLE = re.compile(r"\{\w+\}")
_USER = Message("user", "Hello")
_CALL = ToolCall(_CALLED, {_KEY: _VALUE}, "zxq000001")
_SCHEMA: Mapping[str, Json] = {"type": "object", "properties": {_KEY: {"type": "string", "description": "A word"}}}
_TOOL: Mapping[str, Json] = {
    "type": "function",
    "function": {"name": _CALLED, "description": "Probes", "parameters": {**_SCHEMA, "required": [_KEY]}},
}


@dataclass(frozen=True, slots=True)
class DetectedFormat:
    """The reply format of a chat template, and the features of the template that its output shows."""

    format: ReplyFormat
    takes_tools: bool  # it renders tools
    takes_system: bool  # it renders system messages
    arguments_as_text: bool  # it expects the arguments of a call as JSON text


def detect_format(
    template: str, variables: Mapping[str, Json], renderer: ChatTemplateRenderer, control_tokens: Iterable[str] = ()
) -> DetectedFormat:
    """Detect the format of a template. `control_tokens` may include markup that the template does not mention.

    Raises TemplateUnavailable if no template can be rendered.
    """
    probe = _Probe(template, variables, renderer)
    called, as_text = probe.reply(Message("assistant", "", None, (_CALL,)))
    reasoning, _ = probe.reply(Message("assistant", "", _THOUGHT, (_CALL,)))
    answered, _ = probe.reply(Message("assistant", "Hello", _THOUGHT))
    written = (called, reasoning, answered)
    known = "\n".join((template, *control_tokens))
    messages = next((one for one in MESSAGES if any(one.mark in text for text in (template, *written))), NO_MESSAGES)
    calls = _calls(known, called, ReplyFormat(messages=messages))
    thinking = _thinking(template, (reasoning, answered), ReplyFormat(None, calls, messages))
    return DetectedFormat(
        ReplyFormat(thinking, calls, messages), _CALLED in probe.prompt, probe.takes_system(), as_text
    )


class _Probe:
    def __init__(self, template: str, variables: Mapping[str, Json], renderer: ChatTemplateRenderer) -> None:
        self._template = template
        self._variables = variables
        self._renderer = renderer
        self.prompt = self._rendered([_USER]) or ""

    def reply(self, message: Message) -> tuple[str, bool]:
        """Return the rendered reply, and whether its arguments had to be text. Empty if the template refuses it."""
        for as_text in (False, True):
            whole = self._rendered([_USER, message], arguments_as_text=as_text)
            if whole is not None and (_CALLED in whole[len(self.prompt) // 2 :] or not message.tool_calls):
                return _after_prompt(self.prompt, whole), as_text
        return "", False

    def takes_system(self) -> bool:
        """Return whether the template renders system messages.

        Also true if the template fails without a system message.
        """
        rendered = self._rendered([Message("system", _THOUGHT), _USER], tools=None)
        return _THOUGHT in (rendered or "") or self._rendered([_USER], tools=None) is None

    def _rendered(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Json]] | None = (_TOOL,),
        arguments_as_text: bool = False,
    ) -> str | None:
        try:
            return self._renderer.render(
                self._template,
                messages,
                tools=tools,
                add_generation_prompt=False,
                variables=self._variables,
                arguments_as_text=arguments_as_text,
            )
        except TemplateUnavailable:
            raise
        except TemplateError:
            return None


def _after_prompt(prompt: str, whole: str) -> str:
    """Return the end of `whole`, without the prefix that it shares with `prompt`."""
    end = next((start for start, (was, now) in enumerate(zip(prompt, whole, strict=False)) if was != now), len(prompt))
    return whole[end:]


def _calls(known: str, written: str, others: ReplyFormat) -> CallSyntax | None:
    for syntax in CALLS:
        for call in syntax.calls:
            others_of_it = [other for other in syntax.calls if other != call]
            if _CALLED in written and _parses_call(replace(syntax, calls=(call,)), written, others):
                return replace(syntax, calls=(call, *others_of_it))
    return next((syntax for syntax in CALLS if not syntax.unmarked and _mentions(known, syntax)), None)


def _parses_call(syntax: CallSyntax, written: str, others: ReplyFormat) -> bool:
    parts = [written[start:] for start in _starts(written, syntax)]
    for part in parts:
        parser = ReplyParser(FormatMarkup(replace(others, calls=syntax)), {_CALLED: _SCHEMA})
        events = [parsed.event for parsed in (*parser.push(part), *parser.finish())]
        names = [event.name for event in events if isinstance(event, ToolCallStart)]
        arguments = "".join(event.arguments for event in events if isinstance(event, ToolCallDelta))
        if names == [_CALLED] and "".join(arguments.split()) == f'{{"{_KEY}":"{_VALUE}"}}':
            return True
    return False


def _starts(written: str, syntax: CallSyntax) -> Iterator[int]:
    """Yield the positions where a call may start: the start of the text, and the first brace if calls have no marks."""
    yield 0
    if syntax.unmarked and (brace := written.find("{")) > 0:
        yield brace


def _mentions(known: str, syntax: CallSyntax) -> bool:
    """Whether all markup of at least one call form in `syntax` occurs in the template or the vocabulary."""
    parameters = [mark for written in syntax.parameters[:1] for mark in _literals(written)]
    return any(all(mark in known for mark in (*_literals(written), *parameters)) for written in syntax.calls)


def _literals(written: str) -> Sequence[str]:
    """Return the tags in the literals of a markup. A literal without tags is returned whole.

    Text between tags is left out, because a template may compose it.
    """
    literals = Markup(_HOLE.sub("{any}", written)).literals
    return [tag for literal in literals for tag in _TAG.findall(literal) or [literal]]


def _thinking(template: str, written: Sequence[str], others: ReplyFormat) -> ThinkingSyntax | None:
    for syntax in THINKING:
        markup = FormatMarkup(replace(others, thinking=syntax))
        for text in written:
            parser = ReplyParser(markup, {})
            events = [parsed.event for parsed in (*parser.push(text), *parser.finish())]
            if "".join(event.text for event in events if isinstance(event, ReasoningDelta)) == _THOUGHT:
                return syntax
    return next(
        (syntax for syntax in THINKING if Markup(syntax.end[0]).first in template and _begins(template, syntax)), None
    )


def _begins(template: str, syntax: ThinkingSyntax) -> bool:
    return any(Markup(begin).first in template for begin in syntax.begin)


NO_TEMPLATE = DetectedFormat(PLAIN, takes_tools=False, takes_system=True, arguments_as_text=False)
