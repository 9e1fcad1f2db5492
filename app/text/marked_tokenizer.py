"""A tokenizer for embedding models with a chat model's vocabulary.

It adds the markers that the model expects around a text, and has the interface of `app.text.encoder_tokenizer`. Text
never becomes a control token.
"""

from collections.abc import Mapping, Sequence

from gguf.constants import Keys

from app.text.checked_fields import CheckedFields
from app.text.gguf_tokenizer import from_gguf as chat_tokenizer
from app.text.long_texts import NO_LIMIT, TextLimit, encode_prefix
from app.text.tokenizer import Tokenizer, without_surrogates


class MarkedTokenizer:
    """Encodes texts for one embedding model. Immutable and thread-safe."""

    def __init__(self, tokenizer: Tokenizer, begin: tuple[int, ...], end: tuple[int, ...]) -> None:
        self.vocab_size = tokenizer.vocab_size
        self._tokenizer = tokenizer
        self._begin, self._end = begin, end
        self.markers_before = len(begin)

    def encode(self, text: str, max_ids: int | None = None, limit: TextLimit = NO_LIMIT) -> tuple[int, ...]:
        """Return the ids of `text` with the markers around it. With `max_ids`, the text is cut so that they fit.

        Raises TextTooLong beyond the `limit`, unless the text is cut.
        """
        ids: Sequence[int] = ()
        if max_ids is None:
            ids = self._tokenizer.encode(text, limit=limit)
        elif text:
            room = max(0, max_ids - len(self._begin) - len(self._end))
            ids = encode_prefix(self._tokenizer, without_surrogates(text), room, limit.check)[:room]
        return (*self._begin, *ids, *self._end)


def from_gguf(metadata: Mapping[str, object]) -> MarkedTokenizer:
    """Create the tokenizer from a GGUF file's metadata. Raises UnsupportedTokenizer or ModelFileError."""
    tokenizer = chat_tokenizer(metadata)
    begin = tokenizer.bos_id if tokenizer.add_bos else None
    end = tokenizer.eos_id if CheckedFields(metadata).get(Keys.Tokenizer.ADD_EOS, bool) else None
    return MarkedTokenizer(tokenizer, *(() if marker is None else (marker,) for marker in (begin, end)))
