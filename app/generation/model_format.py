"""The format of one model: how its template presents tools, and how its replies are parsed and constrained.

The format comes from the model's response template if it has one. Otherwise the first use renders the chat template to
detect it.
"""

import functools
import logging
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from app.errors import InvalidGrammar, ToolsUnsupported
from app.generation.conversation import Conversation, Json, ToolUse
from app.generation.generic_tools import ToolSupport, generic_format
from app.generation.grammars import GrammarCompiler, GrammarSource, RequestedGrammar
from app.generation.message_marks import message_marks
from app.generation.template import ChatTemplateRenderer
from app.generation.thinking_budget import ReasoningMarks, ThinkingBudget
from app.generation.tool_parsers.anchor_pattern import UnsupportedPattern
from app.generation.tool_parsers.detection import NO_TEMPLATE, DetectedFormat, detect_format
from app.generation.tool_parsers.markup import Markup
from app.generation.tool_parsers.reply_format import ReplyFormat
from app.generation.tool_parsers.reply_grammar import (
    ANY_TEXT,
    answer_grammar,
    call_grammar,
    free_grammar,
    no_call_grammar,
)
from app.generation.tool_parsers.reply_parser import FormatMarkup, ReplyParser
from app.generation.tool_parsers.response_template import parse_response_template
from app.text.tokenizer import Tokenizer
from engine.grammar import Grammar

log = logging.getLogger(__name__)

_ANY_OBJECT: Mapping[str, Json] = {"type": "object", "additionalProperties": True}


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A prompt for a model's next turn, and how the reply to it is parsed."""

    ids: tuple[int, ...]
    _format: "ModelFormat"
    _conversation: Conversation
    _rendered: str
    marks: tuple[int, ...] = ()  # see `Request.marks`

    def new_parser(self) -> ReplyParser:
        return self._format.parser(self._conversation, self._rendered)

    def grammar(self, wanted: GrammarSource | None) -> tuple[GrammarSource | None, bool]:
        """Return the grammar of the reply, and whether it only constrains tool calls.

        `wanted` is the grammar that the request asks for.
        """
        return self._format.grammar(self._conversation, self._rendered, wanted)

    def loose_grammar(self, wanted: GrammarSource | None) -> GrammarSource | None:
        """Return the grammar that `grammar` returns, with any arguments allowed for tools that are not strict.

        None: the request requires the schemas.
        """
        conversation = self._format.with_loose_schemas(self._conversation)
        return self._format.grammar(conversation, self._rendered, wanted)[0] if conversation else None

    def with_thinking_budget(self, grammar: Grammar | None) -> Grammar | None:
        """Wrap a grammar, or none, so that the reasoning stays within the conversation's budget."""
        return self._format.with_thinking_budget(self._conversation, self._rendered, grammar)

    async def compile_grammar(
        self, compiler: GrammarCompiler, requested: RequestedGrammar | None
    ) -> tuple[Grammar | None, str]:
        """Return the reply's grammar, and the request field to name in its errors.

        The grammar covers forced calls or the `requested` grammar, and the thinking budget. Raises InvalidGrammar with
        a path in the request.
        """
        wanted = None if requested is None else requested.source
        source, of_calls = self.grammar(wanted)
        field = "tools" if of_calls or requested is None else requested.field
        if source is None:
            return self.with_thinking_budget(None), field
        try:
            grammar = await compiler.compile(source)
        except InvalidGrammar as error:
            # raises if the requested part of the grammar is at fault
            if requested is not None and source is not requested.source:
                await requested.compile(compiler)
                field = "tools" if self._conversation.callable_tools else field
            if (loose := self.loose_grammar(wanted)) is None:
                raise error.within(field) from error
            grammar = await RequestedGrammar(loose, field).compile(compiler)
        return self.with_thinking_budget(grammar), field


@dataclass(frozen=True, slots=True)
class Capabilities:
    """Optional abilities of a model."""

    tool_support: ToolSupport
    thinking: bool  # whether the model's reasoning is separate from its answer
    insertion: bool  # whether the model can fill in text between two others

    @property
    def tools(self) -> bool:
        """Whether the model can call tools."""
        return self.tool_support is not ToolSupport.NONE


@dataclass(frozen=True, slots=True)
class _CompiledFormat:
    """A reply format with its compiled markup."""

    format: ReplyFormat
    markup: FormatMarkup
    without_calls: FormatMarkup  # markup for parsing replies in which calls are text

    @classmethod
    def of(cls, written: ReplyFormat) -> "_CompiledFormat":
        return cls(written, FormatMarkup(written), FormatMarkup(written.without_calls()))


class ModelFormat:
    """The format of one model. Thread-safe.

    The first use renders the template a few times, so every method may raise TemplateUnavailable.
    """

    def __init__(self, tokenizer: Tokenizer, renderer: ChatTemplateRenderer, *, generic_tools: bool = True) -> None:
        """`generic_tools` presents tools as text to a model whose template does not support them."""
        self._tokenizer = tokenizer
        self._generic_tools = generic_tools
        self._renderer = renderer
        self._lock = threading.Lock()
        self._known: DetectedFormat | None = None

    @property
    def arguments_as_text(self) -> bool:
        """Whether the template expects the arguments of a call as JSON text."""
        return self._template.arguments_as_text

    @property
    def takes_system(self) -> bool:
        """Whether the template renders system messages."""
        return self._template.takes_system

    @property
    def tool_support(self) -> ToolSupport:
        if self._template.takes_tools and self._template.format.calls is not None:
            return ToolSupport.NATIVE
        return ToolSupport.GENERIC if self._generic_tools else ToolSupport.NONE

    def uses_generic_tools(self, conversation: Conversation) -> bool:
        """Whether the tools of a conversation, and the calls and results in it, must be presented as text."""
        has_tools = conversation.tools or any(it.tool_calls or it.role == "tool" for it in conversation.messages)
        return bool(has_tools) and self.tool_support is ToolSupport.GENERIC

    @property
    def thinks(self) -> bool:
        """Whether the model's reasoning is separate from its answer."""
        return self._template.format.thinking is not None

    def check_tools(self, conversation: Conversation) -> None:
        """Raise ToolsUnsupported if the conversation has tools that the model cannot see or call."""
        if not conversation.callable_tools or self.tool_support is not ToolSupport.NONE:
            return
        problem = "The chat template of this model does not support tools"
        if self._template.takes_tools:
            problem = "The format in which this model calls tools is unknown"
        raise ToolsUnsupported(problem, "Choose a model that can call tools, or turn on the setting generic_tools.")

    def marks(self, conversation: Conversation, rendered: str, ids: Sequence[int]) -> tuple[int, ...]:
        """See `message_marks`."""
        return message_marks(conversation.messages, rendered, ids, self._tokenizer)

    def parser(self, conversation: Conversation, rendered: str) -> ReplyParser:
        """Return a parser for the reply to a rendered conversation. Without callable tools, all calls are text."""
        tools: dict[str, Json] = {tool.name: tool.parameters for tool in conversation.callable_tools}
        compiled = self._format_for(conversation)
        markup = compiled.markup if tools else compiled.without_calls
        parallel, answers = self._allows_parallel_calls(conversation), self.is_answer_open(conversation)
        return ReplyParser(markup, tools, opening=markup.opening(rendered), parallel=parallel, answers=answers)

    def grammar(
        self, conversation: Conversation, rendered: str, wanted: GrammarSource | None
    ) -> tuple[GrammarSource | None, bool]:
        """Return the grammar of the reply to a rendered conversation, and whether it constrains tool calls only.

        Forced calls override the `wanted` grammar. If calls are optional, the reply is a call, or text that matches
        `wanted`. Without `wanted`, only calls of strict tools are constrained, by their schemas. Reasoning may come
        first if the model may still think.
        """
        compiled, tools = self._format_for(conversation), conversation.callable_tools
        written, parallel = compiled.format, self._allows_parallel_calls(conversation)
        thinks = conversation.thinking_budget != 0 and not compiled.markup.skips_reasoning(rendered)
        reply = (written, compiled.markup.opening(rendered), tools, self._tokenizer.control_tokens)
        if conversation.use is ToolUse.FORCED:
            return _lark(call_grammar(*reply, parallel=parallel, thinks=thinks)), True
        if self.is_answer_open(conversation):
            return wanted, False
        if compiled is self._generic:
            answer = ANY_TEXT if wanted is None else wanted.as_lark()
            return _lark(answer_grammar(*reply, answer, parallel=parallel, thinks=thinks)), wanted is None
        if wanted is None and any(tool.strict for tool in tools):
            return _lark(free_grammar(*reply, parallel=parallel, thinks=thinks)), True
        if wanted is None and conversation.tools and not tools and written.calls is not None:
            return _lark(no_call_grammar(written, self._tokenizer.control_tokens)), True
        if wanted is None or (written.thinking is None and not tools):
            return wanted, False
        return _lark(answer_grammar(*reply, wanted.as_lark(), parallel=parallel, thinks=thinks)), False

    def is_answer_open(self, conversation: Conversation) -> bool:
        """Whether the prompt ends within an answer that follows an answer mark."""
        is_free = bool(conversation.reply_prefix) and conversation.use is not ToolUse.FORCED
        return is_free and self._format_for(conversation) is self._generic

    def with_loose_schemas(self, conversation: Conversation) -> Conversation | None:
        """Return the conversation with any arguments allowed for tools that are not strict.

        This is the fallback for schemas that cannot be compiled. None: the request requires the schemas.
        """
        loose = [tool if tool.strict else replace(tool, parameters=_ANY_OBJECT) for tool in conversation.callable_tools]
        is_free = conversation.use is ToolUse.FREE and self._format_for(conversation) is self._generic
        return replace(conversation, allowed=loose) if is_free and loose != conversation.callable_tools else None

    def with_thinking_budget(
        self, conversation: Conversation, rendered: str, grammar: Grammar | None
    ) -> Grammar | None:
        """Wrap a grammar of the reply, or none, with the conversation's limit of reasoning tokens."""
        budget, thinking, markup = conversation.thinking_budget, self._template.format.thinking, self._native.markup
        if budget is None or thinking is None or markup.skips_reasoning(rendered):
            return grammar
        begin, end = ([Markup(one).filled() for one in marks] for marks in (thinking.begin, thinking.end))
        marks = ReasoningMarks.of(self._tokenizer, begin, end)
        thinks = markup.thinks(markup.opening(rendered))
        return ThinkingBudget(self._tokenizer, marks, budget, grammar, thinks=thinks)

    def _format_for(self, conversation: Conversation) -> _CompiledFormat:
        """Return the format of the reply to a conversation."""
        is_generic = bool(conversation.tools) and self.tool_support is ToolSupport.GENERIC
        return self._generic if is_generic else self._native

    def _allows_parallel_calls(self, conversation: Conversation) -> bool:
        """Whether a reply may contain several calls.

        By default, only models trained to call tools may return several: other models repeat calls.
        """
        wanted = conversation.parallel_calls
        return self.tool_support is ToolSupport.NATIVE if wanted is None else wanted

    @functools.cached_property
    def _native(self) -> _CompiledFormat:
        return _CompiledFormat.of(self._template.format)

    @functools.cached_property
    def _generic(self) -> _CompiledFormat:
        return _CompiledFormat.of(generic_format(self._template.format))

    @property
    def _template(self) -> DetectedFormat:
        with self._lock:
            if self._known is None:
                self._known = _stated(self._recognized(), self._tokenizer.response_template)
            return self._known

    def _recognized(self) -> DetectedFormat:
        tokenizer = self._tokenizer
        if tokenizer.chat_template is None:
            return NO_TEMPLATE
        special = dict(tokenizer.special_tokens)
        return detect_format(tokenizer.chat_template, special, self._renderer, tokenizer.control_tokens)


def _lark(grammar: str | None) -> GrammarSource | None:
    return None if grammar is None else GrammarSource("lark", grammar)


def _stated(recognized: DetectedFormat, response_template: Mapping[str, object] | None) -> DetectedFormat:
    """Replace the parts of the detected format that the model's response template defines."""
    if response_template is None:
        return recognized
    try:
        stated = parse_response_template(response_template)
    except UnsupportedPattern as problem:
        log.info(
            "the model's response template is not supported (%s); using the format detected from its chat template",
            problem,
        )
        return recognized
    known = recognized.format
    return replace(
        recognized,
        format=replace(stated, thinking=stated.thinking or known.thinking, calls=stated.calls or known.calls),
    )
