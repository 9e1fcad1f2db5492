"""Tokenizers of embedding models, from a tokenizer.json or from a GGUF file with a BERT vocabulary.

The ids are those of the `tokenizers` library, with the markers that the model expects around every text ([CLS] and
[SEP] for BERT, an end marker for others). Text never becomes a marker. The files are untrusted. Ids cannot be decoded.
"""

import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

import tokenizers
from gguf.constants import Keys, TokenType
from tokenizers import models, normalizers, pre_tokenizers, processors

from app.errors import UnsupportedTokenizer
from app.text.checked_fields import CheckedFields, malformed
from app.text.long_texts import NO_LIMIT, TextLimit, encode_long, encode_prefix, splits_exactly
from app.text.text_growth import check_growth
from app.text.tokenizer import SPACE_SYMBOL, library_errors
from quant.bounded_json import JSONProblem, parse_object

KEYS = Keys.Tokenizer
# The keys that converters use for each marker (one key is misspelled in the format itself), and the ids in BERT's own
# vocabularies, for files that lack the keys.
CLS_IDS = ("tokenizer.ggml.cls_token_id", KEYS.BOS_ID)
SEP_IDS = (KEYS.SEP_ID, KEYS.EOS_ID)
BERT_CLS, BERT_SEP, BERT_UNKNOWN = 101, 102, 100
LOWERCASE = "tokenizer.ggml.normalizer.lowercase"
STRIP_ACCENTS = "tokenizer.ggml.normalizer.strip_accents"

CONTINUES = "##"  # prefix of a piece that continues a word, in BERT's vocabulary
MAX_MARKERS = 64  # maximum number of markers around a text
MAX_WORD = 100  # maximum length in characters; a longer word is one unknown token. Source: BERT's tokenization.py
_REMEDY = "Choose another embedding model, or a GGUF file of this one."


class EncoderTokenizer:
    """The tokenizer of one encoder. Immutable and thread-safe."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        """`backend` has no special tokens except those that its post-processor adds around a text."""
        self._backend = backend
        with library_errors("building its vocabulary"):
            sample = backend.encode("a", add_special_tokens=True)
            self._begin, self._end = _around(sample.ids, sample.special_tokens_mask)
            vocab = backend.get_vocab(with_added_tokens=True)
        if len(markers := (*self._begin, *self._end)) > MAX_MARKERS:
            raise malformed(f"The tokenizer puts {len(markers):,} markers around a text; the limit is {MAX_MARKERS}")
        self.markers_before = len(self._begin)  # number of markers before a text
        self.vocab_size = 1 + max((*vocab.values(), *markers))  # exclusive upper bound of all ids
        # length in characters; a word that becomes an unknown token may be longer
        self.longest_token = max(MAX_WORD, *map(len, vocab))

    def encode(self, text: str, max_ids: int | None = None, limit: TextLimit = NO_LIMIT) -> tuple[int, ...]:
        """Return the ids of `text` with the markers around it. With `max_ids`, the text is cut so that they fit.

        Raises TextTooLong beyond the `limit`, unless the text is cut.
        """
        text = _without_surrogates(text)
        if max_ids is None:
            ids = encode_long(self, text, at_start=True, limit=limit)
        else:
            room = max(0, max_ids - len(self._begin) - len(self._end))
            ids = encode_prefix(self, text, room, limit.check)[:room]
        return (*self._begin, *ids, *self._end)

    def encode_piece(self, text: str, *, at_start: bool) -> Sequence[int]:
        """See `PieceEncoder`."""
        with library_errors("encoding text"):
            # A batch of one, because this method releases the GIL and `encode` does not.
            (encoded,) = self._backend.encode_batch_fast([text], add_special_tokens=False)
        ids: list[int] = encoded.ids
        return ids

    def continue_piece(self, text: str) -> Sequence[int]:
        """See `PieceEncoder`."""
        return self.encode_piece(text, at_start=False)

    @functools.cached_property
    def splits_at_words(self) -> bool:
        """See `PieceEncoder`."""
        with library_errors("reading its vocabulary"):
            texts = self._backend.get_vocab(with_added_tokens=True)
        return splits_exactly(texts, self)


def _around(ids: list[int], special: list[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the markers before and after a text, found in the ids of a sample text."""
    texts = [index for index, mark in enumerate(special) if not mark]
    if not texts:
        raise malformed("The tokenizer returns no tokens for a text of one letter")
    return tuple(ids[: texts[0]]), tuple(ids[texts[-1] + 1 :])


def _without_surrogates(text: str) -> str:
    """Replace each lone surrogate, which UTF-8 cannot encode, by U+FFFD."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


# -- from a GGUF file


def from_gguf(metadata: Mapping[str, object]) -> EncoderTokenizer:
    """Return the tokenizer of a GGUF file whose `tokenizer.ggml.model` is `bert`.

    Such a file writes the first piece of a word after U+2581, and the others plainly. BERT's own vocabulary writes the
    first piece plainly, and the others after `##`. Raises UnsupportedTokenizer for other models, and ModelFileError for
    a malformed vocabulary.
    """
    fields = CheckedFields(metadata)
    if (model := fields.require(KEYS.MODEL, str)) != "bert":
        raise UnsupportedTokenizer(f"{KEYS.MODEL} is {model!r}, but must be 'bert' for an encoder", _REMEDY)
    texts, types = fields.array(KEYS.LIST, str), fields.array(KEYS.TOKEN_TYPE, int)
    if len(types) != len(texts):
        raise malformed(f"{KEYS.TOKEN_TYPE} has {len(types)} elements for {len(texts)} tokens")
    cls, sep = _id(fields, CLS_IDS, BERT_CLS, len(texts)), _id(fields, SEP_IDS, BERT_SEP, len(texts))
    unknown = _id(fields, (KEYS.UNK_ID,), BERT_UNKNOWN, len(texts))
    vocab = {_piece(text): id_ for id_, text in enumerate(texts) if types[id_] != TokenType.CONTROL and text}
    vocab[texts[unknown]] = unknown
    lowercase = fields.get(LOWERCASE, bool) is not False
    with library_errors("building its vocabulary"):
        backend = tokenizers.Tokenizer(
            models.WordPiece(
                vocab,
                unk_token=texts[unknown],
                continuing_subword_prefix=CONTINUES,
                max_input_chars_per_word=MAX_WORD,
            )
        )
        backend.normalizer = normalizers.BertNormalizer(
            lowercase=lowercase, strip_accents=fields.get(STRIP_ACCENTS, bool)
        )
        backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        backend.post_processor = processors.BertProcessing((texts[sep], sep), (texts[cls], cls))
    return EncoderTokenizer(backend)


def _piece(text: str) -> str:
    """Return a token in the form that BERT's own vocabulary uses."""
    return text.removeprefix(SPACE_SYMBOL) if text.startswith(SPACE_SYMBOL) else CONTINUES + text


def _id(fields: CheckedFields, names: tuple[str, ...], default: int, size: int) -> int:
    """Return the id of a token. The first of these fields that exists contains it."""
    id_ = next((found for name in names if (found := fields.get(name, int)) is not None), default)
    if not 0 <= id_ < size:
        raise malformed(f"{names[0]} is {id_}, but there are {size} tokens")
    return id_


# -- from a tokenizer.json


def from_json(content: bytes) -> EncoderTokenizer:
    """Return the tokenizer of a tokenizer.json, without its truncation and padding.

    Raises UnsupportedTokenizer for models other than WordPiece and BPE, and ModelFileError for a malformed file.
    """
    try:
        document = parse_object(content)
    except JSONProblem as problem:
        raise malformed(f"tokenizer.json cannot be used: {problem}") from None
    fields = CheckedFields(document)
    model = fields.child("model")
    if (kind := model.get("type", str)) not in ("WordPiece", "BPE"):
        raise UnsupportedTokenizer(f"The tokenizer's model {kind!r} is not supported for embeddings", _REMEDY)
    vocab, unknown = model.require("vocab", dict), model.get("unk_token", str)
    if kind == "WordPiece" and unknown not in vocab:
        raise malformed(f"model.unk_token is {unknown!r}, which is not a token")
    check_growth(fields.get("normalizer", dict), fields.get("pre_tokenizer", dict))
    added = _added_tokens(fields)
    special = {token["content"] for token in added if token["special"]} - {unknown}
    verbatim = [token for token in added if not token["special"]]
    kept = {text: id_ for text, id_ in vocab.items() if text not in special}
    changed = {
        **document,
        # The vocabulary gets added tokens with their ids. The library would assign new ids to a token that is only
        # added.
        "model": {
            **fields.require("model", dict),
            "vocab": kept | {token["content"]: token["id"] for token in verbatim},
        },
        "added_tokens": verbatim,
        "truncation": None,
        "padding": None,
    }
    with library_errors("reading tokenizer.json"):
        backend = tokenizers.Tokenizer.from_str(json.dumps(changed))
    return EncoderTokenizer(backend)


def _added_tokens(fields: CheckedFields) -> list[dict[str, Any]]:
    """Return the entries of `added_tokens`: id, text, and whether the token is special.

    Text never becomes a special token.
    """
    added = fields.array("added_tokens", dict) if "added_tokens" in fields else ()
    for index, entry in enumerate(added):
        token = CheckedFields(entry, f"added_tokens[{index}].")
        token.require("content", str), token.require("id", int), token.require("special", bool)
    return list(added)
