"""How one model's replies are read, by its response template or its chat template.

Knows a template's format of replies, once somebody asks for it. Refuses to know where prompts and tokens come from.
"""

import functools
import logging
import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace

from app.chat.conversation import Conversation, ToolUse
from app.chat.grammars import GrammarSource
from app.chat.messages import Json
from app.chat.reply_formats.anchor_pattern import NotUnderstood
from app.chat.reply_formats.markup import Markup
from app.chat.reply_formats.recognition import NO_TEMPLATE, TemplateReplies, replies_of
from app.chat.reply_formats.reply_grammar import answer_grammar, call_grammar, free_grammar, no_call_grammar
from app.chat.reply_formats.reply_parser import FormatMarkup, ReplyParser
from app.chat.reply_formats.response_template import format_of
from app.chat.template import ChatTemplateRenderer
from app.chat.thinking_budget import ThinkingBudget, ThoughtMarks
from app.errors import ToolsUnsupported
from app.text.tokenizer import Tokenizer
from engine.constraint import Grammar

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A prompt for a model's next turn, and how that is to be read."""

    ids: tuple[int, ...]
    _replies: "ModelReplies"
    _conversation: Conversation
    _rendered: str

    def new_parser(self) -> ReplyParser:
        return self._replies.parser(self._conversation, self._rendered)

    def grammar(self, asked: GrammarSource | None) -> tuple[GrammarSource | None, bool]:
        """From the grammar that was asked for to that of the reply, and whether it is there for calls alone."""
        return self._replies.grammar(self._conversation, self._rendered, asked)

    def within_budget(self, grammar: Grammar | None) -> Grammar | None:
        """From a grammar, or none, to one that keeps to the limit of thoughts as well."""
        return self._replies.within_budget(self._conversation, self._rendered, grammar)


@dataclass(frozen=True, slots=True)
class Abilities:
    """What a model can be asked for besides text."""

    tools: bool  # calls of tools
    thinking: bool  # before it answers, apart from the answer
    insertion: bool  # what is missing between two texts


class ModelReplies:
    """Safe for several threads. What is asked first waits for a few renderings; any may raise TemplateUnavailable."""

    def __init__(self, tokenizer: Tokenizer, renderer: ChatTemplateRenderer) -> None:
        self._tokenizer = tokenizer
        self._renderer = renderer
        self._lock = threading.Lock()
        self._known: TemplateReplies | None = None

    @property
    def arguments_as_text(self) -> bool:
        """The template wants the arguments of a call as text."""
        return self._template.arguments_as_text

    @property
    def calls_tools(self) -> bool:
        """It hears of tools, and how it calls them is known."""
        return self._template.takes_tools and self._template.format.calls is not None

    @property
    def thinks(self) -> bool:
        """Its thoughts come apart from its answer."""
        return self._template.format.thinking is not None

    def check(self, conversation: Conversation) -> None:
        """Raise ToolsUnsupported for tools that the model would not hear of, or could not be heard to call."""
        if not conversation.callable_tools:
            return
        template = self._template
        if not template.takes_tools:
            raise ToolsUnsupported(
                "The chat template of this model has no place for tools", "Choose a model that can call them."
            )
        if template.format.calls is None:
            raise ToolsUnsupported(
                "How this model writes calls of tools is not known",
                "Choose another file of this model, or another model.",
            )

    def parser(self, conversation: Conversation, rendered: str) -> ReplyParser:
        """Of the reply to a rendered conversation. Without tools that may be called, what looks like a call is
        text."""
        tools: dict[str, Json] = {tool.name: tool.parameters for tool in conversation.callable_tools}
        markup = self._markup if tools else self._uncalled
        return ReplyParser(markup, tools, opening=markup.opening(rendered), parallel=conversation.parallel_calls)

    def grammar(
        self, conversation: Conversation, rendered: str, asked: GrammarSource | None
    ) -> tuple[GrammarSource | None, bool]:
        """The grammar of the reply to a rendered conversation, and whether it is there for calls alone. Forced calls
        count more than what was `asked` for; those that the model is free to make come in its place, or keep to the
        schemas of strict tools; those that it may not make, do not come. Thoughts come before all of it, where the
        model may still think."""
        written, tools = self._template.format, conversation.callable_tools
        thinks = conversation.thinking_budget != 0 and not self._markup.has_thought(rendered)
        reply = (written, self._markup.opening(rendered), tools, self._tokenizer.control_tokens)
        if conversation.use is ToolUse.FORCED:
            return _lark(call_grammar(*reply, parallel=conversation.parallel_calls, thinks=thinks)), True
        if asked is None and any(tool.strict for tool in tools):
            return _lark(free_grammar(*reply, parallel=conversation.parallel_calls, thinks=thinks)), True
        if asked is None and conversation.tools and not tools and written.calls is not None:
            return _lark(no_call_grammar(written, self._tokenizer.control_tokens)), True
        if asked is None or (written.thinking is None and not tools):
            return asked, False
        return _lark(
            answer_grammar(*reply, asked.as_lark(), parallel=conversation.parallel_calls, thinks=thinks)
        ), False

    def within_budget(self, conversation: Conversation, rendered: str, grammar: Grammar | None) -> Grammar | None:
        """A grammar of the reply, or none, with the limit that the conversation sets to thoughts."""
        budget, thinking = conversation.thinking_budget, self._template.format.thinking
        if budget is None or thinking is None or self._markup.has_thought(rendered):
            return grammar
        begin, end = ([Markup(one).filled() for one in marks] for marks in (thinking.begin, thinking.end))
        marks = ThoughtMarks.of(self._tokenizer, begin, end)
        thinks = self._markup.thinks(self._markup.opening(rendered))
        return ThinkingBudget(self._tokenizer, marks, budget, grammar, thinks=thinks)

    @functools.cached_property
    def _markup(self) -> FormatMarkup:
        return FormatMarkup(self._template.format)

    @functools.cached_property
    def _uncalled(self) -> FormatMarkup:
        return FormatMarkup(self._template.format.without_calls())

    @property
    def _template(self) -> TemplateReplies:
        with self._lock:
            if self._known is None:
                self._known = _stated(self._recognized(), self._tokenizer.response_template)
            return self._known

    def _recognized(self) -> TemplateReplies:
        tokenizer = self._tokenizer
        if tokenizer.chat_template is None:
            return NO_TEMPLATE
        special = dict(tokenizer.special_tokens)
        return replies_of(tokenizer.chat_template, special, self._renderer, tokenizer.control_tokens)


def _lark(grammar: str | None) -> GrammarSource | None:
    return None if grammar is None else GrammarSource("lark", grammar)


def _stated(recognized: TemplateReplies, response_template: Mapping[str, object] | None) -> TemplateReplies:
    """With the format that the model's response template states, if it has one; of what that says nothing, the other
    stays."""
    if response_template is None:
        return recognized
    try:
        stated = format_of(response_template)
    except NotUnderstood as problem:
        log.info(
            "the model's response template is not understood (%s): its chat template tells how it replies", problem
        )
        return recognized
    known = recognized.format
    return replace(
        recognized,
        format=replace(stated, thinking=stated.thinking or known.thinking, calls=stated.calls or known.calls),
    )
