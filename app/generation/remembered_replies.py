"""Remembered replies: the text of an earlier reply in a prompt becomes the ids that the model generated.

Encoding the text again may give different ids, and then the KV cache misses. A text is replaced only if it equals the
decoded ids, and only after the same prefix. Control tokens are never replaced.
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

PROMPTS = 4096  # number of latest prompts whose replies are remembered
_PROBED = 32  # number of characters to encode to find out whether the tokenizer adds a leading space


@dataclass(frozen=True, slots=True)
class GeneratedReply:
    """A prompt and its reply so far."""

    prompt_ids: tuple[int, ...]
    ids: Sequence[int]  # ids of the reply
    text: str  # text that the caller received; may end before the text of the ids
    continues_text: bool  # whether the reply continues a text, rather than a conversation
    stored: bool  # whether it may be written to disk


@dataclass(frozen=True, slots=True)
class TextPosition:
    """A position in a rendered text: a part, and the number of its characters before the position."""

    part_key: bytes  # digest of all parts before this one
    prefix_hash: "hashlib._Hash"  # hash of those parts and of this part's start; copy it before an update
    characters: int  # number of characters of this part before the position

    @classmethod
    def of(cls, part_key: bytes, text: str = "") -> "TextPosition":
        return cls(part_key, _prefix_hash(part_key, text), len(text))

    def key_after_text(self, text: bytes) -> bytes:
        """Return the digest of all parts up to this one, if `text` follows the position and ends the part."""
        prefix_hash = self.prefix_hash.copy()
        prefix_hash.update(text)
        return prefix_hash.digest() if self.characters or text else self.part_key


def _prefix_hash(part_key: bytes, text: str = "") -> "hashlib._Hash":
    """Return a hash of the parts before this one and the start of this part's text.

    For the whole text, the digest is the next part's key.
    """
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
    """Encodes plain texts for one model, using the ids of earlier replies. Thread-safe.

    All methods except `remember` are slow.
    """

    def __init__(self, tokenizer: Tokenizer, reply_tokens: ReplyTokenCache) -> None:
        self._tokenizer = tokenizer
        self._reply_tokens = reply_tokens
        self._control_ids = frozenset(tokenizer.control_tokens.values())
        self._lock = threading.Lock()
        # positions where replies start, by hash of their prompts
        self._prompts: OrderedDict[int, TextPosition] = OrderedDict()

    def encode(self, parts: Iterable[int | str], limit: TextLimit) -> tuple[list[int], TextPosition]:
        """Return the ids of a text given in parts, and the position after it. Raises TextTooLong beyond the `limit`."""
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
        """Record the position in the text at which a prompt ends and its reply will start."""
        with self._lock:
            self._prompts[hash(prompt_ids)] = end
            self._prompts.move_to_end(hash(prompt_ids))
            if len(self._prompts) > PROMPTS:
                self._prompts.popitem(last=False)

    def remember(self, reply: GeneratedReply) -> None:
        """Use the ids of `reply` instead of its text wherever it follows its prompt again. Returns at once."""
        if reply.ids:
            self._reply_tokens.remember(functools.partial(self._spans, reply))

    def forget(self, prompts: Iterable[Iterable[int | str]]) -> None:
        """Forget the replies after any part of these prompts, also on disk."""
        prefix_keys: set[bytes] = set()
        for parts in prompts:
            for _, _, after in self._walk(parts):
                prefix_keys |= {after, TextPosition.of(after).prefix_hash.digest()}
        self._reply_tokens.forget(prefix_keys)

    def _walk(self, parts: Iterable[int | str]) -> Iterator[tuple[int | str, bytes, bytes]]:
        """Yield each part with the digests before and after it."""
        after = self._tokenizer.fingerprint
        for part in parts:
            before = after
            after = _key_after_control(before, part) if isinstance(part, int) else _prefix_hash(before, part).digest()
            yield part, before, after

    def _plain(self, part_key: bytes, text: str, limit: TextLimit, *, at_start: bool) -> Sequence[int]:
        """Return the ids of a plain text."""
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
        """Return the ranges of a text to replace, in order. Reads the file only if no reply in memory matches."""
        for find in (self._reply_tokens.find, self._reply_tokens.find_stored):
            spans = find(part_key)
            if spans and (splices := [*self._fitting(part_key, text, spans, at_start=at_start)]):
                return splices
        return []

    def _fitting(self, part_key: bytes, text: str, spans: Sequence[TokenSpan], *, at_start: bool) -> Iterator[_Splice]:
        """For each position in `text` that has spans, yield the longest span that fits there."""
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
        """Return the space that the tokenizer adds before a plain text; empty if it adds none."""
        if text.startswith((" ", SPACE_SYMBOL)):
            return b""
        first = self._tokenizer.encode_plain(text[:_PROBED], at_start=at_start)[0]
        return b" " if self._tokenizer.token_bytes(first).startswith(b" ") else b""

    def _match(self, span: TokenSpan, rest: bytes) -> tuple[int, int]:
        """Return how many bytes `rest` and a span share, and how many ids encode them; (0, 0) if the texts differ.

        Either text may be cut off. They may also differ in white space at the end, which templates and clients strip.
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
        """Return the text of a span's ids; empty if an id is not plain text."""
        if span.text is None:
            pieces = [self._tokenizer.plain_bytes(token_id) for token_id in span.ids]
            span.text = b"".join(pieces) if all(pieces) else b""
        return span.text

    def _spans(self, reply: GeneratedReply) -> Iterator[TokenSpan]:
        """Yield the spans of a reply between its control tokens, as far as the decoded ids equal the caller's text."""
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
        """Return the caller's text, with the leading space that was stripped from it."""
        text = reply.text.encode()
        if not self._tokenizer.space_prefix or reply.continues_text:
            return text
        first = next(filter(None, map(self._tokenizer.token_bytes, reply.ids)), b"")
        return b" " + text if first.startswith(b" ") else text


def _is_boundary(encoded: bytes, position: int) -> bool:
    """Whether a character of this UTF-8 starts at `position`, or the text ends there."""
    return position >= len(encoded) or encoded[position] & 0xC0 != 0x80
