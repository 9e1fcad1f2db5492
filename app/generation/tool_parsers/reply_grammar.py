"""Grammars of replies: optional reasoning, then tool calls or an answer.

A free grammar allows any text, in which everything that starts like a call must be a valid call.
"""

from collections.abc import Mapping, Sequence

from app.generation.conversation import Json, Tool
from app.generation.tool_parsers.argument_types import TEXT, member_schema, types_in
from app.generation.tool_parsers.call_parser import CallMarkup
from app.generation.tool_parsers.lark_rules import LarkRules
from app.generation.tool_parsers.markup import Hole, Markup
from app.generation.tool_parsers.reply_format import CallSyntax, ReplyFormat
from app.grammars.lark import literal

# Any answer. Leading white space is excluded: it is stripped from replies, so it would be missing when they are sent
# back.
ANY_TEXT = r"(/[^ \n\r\t](.|\n)*/)?"

_GAP = "/[ \\n]{0,2}/"  # white space after the reasoning
_BETWEEN_CALLS = "/\\n?/"
_ID = "/[a-zA-Z0-9]{9}/"
_SHARED = ("$defs", "definitions")
_TYPE_ORDER = ("object", "array", "boolean", "integer", "number", "null")


def call_grammar(
    written: ReplyFormat,
    opening: str,
    tools: Sequence[Tool],
    control: Mapping[str, int],
    *,
    parallel: bool,
    thinks: bool,
) -> str:
    """Return a grammar of at least one call of `tools` after optional reasoning; more calls if `parallel`.

    `opening` is the start of the reply in the prompt. `thinks` allows reasoning. Raises ValueError if the format has no
    calls.
    """
    grammar = LarkRules(control)
    calls = _calls(grammar, written, tools, parallel=parallel, is_only=len(tools) == 1)
    return grammar.start(
        _after_reasoning(grammar, written, opening, calls.whole(""), calls.whole(opening), thinks=thinks)
    )


def answer_grammar(
    written: ReplyFormat,
    opening: str,
    tools: Sequence[Tool],
    control: Mapping[str, int],
    answer: str,
    *,
    parallel: bool,
    thinks: bool,
) -> str:
    """Return a grammar of an answer or calls of `tools`, after optional reasoning. `answer` is a Lark expression.

    Raises ValueError if there are tools but the format has no calls.
    """
    grammar = LarkRules(control)
    lead = written.messages.answer
    later, first = (f"{grammar.text(text)} {answer}" for text in (lead, lead.removeprefix(opening)))
    if tools:
        calls = _calls(grammar, written, tools, parallel=parallel)
        later, first = f"({later} | {calls.whole('')})", f"({first} | {calls.whole(opening)})"
    return grammar.start(_after_reasoning(grammar, written, opening, later, first, thinks=thinks))


def free_grammar(
    written: ReplyFormat,
    opening: str,
    tools: Sequence[Tool],
    control: Mapping[str, int],
    *,
    parallel: bool,
    thinks: bool,
) -> str | None:
    """Return a grammar of any text in which every call is a valid call of `tools`.

    Returns None if the format's calls start like other markup. Raises ValueError if the format has no calls.
    """
    grammar = LarkRules(control)
    calls = _calls(grammar, written, tools, parallel=parallel)
    mark = calls.mark
    if not mark or _begins_others(mark, written):
        return None
    text = grammar.marked_text(mark, calls.whole(mark), "*" if parallel else "?")
    return grammar.start(_after_reasoning(grammar, written, opening, text, text, thinks=thinks))


def no_call_grammar(written: ReplyFormat, control: Mapping[str, int]) -> str | None:
    """Return a grammar of any text without calls.

    Returns None if the format's calls start like other markup or like plain text. Raises ValueError if the format has
    no calls.
    """
    grammar = LarkRules(control)
    mark = _calls(grammar, written, (), parallel=False).mark
    return grammar.start(grammar.none_of(mark)) if mark in control and not _begins_others(mark, written) else None


def _begins_others(mark: str, written: ReplyFormat) -> bool:
    reasoning = written.thinking.begin if written.thinking else ()
    return any(mark in other for other in (*written.messages.silent, *written.messages.openings, *reasoning))


def _calls(
    grammar: LarkRules, written: ReplyFormat, tools: Sequence[Tool], *, parallel: bool, is_only: bool = False
) -> "_Calls":
    if written.calls is None:
        raise ValueError("the format has no calls")
    return _Calls(grammar, written.calls, tools, parallel=parallel, is_only=is_only)


def _after_reasoning(
    grammar: LarkRules, written: ReplyFormat, opening: str, later: str, first: str, *, thinks: bool
) -> str:
    """Prepend optional reasoning. `later` follows reasoning; `first` starts the reply, after the prompt's opening."""
    thinking = written.thinking
    if thinking is None:
        return first
    reasoning = f"{grammar.until(Markup(thinking.end[0]).filled())} {_GAP} {later}"
    if opening in thinking.begin:
        return reasoning
    begin = Markup(thinking.begin[0]).filled().removeprefix(opening)
    return f"{grammar.text(begin)} {reasoning} | {first}" if thinks else first


class _Calls:
    """Builds the rules for the calls of one format."""

    def __init__(
        self, grammar: LarkRules, syntax: CallSyntax, tools: Sequence[Tool], *, parallel: bool, is_only: bool
    ) -> None:
        """`is_only`: the reply must call one specific tool."""
        self._is_only = is_only
        self._grammar = grammar
        self._syntax = syntax
        self._markup = CallMarkup(syntax.calls[0], syntax.parameters)
        self._tools = tools
        self._parallel = parallel

    @property
    def mark(self) -> str:
        """The control token or plain text that starts the calls. Empty if an answer may start the same way."""
        if not self._markup.head.first:
            return ""
        around = self._syntax.around[:1] if not self._syntax.listed else ()
        return self._grammar.first_part(next(iter(around), self._markup.head.filled(any=self._syntax.any))).rstrip()

    def whole(self, opening: str) -> str:
        """Return an expression for all calls. The first call lacks the start that `opening` already contains."""
        begin, end = self._syntax.around[:2] if self._syntax.around else ("", "")
        if not self._syntax.listed and self._markup.head.first:
            stripped = begin.removeprefix(opening) if begin else ""
            first = self._marked(opening if not begin else "")
            again = f"({_BETWEEN_CALLS} {self._marked('')})*" if self._parallel else ""
            return f"{self._grammar.text(stripped)} {first} {again} {self._grammar.text(end)}"
        head = self._markup.head.filled().removeprefix(opening)
        return f"{self._grammar.text(head)} {self._listed()} {self._grammar.text(self._markup.tail.filled())}"

    def _marked(self, opening: str) -> str:
        """Return an expression for one call of any tool, with its own markup."""
        return self._grammar.any_of([self._call(tool, opening) for tool in self._tools])

    def _call(self, tool: Tool, opening: str) -> str:
        bodies = {"json": self._arguments, "parameters": self._parameters, "python": self._python}
        arguments = bodies.get(self._markup.body, self._object)(tool)
        tail = self._grammar.text(self._markup.tail.filled())
        return f"{self._filled(self._markup.head, opening, name=tool.name)} {arguments} {tail}"

    def _filled(self, markup: Markup, opening: str, **holes: str) -> str:
        """Return markup with its holes filled. The hole for the id of a call matches any id."""
        before = markup.filled(any=self._syntax.any, **holes)
        rest = markup.parts[markup.filled_parts(any=self._syntax.any, **holes) :]
        expression = self._grammar.text(before.removeprefix(opening))
        if not rest:
            return expression
        after = Markup("".join(f"{{{part.name}}}" if isinstance(part, Hole) else part.text for part in rest[1:]))
        return f"{expression} {_ID} {self._filled(after, '', **holes)}"

    def _listed(self) -> str:
        """Return an expression for calls as JSON objects or in Python."""
        one = self._python if self._markup.body == "python" else self._object
        item = self._grammar.any_of([one(tool) for tool in self._tools])
        if not self._syntax.listed:  # without a list, a second call looks like text
            return item
        more = f'(", " {item})*' if self._parallel else ""
        return f'"[" {item} {more} "]"'

    def _object(self, tool: Tool) -> str:
        before, _, after = self._syntax.object.replace("{name}", tool.name).partition("{arguments}")
        return f"{literal(before)} {self._arguments(tool)} {literal(after)}"

    def _python(self, tool: Tool) -> str:
        required, optional = _members(tool.parameters)
        written = [f"{literal(f'{key}=')} {self._member(tool, key)}" for key in (*required, *optional)]
        must, may = written[: len(required)], written[len(required) :]
        expression = ' ", " '.join(must) or '""'
        for one in may if must else ():
            expression += f' (", " {one})?'
        if may and not must:
            expression = " | ".join(('""', *may))
        return f"{literal(f'{tool.name}(')} ({expression}) {literal(')')}"

    def _arguments(self, tool: Tool) -> str:
        schema = tool.parameters if isinstance(tool.parameters, Mapping) else {}
        return self._grammar.json({**schema, "type": "object"}, lenient=self._is_lenient(tool), path=f".{tool.name}")

    def _parameters(self, tool: Tool) -> str:
        required, optional = _members(tool.parameters)
        properties = [*required, *optional]
        written = [self._parameter(tool, key) for key in properties]
        return (
            " ".join(one if key in required else f"({one})?" for key, one in zip(properties, written, strict=True))
            or '""'
        )

    def _parameter(self, tool: Tool, key: str) -> str:
        head, _, close = self._syntax.parameters[-1].partition("{value}")
        schema = member_schema(tool.parameters, key)
        types = types_in(schema, tool.parameters)
        is_text = types in (TEXT, frozenset())
        word = next((one for one in _TYPE_ORDER if one in types), "string")
        if self._syntax.text_words is not None:
            word = self._syntax.text_words[0 if is_text else 1]
        before, after = (Markup(part).filled(key=key, type=word) for part in (head, close))
        if not is_text:
            value = f"{self._member(tool, key)} {self._grammar.text(after)}"
        elif isinstance(schema, Mapping) and isinstance(choices := schema.get("enum"), Sequence):
            texts = self._grammar.any_of([self._grammar.text(str(choice)) for choice in choices])
            value = f"{texts} {self._grammar.text(after)}"
        else:
            value = self._grammar.until(after)
        return self._grammar.rule(f"{self._grammar.text(before)} {value}")

    def _member(self, tool: Tool, key: str) -> str:
        """Return an expression for the value of an argument as JSON."""
        root = tool.parameters if isinstance(tool.parameters, Mapping) else {}
        schema = member_schema(tool.parameters, key)
        shared = {name: root[name] for name in _SHARED if name in root}
        whole = {**shared, **(schema if isinstance(schema, Mapping) else {})}
        path = f".{tool.name}.properties.{key}"
        return self._grammar.json(whole, lenient=self._is_lenient(tool), path=path)

    def _is_lenient(self, tool: Tool) -> bool:
        """Whether keywords that cannot be enforced are ignored.

        Agents send many tools, and most schemas are only hints. Schemas of strict tools, or of the only callable tool,
        are enforced.
        """
        return not tool.strict and not self._is_only


def _members(parameters: Json) -> tuple[list[str], list[str]]:
    """Return the names of the required and of the optional arguments."""
    root = parameters if isinstance(parameters, Mapping) else {}
    properties, required = root.get("properties"), root.get("required")
    names = list(properties) if isinstance(properties, Mapping) else []
    needed = set(required) if isinstance(required, Sequence) and not isinstance(required, str) else set()
    return [name for name in names if name in needed], [name for name in names if name not in needed]
