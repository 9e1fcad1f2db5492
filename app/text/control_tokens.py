"""Control tokens in text: finds them in a rendered chat, and prevents message texts from containing one.

A chat template renders everything into one string, in which an `<|im_end|>` typed by a user and one written by the
template look alike. `protect` inserts a mark into each control token of a text before it is rendered. `split` ignores
marked tokens and removes the marks. No character of a protected text becomes part of a control token, even in
combination with adjacent text of the template or of other messages.
"""

import bisect
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

# A code point that Unicode reserves for internal use by programs. It never occurs in text.
MARK = "\ufdd0"

_LOOKS_LIKE_CONTROL = re.compile(r"<\|.*\|>|<｜.*｜>", re.DOTALL)
_WHITE_SPACE = re.compile(r"\s*")


@dataclass(frozen=True, slots=True)
class ControlToken:
    """A control token. `strip_left` and `strip_right` tell whether it includes adjacent white space."""

    id: int
    strip_left: bool = False
    strip_right: bool = False


class ControlTokens:
    """The control tokens of a vocabulary, by text. Immutable and thread-safe."""

    def __init__(self, tokens: Mapping[str, ControlToken]) -> None:
        """`tokens` maps texts to tokens. Tokens of one character are never found in text: a mark cannot break them."""
        self._tokens = {text: token for text, token in tokens.items() if len(text) > 1}
        self.ids: Mapping[str, int] = {text: token.id for text, token in tokens.items()}
        self._longest = max(map(len, self._tokens), default=0)
        lengths: dict[str, set[int]] = {}
        seconds: dict[str, str] = {}
        for text in self._tokens:
            lengths.setdefault(text[0], set()).add(len(text))
            seconds[text[0]] = seconds.get(text[0], "") + re.escape(text[1])
        self._lengths = {first: sorted(of_first, reverse=True) for first, of_first in lengths.items()}
        # The second character is only matched by a lookahead, because tokens may overlap.
        beginnings = (f"{re.escape(first)}(?=[{following}])" for first, following in seconds.items())
        self._beginning = re.compile("|".join(beginnings) or r"(?!)")
        self._sorted = sorted(self._tokens)
        self._sorted_backwards = sorted(text[::-1] for text in self._tokens)
        self._all_ends = MARK.join(text[1:] for text in self._tokens)

    def split(self, text: str, *, marked: bool = False) -> Iterator[int | str]:
        """Split `text` into control token ids and the non-empty plain texts between them.

        The leftmost longest token wins, as in the `tokenizers` library. `marked` removes marks from the plain texts.
        """
        plain_from = 0
        for start, token_text in self._occurrences(text):
            if start < plain_from:
                continue
            token = self._tokens[token_text]
            plain = text[plain_from:start]
            yield from _plain(plain.rstrip() if token.strip_left else plain, marked)
            yield token.id
            plain_from = start + len(token_text)
            if token.strip_right and (white_space := _WHITE_SPACE.match(text, plain_from)):
                plain_from = white_space.end()
        yield from _plain(text[plain_from:], marked)

    def protect(self, content: str) -> str:
        """Mark `content` where it contains, may start, or may continue a control token.

        Mark characters in the original text become U+FFFD.
        """
        content = content.replace(MARK, "\ufffd")
        cuts = {start + 1 for start, _ in self._occurrences(content)}
        tail = max(0, len(content) - self._longest + 1)
        cuts.update(start + 1 for start in range(tail, len(content)) if _is_partial(content[start:], self._sorted))
        if self._may_continue_token(content):
            cuts.add(0)
        if not cuts:
            return content
        ends = sorted(cuts)
        return MARK.join(content[start:end] for start, end in zip([0, *ends], [*ends, len(content)], strict=True))

    def _occurrences(self, text: str) -> Iterator[tuple[int, str]]:
        """Yield each position of a control token, with the longest token there. They may overlap."""
        for first in self._beginning.finditer(text):
            start = first.start()
            for length in self._lengths[first.group()]:
                candidate = text[start : start + length]
                if candidate in self._tokens:
                    yield start, candidate
                    break

    def _may_continue_token(self, content: str) -> bool:
        """Whether `content` may be the end or the middle of a token that starts before it."""
        if content and content in self._all_ends:
            return True
        backwards = content[: max(0, self._longest - 1)][::-1]
        return any(_is_partial(backwards[start:], self._sorted_backwards) for start in range(len(backwards)))


def _is_partial(text: str, sorted_texts: list[str]) -> bool:
    """Whether `text` is a proper prefix of one of `sorted_texts`."""
    following = bisect.bisect_right(sorted_texts, text)
    return following < len(sorted_texts) and sorted_texts[following].startswith(text)


def _plain(text: str, marked: bool) -> Iterator[str]:
    text = text.replace(MARK, "") if marked else text
    if text:
        yield text


# Texts that end a reply, from llama.cpp (src/llama-vocab.cpp): ends of turns, of documents, and of infilled text.
# fmt: off
_ENDING_TEXTS = frozenset((
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>",
    "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>", "<eos>", "<turn|>",
    "<end_of_utterance>", "<|tool_response>", "<｜end▁of▁sentence｜>", "[e~[",
    "<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]",
    "<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>", "<|file_sep|>",
))
# fmt: on
# If a vocabulary has both tokens of a pair, `<|end|>` only ends one of several messages.
_MESSAGE_ENDS = (("<|return|>", "<|call|>"), ("<|flush|>", "<|calls|>"))


def looks_like_control(text: str) -> bool:
    """Whether a token is written like chat markup, regardless of its type in the vocabulary.

    Some vocabularies (DeepSeek's `<｜User｜>`, Command R's turn tokens) list markup among the added tokens that any
    text may contain. The converters to GGUF recognize it in the same way. `</s>` is excluded, because it is also HTML.
    """
    return _LOOKS_LIKE_CONTROL.fullmatch(text) is not None or (text in _ENDING_TEXTS and text != "</s>")


def end_of_generation_ids(control_ids: Mapping[str, int], named: Iterable[int]) -> frozenset[int]:
    """Return the ids that end generation.

    These are the ids that the file names, and control tokens that are known to end a reply.
    """
    ending = {text: id_ for text, id_ in control_ids.items() if text in _ENDING_TEXTS}
    if any(ending.keys() >= set(pair) for pair in _MESSAGE_ENDS):
        ending.pop("<|end|>", None)
    return frozenset(ending.values()) | frozenset(named)
