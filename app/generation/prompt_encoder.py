"""From a conversation, or a text, to the ids of a prompt.

A rendered text is cut into control tokens and the plain texts between them. Each plain text is encoded as it stands,
except where it goes on as a model did before, after the very same beginning: there the ids that were generated stand
again, so that what was computed for them is found. Ids only ever stand for exactly the text that they replace, and for
no control token: what people wrote stays text.

Knows texts, parts and ids. Refuses to know how replies are generated, and where their ids are kept.
"""

import functools
import hashlib
import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import groupby
from operator import attrgetter

from app.errors import TemplateError
from app.generation.conversation import Conversation
from app.generation.generic_tools import ANSWER_MARK, generic_messages
from app.generation.messages import Json, Message, object_with_texts, with_texts
from app.generation.model_replies import ModelReplies
from app.generation.recent_prompts import num_common
from app.generation.stable_ids import StableIds
from app.generation.stable_ids_file import Generated
from app.generation.template import ChatTemplateRenderer, check_characters
from app.generation.template_inputs import SYSTEM_ROLES, default_variables, without_system_role
from app.text.infilling import Gap, Infilling
from app.text.long_texts import NO_LIMIT, Limit
from app.text.tokenizer import SPACE_SYMBOL, Tokenizer

PROMPTS = 4096  # whose replies may still come

_ASKED, _REPLIED = "zxqasked", "zxqreplied"  # in no template

_PROBED = 32  # characters that show whether a text is encoded with a space in front


@dataclass(frozen=True, slots=True)
class GeneratedReply:
    """What was generated after a prompt, so far."""

    prompt_ids: tuple[int, ...]
    ids: Sequence[int]  # that were generated
    told: str  # what its reader was told: the text of the ids, perhaps cut off
    continues_text: bool  # it goes on in the middle of a text, not as a turn
    stored: bool  # it may be written to disk


@dataclass(frozen=True, slots=True)
class _Beginning:
    """Where in a rendered text, and after which characters of one of its parts, something begins."""

    place: bytes  # digest of all parts before
    lead: "hashlib._Hash"  # of those, and of the characters of this part in front; not to be changed
    characters: int  # how many those are

    @classmethod
    def of(cls, place: bytes, text: str = "") -> "_Beginning":
        return cls(place, _lead(place, text), len(text))

    def behind_text(self, text: bytes) -> bytes:
        """The place after a part that goes on and ends with `text`."""
        lead = self.lead.copy()
        lead.update(text)
        return lead.digest() if self.characters or text else self.place


def _up_to(rendered: str, begun: str) -> str:
    """A rendered conversation without what closes its last message, which the reply goes on from: no thoughts and no
    channel are open there. Some templates strip the message; white space at its end stays."""
    said = begun.strip()
    place = rendered.rfind(said)
    if place < 0:
        problem = "The chat template of this model does not write what the reply is to begin with as it stands"
        raise TemplateError(problem, "Leave the assistant's message at the end out.")
    return rendered[:place] + said + begun[len(begun.rstrip()) :]


def _lead(place: bytes, text: str = "") -> "hashlib._Hash":
    """A text that begins there with `text`; if that is all of it, the place behind it."""
    return hashlib.sha256(place + b"t" + text.encode())


def _behind_control(place: bytes, token_id: int) -> bytes:
    return hashlib.sha256(place + b"c" + token_id.to_bytes(4, "little")).digest()


@dataclass(frozen=True, slots=True)
class _Prepared:
    """What a template is given of a conversation."""

    messages: Sequence[Message]
    tools: Sequence[dict[str, Json]]
    variables: dict[str, Json]
    begun: str  # the beginning of the reply


@dataclass(frozen=True, slots=True)
class _Splice:
    """A stretch of a plain text, in characters, and the ids to stand for it."""

    start: int
    stop: int
    ids: Sequence[int]


class PromptEncoder:
    """Encodes prompts for one model. Safe for several threads; all but `remember` takes a while."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        renderer: ChatTemplateRenderer,
        stable_ids: StableIds,
        *,
        generic_tools: bool = True,
    ) -> None:
        """With `generic_tools`, models without tools in their template are told of them as text."""
        self._tokenizer = tokenizer
        self._renderer = renderer
        self._stable_ids = stable_ids
        self._control_ids = frozenset(tokenizer.control_tokens.values())
        self.replies = ModelReplies(tokenizer, renderer, generic_tools=generic_tools)
        self._lock = threading.Lock()
        self._prompts: OrderedDict[int, _Beginning] = OrderedDict()  # by hash: where the reply to each begins

    def encode(self, messages: Sequence[Message], limit: Limit = NO_LIMIT) -> tuple[int, ...]:
        """The prompt for the assistant's next turn; what people wrote stays text. Raises TemplateError, and TextTooLong
        beyond the `limit`."""
        return self.encode_conversation(Conversation(messages), limit)[0]

    def encode_conversation(self, conversation: Conversation, limit: Limit = NO_LIMIT) -> tuple[tuple[int, ...], str]:
        """The same with all that a conversation says, and the text that was encoded. Also raises ToolsUnsupported, and
        TextTooLong beyond the `limit`."""
        # Every template writes what users say, so that the longest conversations need not be rendered to be refused.
        said = sum(len(message.content.strip()) for message in conversation.messages if message.role == "user")
        self._check_length(said, limit)
        try:
            rendered = self._render(conversation, limit)
        except RecursionError as error:
            problem = "The arguments of calls, tools, or template variables are nested too deeply"
            raise TemplateError(problem, "Send fewer levels.") from error
        self._check_length(len(rendered), limit)
        return self._encoded(self._tokenizer.split(rendered, rendered=True), limit), rendered

    def encode_next_turn(
        self, before: Sequence[int], conversation: Conversation, limit: Limit = NO_LIMIT
    ) -> tuple[tuple[int, ...], str]:
        """A prompt that begins with the ids `before`, which end with a reply, and goes on with a conversation.

        Returns its ids, and the text of those that are new. Raises as `encode_conversation` does, and TemplateError for
        a template that does not write the reply, or refuses one in front of the conversation.
        """
        asked, replied = Message("user", _ASKED), Message("assistant", _REPLIED)
        rendered = self._render(replace(conversation, messages=(asked, replied, *conversation.messages)), limit)
        added = rendered.partition(_REPLIED)[2]
        said = (self._tokenizer.protect(message.content).strip() for message in conversation.messages)
        if not all(text in added for text in said):
            problem = "The chat template of this model does not write these messages behind a reply"
            raise TemplateError(problem, "Send the whole conversation.")
        self._check_length(len(added), limit)
        ids = (*before, *self._tokenizer.encode_rendered(added, limit))
        limit.check_count(len(ids))
        return ids, added

    def encode_text(self, text: str, limit: Limit = NO_LIMIT) -> tuple[int, ...]:
        """A prompt that is no conversation: its text as it stands, control tokens in it included. Raises TextTooLong
        beyond the `limit`."""
        self._check_length(len(text), limit)
        return self._encoded(self._tokenizer.split(text), limit)

    def encode_mixed(self, parts: Sequence[str | int], limit: Limit = NO_LIMIT) -> tuple[int, ...]:
        """A prompt of texts, with the control tokens in them, and of ids, one after the other; nothing is put in front.
        Raises TextTooLong beyond the `limit`."""
        ids: list[int] = []
        for part in parts:
            ids += [part] if isinstance(part, int) else self._tokenizer.encode(part, parse_special=True, limit=limit)
            limit.check_count(len(ids))
        return tuple(ids)

    def encode_infill(self, infilling: Infilling, gap: Gap, limit: Limit = NO_LIMIT) -> tuple[int, ...]:
        """A prompt for what is missing between two texts, which stay text whatever they spell. Raises TextTooLong
        beyond the `limit`."""
        self._check_length(gap.characters, limit)
        return self._encoded(infilling.parts(gap), limit)

    def remember(self, reply: GeneratedReply) -> None:
        """Have the ids of `reply` stand wherever its text goes on its prompt again. Returns at once."""
        if reply.ids:
            self._stable_ids.remember(functools.partial(self._generated, reply))

    def forget(self, messages: Sequence[Message], limit: Limit = NO_LIMIT) -> None:
        """Forget, on disk as well, what was generated in a conversation."""
        leads: set[bytes] = set()
        for end in range(1, len(messages) + 1):
            if end == len(messages) or messages[end].role == "assistant":
                with suppress(TemplateError):  # then nothing was generated there, either
                    rendered = self._render(Conversation(messages[:end]), limit)
                    parts = self._tokenizer.split(rendered, rendered=True)
                    for _, _, behind in self._walk(parts):
                        leads |= {behind, _Beginning.of(behind).lead.digest()}
        self._stable_ids.forget(leads)

    def _render(self, conversation: Conversation, limit: Limit) -> str:
        """A model without a template does not know turns: it continues the text of the conversation."""
        check_characters([*conversation.messages, Message("assistant", conversation.begun)])

        def protect(text: str) -> str:
            limit.check()
            return self._tokenizer.protect(text)

        self.replies.check(conversation)
        told = self._prepared(conversation, protect)
        limit.check()
        if self._tokenizer.chat_template is None:
            return "\n\n".join([*(message.content for message in told.messages), *([told.begun] if told.begun else ())])
        if not told.begun.strip():
            return self._by_template(told, asks=conversation.add_generation_prompt or bool(told.begun)) + told.begun
        begun = Message("assistant", told.begun)
        return _up_to(self._by_template(replace(told, messages=[*told.messages, begun]), asks=False), told.begun)

    def _prepared(self, conversation: Conversation, protect: Callable[[str], str]) -> _Prepared:
        """A conversation without control tokens in what people wrote, in roles that the template takes."""
        messages: Sequence[Message] = [message.with_texts(protect) for message in conversation.messages]
        tools = [object_with_texts(tool.definition, protect, fields=True) for tool in conversation.tools]
        variables = {name: with_texts(value, protect, fields=True) for name, value in conversation.variables.items()}
        begun = protect(conversation.begun)
        if self.replies.tells_generically(conversation):
            messages = generic_messages(messages, tools)
            begun = ANSWER_MARK + begun if self.replies.has_answer_begun(conversation) else begun
            tools = []
        if any(message.role in SYSTEM_ROLES for message in messages) and not self.replies.takes_system:
            messages = [*without_system_role(messages)]
        return _Prepared(messages, tools, variables, begun)

    def _by_template(self, told: _Prepared, *, asks: bool) -> str:
        """What the template makes of a conversation; and, if it `asks`, what the reply begins behind."""
        return self._renderer.render(
            self._tokenizer.chat_template or "",
            told.messages,
            tools=told.tools or None,
            variables=default_variables(self._renderer.now()) | told.variables | dict(self._tokenizer.special_tokens),
            add_generation_prompt=asks,
            arguments_as_text=any(message.tool_calls for message in told.messages) and self.replies.arguments_as_text,
        )

    def _check_length(self, characters: int, limit: Limit) -> None:
        limit.check_characters(characters, self._tokenizer.longest_token)

    def _begun(self, ids: list[int]) -> tuple[int, ...]:
        """`ids` behind the token that begins a text, where the model wants one and the ids have none."""
        bos_id = self._tokenizer.bos_id
        missing = self._tokenizer.add_bos and bos_id is not None and ids[:1] != [bos_id]
        return (bos_id, *ids) if missing and bos_id is not None else tuple(ids)

    def _encoded(self, parts: Iterable[int | str], limit: Limit) -> tuple[int, ...]:
        ids: list[int] = []
        last: tuple[int | str, bytes, bytes] = (0, b"", self._tokenizer.identity)
        for last in self._walk(parts):
            part, before, _ = last
            if isinstance(part, int):
                ids.append(part)
            else:
                ids.extend(self._plain(before, part, limit, at_start=not ids))
            limit.check_count(len(ids))
        part, before, behind = last
        end = _Beginning.of(behind) if isinstance(part, int) else _Beginning.of(before, part)
        prompt_ids = self._begun(ids)
        with self._lock:
            self._prompts[hash(prompt_ids)] = end
            self._prompts.move_to_end(hash(prompt_ids))
            if len(self._prompts) > PROMPTS:
                self._prompts.popitem(last=False)
        return prompt_ids

    def _walk(self, parts: Iterable[int | str]) -> Iterator[tuple[int | str, bytes, bytes]]:
        """Each part with the places before and behind it."""
        behind = self._tokenizer.identity
        for part in parts:
            before = behind
            behind = _behind_control(before, part) if isinstance(part, int) else _lead(before, part).digest()
            yield part, before, behind

    def _plain(self, place: bytes, text: str, limit: Limit, *, at_start: bool) -> Sequence[int]:
        """The ids of a plain text."""
        ids, done = array("I"), 0
        for splice in (*self._splices(place, text, at_start=at_start), _Splice(len(text), len(text), ())):
            if done < splice.start:
                between = text[done : splice.start]
                encoded = self._encoded_between(between, limit, at_start=at_start, continues=bool(ids))
                if encoded is None:
                    return self._tokenizer.encode_plain(text, at_start=at_start, limit=limit)
                ids.extend(encoded)
            ids.extend(splice.ids)
            done = splice.stop
        return ids

    def _encoded_between(self, text: str, limit: Limit, *, at_start: bool, continues: bool) -> Sequence[int] | None:
        if continues:
            return self._tokenizer.encode_continuation(text, limit)
        return self._tokenizer.encode_plain(text, at_start=at_start, limit=limit)

    def _splices(self, place: bytes, text: str, *, at_start: bool) -> list[_Splice]:
        """From left to right. The file is asked only where memory has nothing that fits."""
        for find in (self._stable_ids.find, self._stable_ids.find_stored):
            if (generated := find(place)) and (splices := [*self._fitting(place, text, generated, at_start=at_start)]):
                return splices
        return []

    def _fitting(self, place: bytes, text: str, generated: Sequence[Generated], *, at_start: bool) -> Iterator[_Splice]:
        """Of what was generated at `place`, the longest that fits behind each beginning of `text`."""
        lead, hashed, done = _lead(place), 0, 0
        characters = attrgetter("lead_characters")
        for start, several in groupby(sorted(generated, key=characters), characters):
            if not done <= start < len(text):
                continue
            lead.update(text[hashed:start].encode())
            hashed, digest = start, lead.digest()
            rest, added = b"", b"" if start else self._prefix(text, at_start=at_start)
            best, longest = None, (1, 0)
            for one in several:
                if one.lead == digest:
                    rest = rest or added + text[start:].encode()
                    if (found := self._match(one, rest))[0] >= longest[0]:
                        best, longest = one, found
            if best is not None:
                self._stable_ids.use(best)
                size, count = longest
                done = start + len(rest[:size].decode()) - len(added)
                yield _Splice(start, done, best.ids[:count])

    def _prefix(self, text: str, *, at_start: bool) -> bytes:
        """What a plain text is encoded with in front of its own characters: a space, or nothing."""
        if text.startswith((" ", SPACE_SYMBOL)):
            return b""
        first = self._tokenizer.encode_plain(text[:_PROBED], at_start=at_start)[0]
        return b" " if self._tokenizer.token_bytes(first).startswith(b" ") else b""

    def _match(self, generated: Generated, rest: bytes) -> tuple[int, int]:
        """How many bytes `rest` has in common with what was generated, and of how many ids: (0, 0) where it is no
        longer that reply. Both may go on differently with white space alone, which templates and clients take away, and
        either may have been cut off."""
        text = self._text(generated)
        common = len(text) if rest.startswith(text) else num_common(rest, text)
        if rest[common:].strip() and text[common:].strip():
            return 0, 0
        if common == len(text) and _is_boundary(rest, common):
            return common, len(generated.ids)
        size = reached = count = 0
        for number, token_id in enumerate(generated.ids, 1):
            reached += len(self._tokenizer.plain_bytes(token_id))
            if reached > common:
                break
            if _is_boundary(rest, reached):
                size, count = reached, number
        return size, count

    def _text(self, generated: Generated) -> bytes:
        """What its ids stand for: nothing, if one of them is not a part of plain text."""
        if generated.text is None:
            pieces = [self._tokenizer.plain_bytes(token_id) for token_id in generated.ids]
            generated.text = b"".join(pieces) if all(pieces) else b""
        return generated.text

    def _generated(self, reply: GeneratedReply) -> Iterator[Generated]:
        """The reply, cut at its control tokens, as far as its ids stand for what its reader was told."""
        with self._lock:
            beginning = self._prompts.get(hash(reply.prompt_ids))
        if beginning is None:
            return
        told = self._told(reply)
        ids, start, stop = array("I"), 0, 0
        for token_id in reply.ids:
            encoded = self._tokenizer.plain_bytes(token_id)
            if encoded and told.startswith(encoded, stop):
                ids.append(token_id)
                stop += len(encoded)
            elif token_id in self._control_ids:
                yield from self._piece(beginning, ids, told[start:stop], stored=reply.stored)
                beginning = _Beginning.of(_behind_control(beginning.behind_text(told[start:stop]), token_id))
                shown = self._tokenizer.token_bytes(token_id, show_control=True)
                stop += len(shown) if told.startswith(shown, stop) else 0
                ids, start = array("I"), stop
            else:
                break
        yield from self._piece(beginning, ids, told[start:stop], stored=reply.stored)

    def _piece(self, beginning: _Beginning, ids: "array[int]", text: bytes, *, stored: bool) -> Iterator[Generated]:
        if ids:
            place, lead = beginning.place, beginning.lead.digest()
            yield Generated(place, lead, beginning.characters, ids, stored, text=text)

    def _told(self, reply: GeneratedReply) -> bytes:
        """What the reader was told, with the space that was taken off."""
        told = reply.told.encode()
        if not self._tokenizer.space_prefix or reply.continues_text:
            return told
        first = next(filter(None, map(self._tokenizer.token_bytes, reply.ids)), b"")
        return b" " + told if first.startswith(b" ") else told


def _is_boundary(encoded: bytes, position: int) -> bool:
    """Whether no character of this UTF-8 goes on at `position`."""
    return position >= len(encoded) or encoded[position] & 0xC0 != 0x80
