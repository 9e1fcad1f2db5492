"""Tokenizer: text to token ids and back, for one vocabulary, with the `tokenizers` library.

Plain text and control tokens are separated here. The library's tokenizer contains no control tokens, so that plain text
cannot become one. `ControlTokens` finds them in markup. No BOS token is added.
"""

import array
import collections
import contextlib
import functools
import hashlib
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import tokenizers

from app.errors import UnsupportedTokenizer
from app.text import long_texts
from app.text.control_tokens import ControlTokens
from app.text.long_texts import NO_LIMIT, TextLimit, encode_long, splits_exactly

# Size limit of a cache in characters of text: about a million tokens, or 4 MB of ids. A second cache holds protected
# texts.
REMEMBERED_CHARACTERS = 4_000_000

_AT_ONCE = 1 << 13  # number of ids that are decoded between two checks

V = TypeVar("V")

_SURROGATE = re.compile(r"[\ud800-\udfff]")
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
SPACE_SYMBOL = "\u2581"  # SentencePiece's form of a space


def _byte_level_alphabet() -> dict[str, int]:
    """Return the byte for each character of a byte-level vocabulary.

    Source: GPT-2's encoder. Printable Latin-1 characters represent themselves, the other bytes are U+0100 and up.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _byte_level_alphabet()


def byte_level_bytes(text: str) -> bytes:
    """Return the bytes of a byte-level token. A text with other characters is encoded as UTF-8."""
    try:
        return bytes([_BYTE_OF[character] for character in text])
    except KeyError:
        return text.encode()


def sentencepiece_bytes(text: str) -> bytes:
    """Return the bytes of a SentencePiece token: `<0x0A>` is that byte, `▁` a space."""
    if byte := _BYTE_TOKEN.fullmatch(text):
        return bytes([int(byte[1], 16)])
    return text.replace(SPACE_SYMBOL, " ").encode()


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The meaning of the ids of a vocabulary, as checked by the builders."""

    texts: Sequence[str]  # texts by id, as in the file; "" for an unused id
    to_bytes: Callable[[str], bytes]  # function that decodes the text of an ordinary token
    control: ControlTokens  # control tokens, whose ids only occur in markup
    verbatim: frozenset[int]  # ids whose text is encoded as UTF-8
    hidden: frozenset[int]  # ids that are not part of a reply's text
    bos_id: int | None
    eos_id: int | None  # id that ends a document; a chat turn often ends with another token
    end_of_generation_ids: frozenset[int]  # ids that end a reply
    add_bos: bool  # whether the model expects BOS at the start of a prompt
    space_prefix: bool  # whether a space is added before text; replies then start with a space as well
    chat_template: str | None  # Jinja source of the default template
    response_template: Mapping[str, object] | None = None  # format of replies, as defined by transformers; unchecked


@contextlib.contextmanager
def library_errors(doing: str) -> Iterator[None]:
    """Convert errors of the `tokenizers` library to UnsupportedTokenizer. `doing` names the work."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:  # a panic of the library is not an Exception
        raise UnsupportedTokenizer(
            f"The tokenizer failed {doing}: {error}", "The model's tokenizer may be damaged: pull the model again."
        ) from error


class _TextCache(Generic[V]):
    """Caches ids by text, so that earlier messages of a chat are not encoded again in each turn. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: collections.OrderedDict[str, V] = collections.OrderedDict()
        self._characters = 0

    def get(self, text: str) -> V | None:
        with self._lock:
            if (known := self._known.get(text)) is not None:
                self._known.move_to_end(text)
            return known

    def put(self, text: str, value: V) -> None:
        with self._lock:
            if text in self._known or len(text) > REMEMBERED_CHARACTERS:
                return
            self._known[text] = value
            self._characters += len(text)
            while self._characters > REMEMBERED_CHARACTERS:
                oldest, _ = self._known.popitem(last=False)
                self._characters -= len(oldest)


class TextEncoder:
    """Encodes plain text, with a cache. Thread-safe."""

    def __init__(self, backend: tokenizers.Tokenizer, *, start_prefix: str = "", verbatim: Sequence[str] = ()) -> None:
        """Create an encoder.

        `start_prefix` is added to text at the start of the input, unless the text starts with a space or a `verbatim`
        token.
        """
        self._backend = backend
        self._start_prefix = start_prefix
        self._unprefixed = (" ", SPACE_SYMBOL, *verbatim)
        self._remembered: _TextCache[array.array[int]] = _TextCache()
        self.characters_encoded = 0  # number of characters that the library encoded, without cached texts

    def encode(self, text: str, *, at_start: bool) -> Sequence[int]:
        """Return the ids of non-empty `text`. `at_start` means that it is at the start of the input."""
        if at_start and not text.startswith(self._unprefixed):
            text = self._start_prefix + text
        if (known := self._remembered.get(text)) is not None:
            return known
        self.characters_encoded += len(text)
        with library_errors("encoding text"):
            # A batch of one, because this method releases the GIL and `encode` does not.
            encoded = self._backend.encode_batch_fast([text], add_special_tokens=False)
        ids = array.array("I", encoded[0].ids)
        self._remembered.put(text, ids)
        return ids


class Tokenizer:
    """Converts text to ids and back, for one vocabulary. Immutable and thread-safe."""

    def __init__(self, text_encoder: TextEncoder, vocabulary: Vocabulary) -> None:
        self._text_encoder = text_encoder
        self._vocabulary = vocabulary
        self.texts = vocabulary.texts  # by id, as in the file; "" for an unused id
        self.vocab_size = len(vocabulary.texts)
        self.bos_id = vocabulary.bos_id
        self.eos_id = vocabulary.eos_id
        self.end_of_generation_ids = vocabulary.end_of_generation_ids
        self.add_bos = vocabulary.add_bos
        self.space_prefix = vocabulary.space_prefix
        self.chat_template = vocabulary.chat_template
        self.response_template = vocabulary.response_template
        self.control_tokens = vocabulary.control.ids  # ids by text
        named = {"bos_token": vocabulary.bos_id, "eos_token": vocabulary.eos_id}
        # Texts of the special tokens that chat templates refer to by name, as far as the vocabulary has them.
        self.special_tokens = {name: vocabulary.texts[id_] for name, id_ in named.items() if id_ is not None}
        self._no_text = vocabulary.hidden | frozenset(vocabulary.control.ids.values())
        self._protected: _TextCache[str] = _TextCache()

    def encode(self, text: str, *, parse_special: bool = False, limit: TextLimit = NO_LIMIT) -> list[int]:
        """Return the ids of `text`. Without `parse_special`, control tokens in it are plain text.

        Raises TextTooLong beyond the `limit`.
        """
        text = without_surrogates(text)
        limit.check_characters(len(text), self.longest_token)
        return self._encode_parts(self.split(text) if parse_special else [text] if text else [], limit)

    def protect(self, content: str) -> str:
        """Mark `content` for a chat template, so that `encode_rendered` treats all of it as plain text."""
        if (known := self._protected.get(content)) is not None:
            return known
        protected = self._vocabulary.control.protect(content)
        self._protected.put(content, protected)
        return protected

    def encode_rendered(self, rendered: str, limit: TextLimit = NO_LIMIT) -> list[int]:
        """Return the ids of a rendered chat. Control tokens in protected texts are encoded as plain text.

        Raises TextTooLong beyond the `limit`.
        """
        return self._encode_parts(self.split(rendered, rendered=True), limit)

    def split(self, text: str, *, rendered: bool = False) -> Iterator[int | str]:
        """Yield the control tokens in `text` and the non-empty plain texts between them.

        `rendered` is true for a rendered chat, in which protected texts are plain text.
        """
        return self._vocabulary.control.split(without_surrogates(text), marked=rendered)

    def encode_plain(self, text: str, *, at_start: bool, limit: TextLimit = NO_LIMIT) -> Sequence[int]:
        """Return the ids of a non-empty plain text, as `split` yields it. `at_start` means that no token precedes it.

        Raises TextTooLong beyond the `limit`.
        """
        limit.check()
        if len(text) <= long_texts.PIECE:
            return self.encode_piece(text, at_start=at_start)
        return encode_long(self, text, at_start=at_start, limit=limit)

    def encode_continuation(self, text: str, limit: TextLimit = NO_LIMIT) -> Sequence[int] | None:
        """Return the ids of `text` as the continuation of a plain text.

        None: the vocabulary cannot express it, because it adds a space before every text. Raises TextTooLong beyond the
        `limit`.
        """
        return self._continuation(text, functools.partial(self.encode_plain, at_start=False, limit=limit))

    def encode_piece(self, text: str, *, at_start: bool) -> Sequence[int]:
        """See `PieceEncoder`."""
        return self._text_encoder.encode(text, at_start=at_start)

    def continue_piece(self, text: str) -> Sequence[int] | None:
        """See `PieceEncoder`."""
        return self._continuation(text, functools.partial(self.encode_piece, at_start=False))

    @functools.cached_property
    def splits_at_words(self) -> bool:
        """See `PieceEncoder`."""
        texts = (text for text in self._vocabulary.texts if text not in self.control_tokens)
        return splits_exactly(texts, self)

    def _continuation(self, text: str, encode: Callable[[str], Sequence[int]]) -> Sequence[int] | None:
        """Return the ids of `text` after another text.

        If the vocabulary adds a space before every text, `text` is encoded after a line break, which most of these
        vocabularies never merge with other characters. None for the others.
        """
        if not self._begins_texts_with_space:
            return encode(text)
        ids, line_break = encode("\n" + text), self.encode_piece("\n", at_start=False)
        return ids[len(line_break) :] if ids[: len(line_break)] == line_break else None

    @functools.cached_property
    def _begins_texts_with_space(self) -> bool:
        """Whether the vocabulary adds a space to any text, even to one that follows other text."""
        return self.token_bytes(self.encode_piece("a", at_start=False)[0]).startswith(b" ")

    def _encode_parts(self, parts: Iterable[int | str], limit: TextLimit = NO_LIMIT) -> list[int]:
        ids: list[int] = []
        for part in parts:
            if isinstance(part, int):
                ids.append(part)
            else:
                ids.extend(self.encode_plain(part, at_start=not ids, limit=limit))
            limit.check_count(len(ids))
        return ids

    def decode(self, ids: Iterable[int], *, continues_text: bool = False, show_control: bool = False) -> str:
        """Return the text of `ids`, without control tokens unless `show_control` is set. Invalid UTF-8 becomes U+FFFD.

        The space that a vocabulary adds before text is removed, unless the ids continue another text.
        """
        pieces = (self.token_bytes(token_id, show_control=show_control) for token_id in ids)
        text = b"".join(pieces).decode(errors="replace")
        return text.removeprefix(" ") if self.space_prefix and not continues_text else text

    def plain_bytes(self, token_id: int) -> bytes:
        """Return the bytes of a token that can be part of plain text; empty for other tokens."""
        return b"" if token_id in self._no_text else self.token_bytes(token_id)

    @functools.cached_property
    def longest_token(self) -> int:
        """Upper limit of the characters in one token: the number of bytes of the longest one."""
        longest = 0
        # upper bounds of the number of bytes of each token
        lengths = [*map(len, map(str.encode, self._vocabulary.texts))]
        for token_id in sorted(range(self.vocab_size), key=lengths.__getitem__, reverse=True):
            if lengths[token_id] <= longest:
                break
            longest = max(longest, len(self.token_bytes(token_id, show_control=True)))
        return longest

    @functools.cached_property
    def fingerprint(self) -> bytes:
        """A digest that is equal for vocabularies in which every id has the same meaning."""
        vocabulary = self._vocabulary
        digest = hashlib.sha256(repr((sorted(vocabulary.verbatim), sorted(self._no_text))).encode())
        for text in vocabulary.texts:
            digest.update(repr(text).encode())
        return digest.digest()

    @property
    def characters_encoded(self) -> int:
        """The number of characters that were encoded, without cached texts."""
        return self._text_encoder.characters_encoded

    def shown_bytes(self, ids: Sequence[int], check: Callable[[], None]) -> Iterator[bytes]:
        """Yield the bytes of each id, including control tokens.

        Calls `check` regularly, which raises to end the work.
        """
        for start in range(0, len(ids), _AT_ONCE):
            check()
            yield from (self.token_bytes(one, show_control=True) for one in ids[start : start + _AT_ONCE])

    def token_bytes(self, token_id: int, *, show_control: bool = False) -> bytes:
        """Return the exact bytes of a token; empty for a hidden token, unless `show_control` is set.

        An id beyond the vocabulary has no bytes: models often have more rows than tokens.
        """
        vocabulary = self._vocabulary
        if not 0 <= token_id < self.vocab_size or (token_id in vocabulary.hidden and not show_control):
            return b""
        text = vocabulary.texts[token_id]
        return text.encode() if token_id in vocabulary.verbatim else vocabulary.to_bytes(text)

    def raw_text(self, token_id: int) -> str:
        """Return a token as the vocabulary's file writes it, such as `Ġthe`. Empty for an id beyond the vocabulary."""
        return self._vocabulary.texts[token_id] if 0 <= token_id < self.vocab_size else ""


def without_surrogates(text: str) -> str:
    """Replace each lone surrogate, which UTF-8 cannot encode, by U+FFFD."""
    try:
        text.encode()  # much faster than a search for surrogates
    except UnicodeEncodeError:
        return _SURROGATE.sub("\ufffd", text)
    return text
