"""Prompt encoder: converts a conversation or a text to token ids.

The chat template renders a conversation. The rendered text is split into control tokens and plain text, and the plain
text is encoded. Text that a user wrote never becomes a control token.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime

from app.errors import TemplateError
from app.generation.conversation import (
    SYSTEM_ROLES,
    Conversation,
    Json,
    Message,
    merge_system_messages,
    object_with_texts,
    with_texts,
)
from app.generation.generic_tools import ANSWER_MARK, generic_messages
from app.generation.model_format import ModelFormat
from app.generation.remembered_replies import GeneratedReply, RememberedReplies
from app.generation.reply_token_cache import ReplyTokenCache
from app.generation.template import ChatTemplateRenderer, check_characters
from app.text.infilling import Gap, Infilling
from app.text.long_texts import NO_LIMIT, TextLimit
from app.text.tokenizer import Tokenizer

_ASKED, _REPLIED = "zxqasked", "zxqreplied"  # texts that occur in no template


def _up_to(rendered: str, reply_prefix: str) -> str:
    """Cut a rendered conversation after `reply_prefix`, its last message, so that the model continues that message.

    Some templates strip the message. White space at its end is kept.
    """
    stripped = reply_prefix.strip()
    start = rendered.rfind(stripped)
    if start < 0:
        problem = "The chat template of this model changes the text that the reply is to continue"
        raise TemplateError(problem, "Remove the assistant message at the end.")
    return rendered[:start] + stripped + reply_prefix[len(reply_prefix.rstrip()) :]


@dataclass(frozen=True, slots=True)
class _TemplateInput:
    """The input of a chat template."""

    messages: Sequence[Message]
    tools: Sequence[dict[str, Json]]
    variables: dict[str, Json]
    reply_prefix: str  # start of the reply


def _default_variables(now: datetime) -> dict[str, Json]:
    """Return the variables that every template gets. `now` is local time.

    Thinking is on by default: many templates write an empty reasoning block if `enable_thinking` is undefined.
    `datetime` is only the date, because a time of day would prevent prefix matches between prompts.
    """
    return {
        "enable_thinking": True,
        "date_string": now.strftime("%d %b %Y"),
        "datetime": now.strftime("%b %d %Y"),
        "functions": "",  # Firefunction fails without it
    }


class PromptEncoder:
    """Encodes prompts for one model. Thread-safe. All methods except `remember` are slow."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        renderer: ChatTemplateRenderer,
        reply_tokens: ReplyTokenCache,
        *,
        generic_tools: bool = True,
    ) -> None:
        """`generic_tools` presents tools as text to a model whose template does not support them."""
        self._tokenizer = tokenizer
        self._renderer = renderer
        self._remembered = RememberedReplies(tokenizer, reply_tokens)
        self.format = ModelFormat(tokenizer, renderer, generic_tools=generic_tools)

    def encode(self, messages: Sequence[Message], limit: TextLimit = NO_LIMIT) -> tuple[int, ...]:
        """Return the prompt for the assistant's next turn. Raises TemplateError, and TextTooLong beyond the `limit`."""
        return self.encode_conversation(Conversation(messages), limit)[0]

    def encode_conversation(
        self, conversation: Conversation, limit: TextLimit = NO_LIMIT
    ) -> tuple[tuple[int, ...], str]:
        """Return the prompt for the next turn of a conversation, and the text that was encoded.

        Raises TemplateError, ToolsUnsupported, and TextTooLong beyond the `limit`.
        """
        # Every template includes the user messages, so a conversation that is too long is refused before it is
        # rendered.
        characters = sum(len(message.content.strip()) for message in conversation.messages if message.role == "user")
        self._check_length(characters, limit)
        try:
            rendered = self._render(conversation, limit)
        except RecursionError as error:
            problem = "The arguments of calls, tools, or template variables are nested too deeply"
            raise TemplateError(problem, "Reduce the nesting.") from error
        self._check_length(len(rendered), limit)
        return self._encoded(self._tokenizer.split(rendered, rendered=True), limit), rendered

    def encode_next_turn(
        self, before: Sequence[int], conversation: Conversation, limit: TextLimit = NO_LIMIT
    ) -> tuple[tuple[int, ...], str]:
        """Return the prompt for a conversation that follows the ids `before`, and the text of the new ids.

        `before` ends with a reply. Raises what `encode_conversation` raises, and TemplateError if the template omits
        the reply or cannot render these messages after one.
        """
        question, reply = Message("user", _ASKED), Message("assistant", _REPLIED)
        rendered = self._render(replace(conversation, messages=(question, reply, *conversation.messages)), limit)
        added = rendered.partition(_REPLIED)[2]
        texts = (self._tokenizer.protect(message.content).strip() for message in conversation.messages)
        if not all(text in added for text in texts):
            problem = "The chat template of this model cannot render these messages after a reply"
            raise TemplateError(problem, "Send the whole conversation.")
        self._check_length(len(added), limit)
        ids = (*before, *self._tokenizer.encode_rendered(added, limit))
        limit.check_count(len(ids))
        return ids, added

    def encode_text(self, text: str, limit: TextLimit = NO_LIMIT) -> tuple[int, ...]:
        """Return the ids of a text that is not a conversation. Control tokens in it are parsed.

        Raises TextTooLong beyond the `limit`.
        """
        self._check_length(len(text), limit)
        return self._encoded(self._tokenizer.split(text), limit)

    def encode_mixed(self, parts: Sequence[str | int], limit: TextLimit = NO_LIMIT) -> tuple[int, ...]:
        """Return the ids of a sequence of texts and ids. Control tokens in the texts are parsed. No BOS token is added.

        Raises TextTooLong beyond the `limit`.
        """
        ids: list[int] = []
        for part in parts:
            ids += [part] if isinstance(part, int) else self._tokenizer.encode(part, parse_special=True, limit=limit)
            limit.check_count(len(ids))
        return tuple(ids)

    def encode_infill(self, infilling: Infilling, gap: Gap, limit: TextLimit = NO_LIMIT) -> tuple[int, ...]:
        """Return a prompt for the text between two others, in which no control tokens are parsed.

        Raises TextTooLong beyond the `limit`.
        """
        self._check_length(gap.characters, limit)
        return self._encoded(infilling.parts(gap), limit)

    def remember(self, reply: GeneratedReply) -> None:
        """Use the ids of `reply` instead of its text in later prompts. Returns at once."""
        self._remembered.remember(reply)

    def forget(self, messages: Sequence[Message], limit: TextLimit = NO_LIMIT) -> None:
        """Forget the generated replies of a conversation, also on disk."""
        self._remembered.forget(self._turns(messages, limit))

    def _turns(self, messages: Sequence[Message], limit: TextLimit) -> Iterator[Iterable[int | str]]:
        """Yield the split text of each earlier prompt that led to a reply, and of the whole conversation."""
        for end in range(1, len(messages) + 1):
            if end == len(messages) or messages[end].role == "assistant":
                with suppress(TemplateError):  # a prompt that the template refuses led to no reply
                    rendered = self._render(Conversation(messages[:end]), limit)
                    yield self._tokenizer.split(rendered, rendered=True)

    def _render(self, conversation: Conversation, limit: TextLimit) -> str:
        """Render a conversation. Without a chat template, the text of the messages is continued."""
        check_characters([*conversation.messages, Message("assistant", conversation.reply_prefix)])

        def protect(text: str) -> str:
            limit.check()
            return self._tokenizer.protect(text)

        self.format.check_tools(conversation)
        given = self._template_input(conversation, protect)
        limit.check()
        prefix = given.reply_prefix
        if self._tokenizer.chat_template is None:
            return "\n\n".join([*(message.content for message in given.messages), *([prefix] if prefix else ())])
        if not prefix.strip():
            return self._by_template(given, asks=conversation.add_generation_prompt or bool(prefix)) + prefix
        messages = [*given.messages, Message("assistant", prefix)]
        return _up_to(self._by_template(replace(given, messages=messages), asks=False), prefix)

    def _template_input(self, conversation: Conversation, protect: Callable[[str], str]) -> _TemplateInput:
        """Prepare a conversation for the template: protect untrusted text, and convert unsupported tools and roles."""
        messages: Sequence[Message] = [message.with_texts(protect) for message in conversation.messages]
        tools = [object_with_texts(tool.definition, protect, fields=True) for tool in conversation.tools]
        variables = {name: with_texts(value, protect, fields=True) for name, value in conversation.variables.items()}
        reply_prefix = protect(conversation.reply_prefix)
        if self.format.uses_generic_tools(conversation):
            messages = generic_messages(messages, tools)
            reply_prefix = ANSWER_MARK + reply_prefix if self.format.is_answer_open(conversation) else reply_prefix
            tools = []
        if any(message.role in SYSTEM_ROLES for message in messages) and not self.format.takes_system:
            messages = [*merge_system_messages(messages)]
        return _TemplateInput(messages, tools, variables, reply_prefix)

    def _by_template(self, given: _TemplateInput, *, asks: bool) -> str:
        """Render a conversation. With `asks`, the text ends where the reply starts."""
        defaults, special = _default_variables(self._renderer.now()), dict(self._tokenizer.special_tokens)
        has_calls = any(message.tool_calls for message in given.messages)
        return self._renderer.render(
            self._tokenizer.chat_template or "",
            given.messages,
            tools=given.tools or None,
            variables=defaults | given.variables | special,
            add_generation_prompt=asks,
            arguments_as_text=has_calls and self.format.arguments_as_text,
        )

    def _check_length(self, characters: int, limit: TextLimit) -> None:
        limit.check_characters(characters, self._tokenizer.longest_token)

    def _with_bos(self, ids: list[int]) -> tuple[int, ...]:
        """Prepend the BOS token if the model expects one and `ids` has none."""
        bos_id = self._tokenizer.bos_id
        missing = self._tokenizer.add_bos and bos_id is not None and ids[:1] != [bos_id]
        return (bos_id, *ids) if missing and bos_id is not None else tuple(ids)

    def _encoded(self, parts: Iterable[int | str], limit: TextLimit) -> tuple[int, ...]:
        ids, end = self._remembered.encode(parts, limit)
        prompt_ids = self._with_bos(ids)
        self._remembered.note_prompt(prompt_ids, end)
        return prompt_ids
