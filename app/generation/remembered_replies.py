"""Earlier replies in a prompt: their texts are replaced by the ids that the model generated.

Encoding the text of a reply may give other ids than the model generated, and then the KV cache misses. A text is
replaced only if it equals what its ids decode to, and only after the same position. Control tokens are never replaced.
"""

import functools
import hashlib
import threading
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter

from app.generation.recent_prompts import common_prefix_len
from app.generation.reply_token_cache import ReplyTokenCache
from app.generation.reply_token_file import TokenSpan
from app.text.long_texts import TextLimit
from app.text.tokenizer import SPACE_SYMBOL, Tokenizer

PROMPTS = 4096  # that replies are remembered for, the latest ones
_PROBED = 32  # characters that show whether a text is encoded with a space in front


@dataclass(frozen=True, slots=True)
class GeneratedReply:
    """A prompt and its reply so far."""

    prompt_ids: tuple[int, ...]
    ids: Sequence[int]  # of the reply
    text: str  # the text that the caller got, which may end before that of the ids
    continues_text: bool  # the reply continues a text, not a conversation
    stored: bool  # False: it must not be written to disk


@dataclass(frozen=True, slots=True)
class TextPosition:
    """A position in a rendered text: its part, and the characters of that part before the position."""

    part_key: bytes  # digest of all parts before
    prefix_hash: "hashlib._Hash"  # of those parts and of the characters; to be copied before an update
    characters: int  # of this part, before the position

    @classmethod
    def of(cls, part_key: bytes, text: str = "") -> "TextPosition":
        return cls(part_key, _prefix_hash(part_key, text), len(text))

    def key_after_text(self, text: bytes) -> bytes:
        """The digest of all parts up to this one, which ends with `text` after the position."""
        prefix_hash = self.prefix_hash.copy()
        prefix_hash.update(text)
        return prefix_hash.digest() if self.characters or text else self.part_key


def _prefix_hash(part_key: bytes, text: str = "") -> "hashlib._Hash":
    """Hash the parts before and the first characters of a text; for a whole text, the digest after it."""
    return hashlib.sha256(part_key + b"t" + text.encode())


def _key_after_control(part_key: bytes, token_id: int) -> bytes:
    return hashlib.sha256(part_key + b"c" + token_id.to_bytes(4, "little")).digest()


@dataclass(frozen=True, slots=True)
class _Splice:
    """A range of characters of a plain text, and the ids that replace it."""

    start: int
    stop: int
    ids: Sequence[int]


class RememberedReplies:
    """Encodes plain texts for one model, with the ids of earlier replies. Safe for several threads; all methods but
    `remember` take a while."""

    def __init__(self, tokenizer: Tokenizer, reply_tokens: ReplyTokenCache) -> None:
        self._tokenizer = tokenizer
        self._reply_tokens = reply_tokens
        self._control_ids = frozenset(tokenizer.control_tokens.values())
        self._lock = threading.Lock()
        self._prompts: OrderedDict[int, TextPosition] = OrderedDict()  # by hash: where the reply to each begins

    def encode(self, parts: Iterable[int | str], limit: TextLimit) -> tuple[list[int], TextPosition]:
        """The ids of a text, given as parts, and the position after it. Raises TextTooLong beyond the `limit`."""
        ids: list[int] = []
        last: tuple[int | str, bytes, bytes] = (0, b"", self._tokenizer.fingerprint)
        for last in self._walk(parts):
            part, before, _ = last
            if isinstance(part, int):
                ids.append(part)
            else:
                ids.extend(self._plain(before, part, limit, at_start=not ids))
            limit.check_count(len(ids))
        part, before, after = last
        end = TextPosition.of(after) if isinstance(part, int) else TextPosition.of(before, part)
        return ids, end

    def note_prompt(self, prompt_ids: tuple[int, ...], end: TextPosition) -> None:
        """Note the `end` of a prompt's text, where its reply will begin."""
        with self._lock:
            self._prompts[hash(prompt_ids)] = end
            self._prompts.move_to_end(hash(prompt_ids))
            if len(self._prompts) > PROMPTS:
                self._prompts.popitem(last=False)

    def remember(self, reply: GeneratedReply) -> None:
        """Replace the text of `reply` by its ids wherever it follows its prompt again. Returns at once."""
        if reply.ids:
            self._reply_tokens.remember(functools.partial(self._spans, reply))

    def forget(self, prompts: Iterable[Iterable[int | str]]) -> None:
        """Forget the replies after any part of these prompts, on disk as well."""
        prefix_keys: set[bytes] = set()
        for parts in prompts:
            for _, _, after in self._walk(parts):
                prefix_keys |= {after, TextPosition.of(after).prefix_hash.digest()}
        self._reply_tokens.forget(prefix_keys)

    def _walk(self, parts: Iterable[int | str]) -> Iterator[tuple[int | str, bytes, bytes]]:
        """Each part with the digests before and after it."""
        after = self._tokenizer.fingerprint
        for part in parts:
            before = after
            after = _key_after_control(before, part) if isinstance(part, int) else _prefix_hash(before, part).digest()
            yield part, before, after

    def _plain(self, part_key: bytes, text: str, limit: TextLimit, *, at_start: bool) -> Sequence[int]:
        """The ids of a plain text."""
        ids, done = array("I"), 0
        for splice in (*self._splices(part_key, text, at_start=at_start), _Splice(len(text), len(text), ())):
            if done < splice.start:
                between = text[done : splice.start]
                encoded = self._encoded_between(between, limit, at_start=at_start, continues=bool(ids))
                if encoded is None:
                    return self._tokenizer.encode_plain(text, at_start=at_start, limit=limit)
                ids.extend(encoded)
            ids.extend(splice.ids)
            done = splice.stop
        return ids

    def _encoded_between(self, text: str, limit: TextLimit, *, at_start: bool, continues: bool) -> Sequence[int] | None:
        if continues:
            return self._tokenizer.encode_continuation(text, limit)
        return self._tokenizer.encode_plain(text, at_start=at_start, limit=limit)

    def _splices(self, part_key: bytes, text: str, *, at_start: bool) -> list[_Splice]:
        """The ranges to replace, from left to right. Reads the file only if memory has no reply that fits."""
        for find in (self._reply_tokens.find, self._reply_tokens.find_stored):
            spans = find(part_key)
            if spans and (splices := [*self._fitting(part_key, text, spans, at_start=at_start)]):
                return splices
        return []

    def _fitting(self, part_key: bytes, text: str, spans: Sequence[TokenSpan], *, at_start: bool) -> Iterator[_Splice]:
        """For each position in `text` with spans, the longest span that fits there."""
        prefix_hash, hashed, done = _prefix_hash(part_key), 0, 0
        characters = attrgetter("prefix_characters")
        for start, several in groupby(sorted(spans, key=characters), characters):
            if not done <= start < len(text):
                continue
            prefix_hash.update(text[hashed:start].encode())
            hashed, digest = start, prefix_hash.digest()
            rest, added = b"", b"" if start else self._prefix(text, at_start=at_start)
            best, longest = None, (1, 0)
            for one in several:
                if one.prefix_key == digest:
                    rest = rest or added + text[start:].encode()
                    if (found := self._match(one, rest))[0] >= longest[0]:
                        best, longest = one, found
            if best is not None:
                self._reply_tokens.use(best)
                size, count = longest
                done = start + len(rest[:size].decode()) - len(added)
                yield _Splice(start, done, best.ids[:count])

    def _prefix(self, text: str, *, at_start: bool) -> bytes:
        """The space that the tokenizer puts in front of a plain text, or nothing."""
        if text.startswith((" ", SPACE_SYMBOL)):
            return b""
        first = self._tokenizer.encode_plain(text[:_PROBED], at_start=at_start)[0]
        return b" " if self._tokenizer.token_bytes(first).startswith(b" ") else b""

    def _match(self, span: TokenSpan, rest: bytes) -> tuple[int, int]:
        """The number of bytes that `rest` shares with a reply, and of the ids for them; (0, 0) if it is another text.

        Either may have been cut off. Otherwise both may differ only in white space at the end, which templates and
        clients strip.
        """
        text = self._text(span)
        common = len(text) if rest.startswith(text) else common_prefix_len(rest, text)
        if rest[common:].strip() and text[common:].strip():
            return 0, 0
        if common == len(text) and _is_boundary(rest, common):
            return common, len(span.ids)
        size = reached = count = 0
        for number, token_id in enumerate(span.ids, 1):
            reached += len(self._tokenizer.plain_bytes(token_id))
            if reached > common:
                break
            if _is_boundary(rest, reached):
                size, count = reached, number
        return size, count

    def _text(self, span: TokenSpan) -> bytes:
        """The text of its ids; empty if one of them is not plain text."""
        if span.text is None:
            pieces = [self._tokenizer.plain_bytes(token_id) for token_id in span.ids]
            span.text = b"".join(pieces) if all(pieces) else b""
        return span.text

    def _spans(self, reply: GeneratedReply) -> Iterator[TokenSpan]:
        """The pieces of the reply between its control tokens, as far as its ids decode to the caller's text."""
        with self._lock:
            position = self._prompts.get(hash(reply.prompt_ids))
        if position is None:
            return
        text = self._encoded_text(reply)
        ids, start, stop = array("I"), 0, 0
        for token_id in reply.ids:
            encoded = self._tokenizer.plain_bytes(token_id)
            if encoded and text.startswith(encoded, stop):
                ids.append(token_id)
                stop += len(encoded)
            elif token_id in self._control_ids:
                yield from self._piece(position, ids, text[start:stop], stored=reply.stored)
                position = TextPosition.of(_key_after_control(position.key_after_text(text[start:stop]), token_id))
                shown = self._tokenizer.token_bytes(token_id, show_control=True)
                stop += len(shown) if text.startswith(shown, stop) else 0
                ids, start = array("I"), stop
            else:
                break
        yield from self._piece(position, ids, text[start:stop], stored=reply.stored)

    def _piece(self, position: TextPosition, ids: "array[int]", text: bytes, *, stored: bool) -> Iterator[TokenSpan]:
        if ids:
            prefix_key = position.prefix_hash.digest()
            yield TokenSpan(position.part_key, prefix_key, position.characters, ids, stored, text=text)

    def _encoded_text(self, reply: GeneratedReply) -> bytes:
        """The caller's text, with the space that was taken off its position."""
        text = reply.text.encode()
        if not self._tokenizer.space_prefix or reply.continues_text:
            return text
        first = next(filter(None, map(self._tokenizer.token_bytes, reply.ids)), b"")
        return b" " + text if first.startswith(b" ") else text


def _is_boundary(encoded: bytes, position: int) -> bool:
    """Whether no character of this UTF-8 goes on at `position`."""
    return position >= len(encoded) or encoded[position] & 0xC0 != 0x80
