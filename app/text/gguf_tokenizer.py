"""A tokenizer from the `tokenizer.*` metadata of a GGUF file.

For text, the ids are the same as those of llama.cpp (src/llama-vocab.cpp). Damaged or unknown vocabularies, for which
llama.cpp guesses, are refused. The metadata is untrusted.
"""

import collections
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import tokenizers
from gguf.constants import Keys, TokenType
from tokenizers import AddedToken, Regex, normalizers, pre_tokenizers

from app.errors import UnsupportedTokenizer
from app.text.bpe_model import bpe_model, merge_pairs, split_merges
from app.text.checked_fields import CheckedFields, malformed
from app.text.control_tokens import ControlToken, ControlTokens, end_of_generation_ids, looks_like_control
from app.text.pretokenizers import PRETOKENIZERS
from app.text.tokenizer import (
    SPACE_SYMBOL,
    TextEncoder,
    Tokenizer,
    Vocabulary,
    byte_level_bytes,
    library_errors,
    sentencepiece_bytes,
)

KEYS = Keys.Tokenizer
ENDING_IDS = (KEYS.EOS_ID, KEYS.EOT_ID, KEYS.EOM_ID, KEYS.FIM_PAD_ID, KEYS.FIM_REP_ID, KEYS.FIM_SEP_ID)

MAX_TOKEN_CHARACTERS = 1024  # twice the longest token of any known vocabulary
_NO_TOKEN = (-1, 0xFFFF_FFFF)  # ids that some converters write if the model lacks the token

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Tokens:
    """The token list of a file, after it has been checked."""

    texts: Sequence[str]
    types: Sequence[int]
    control: ControlTokens
    verbatim: frozenset[int]
    hidden: frozenset[int]
    bos_id: int | None
    eos_id: int | None
    ending_ids: frozenset[int]
    user_defined: tuple[AddedToken, ...]  # tokens that are found in any text
    vocab: dict[str, int]  # the ids that text may become


@dataclass(frozen=True, slots=True)
class _Scheme:
    """The conversion of text to ids and back for one kind of vocabulary."""

    backend: tokenizers.Tokenizer
    to_bytes: Callable[[str], bytes]
    add_bos: bool
    space_prefix: bool = False


def from_gguf(metadata: Mapping[str, object]) -> Tokenizer:
    """Return the tokenizer of a GGUF file's `metadata`.

    Raises UnsupportedTokenizer for an unknown model or pre-tokenizer, and ModelFileError for a malformed vocabulary.
    """
    fields = CheckedFields(metadata)
    model = fields.require(KEYS.MODEL, str)
    if model not in _SCHEMES:
        raise UnsupportedTokenizer(
            f"{KEYS.MODEL} is {model!r}; supported are {', '.join(_SCHEMES)}", "Choose a model of another family."
        )
    tokens = _read_tokens(fields, _DEFAULT_IDS.get(model, {}))
    scheme = _SCHEMES[model](fields, tokens)
    with library_errors("building its vocabulary"):
        scheme.backend.add_tokens(list(tokens.user_defined))
    vocabulary = Vocabulary(
        texts=tokens.texts,
        to_bytes=scheme.to_bytes,
        control=tokens.control,
        verbatim=tokens.verbatim,
        hidden=tokens.hidden,
        bos_id=tokens.bos_id,
        eos_id=tokens.eos_id,
        end_of_generation_ids=end_of_generation_ids(tokens.control.ids, tokens.ending_ids),
        add_bos=scheme.add_bos and tokens.bos_id is not None,
        space_prefix=scheme.space_prefix,
        chat_template=fields.get(KEYS.CHAT_TEMPLATE, str),
    )
    return Tokenizer(TextEncoder(scheme.backend), vocabulary)


def _byte_level(fields: CheckedFields, tokens: _Tokens) -> _Scheme:
    name = fields.get(KEYS.PRE, str)
    if name not in PRETOKENIZERS:
        raise UnsupportedTokenizer(
            f"The tokenizer lacks {KEYS.PRE}" if name is None else f"{KEYS.PRE} is {name!r}, which is unknown",
            "Choose another conversion of this model, or another model.",
        )
    pre_tokenizer = PRETOKENIZERS[name]
    backend = tokenizers.Tokenizer(
        bpe_model(tokens.vocab, _listed_pairs(fields, tokens), ignore_merges=pre_tokenizer.ignore_merges)
    )
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in pre_tokenizer.patterns]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
    add_bos = fields.get(KEYS.ADD_BOS, bool)
    return _Scheme(backend, byte_level_bytes, pre_tokenizer.add_bos if add_bos is None else add_bos)


def _sentencepiece(fields: CheckedFields, tokens: _Tokens) -> _Scheme:
    backend = tokenizers.Tokenizer(bpe_model(tokens.vocab, _scored_pairs(fields, tokens), byte_fallback=True))
    space_prefix = fields.get(KEYS.ADD_PREFIX, bool) is not False
    prepend = [normalizers.Prepend(SPACE_SYMBOL)] if space_prefix else []
    backend.normalizer = normalizers.Sequence([*prepend, normalizers.Replace(" ", SPACE_SYMBOL)])
    return _Scheme(backend, sentencepiece_bytes, fields.get(KEYS.ADD_BOS, bool) is not False, space_prefix)


def _gemma4(fields: CheckedFields, tokens: _Tokens) -> _Scheme:
    backend = tokenizers.Tokenizer(bpe_model(tokens.vocab, _listed_pairs(fields, tokens), byte_fallback=True))
    backend.normalizer = normalizers.Replace(" ", SPACE_SYMBOL)
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[^\n]+|\n+"), "isolated")
    # Early conversions wrongly state that the model expects no BOS.
    return _Scheme(backend, sentencepiece_bytes, add_bos=True)


_SCHEMES = {"gpt2": _byte_level, "llama": _sentencepiece, "gemma4": _gemma4}
_DEFAULT_IDS = {"llama": {KEYS.BOS_ID: 1, KEYS.EOS_ID: 2}}


def _read_tokens(fields: CheckedFields, default_ids: Mapping[str, int]) -> _Tokens:
    texts = fields.array(KEYS.LIST, str)
    size, vocab = len(texts), _ids_by_text(texts)
    typed = KEYS.TOKEN_TYPE in fields
    types = _per_token(fields, KEYS.TOKEN_TYPE, int, size) if typed else (TokenType.NORMAL,) * size
    special = {key: _token_id(fields, key, size, default_ids.get(key)) for key in (KEYS.BOS_ID, *ENDING_IDS)}
    named = frozenset(id_ for id_ in special.values() if id_ is not None)
    user_defined = _of_type(types, TokenType.USER_DEFINED)
    # A token is markup if the file gives it a role or it looks like markup, even if its type says otherwise.
    by_look = {id_ for id_ in user_defined if looks_like_control(texts[id_])}
    untyped = frozenset() if typed else named
    markup = _of_type(types, TokenType.CONTROL, TokenType.UNKNOWN) | by_look | (named & user_defined) | untyped
    strips_right = _strips_right(fields)
    control = {texts[id_]: ControlToken(id_, strip_right=strips_right(texts[id_])) for id_ in sorted(markup)}
    control.pop("", None)
    for text in control:
        del vocab[text]
    found_in_text = (texts[id_] for id_ in sorted(user_defined - markup))
    return _Tokens(
        texts=texts,
        types=types,
        vocab=vocab,
        control=ControlTokens(control),
        user_defined=tuple(AddedToken(t, normalized=False, rstrip=strips_right(t)) for t in found_in_text if t),
        verbatim=user_defined | markup,
        hidden=_of_type(types, TokenType.CONTROL, TokenType.UNKNOWN, TokenType.UNUSED) | untyped,
        bos_id=special[KEYS.BOS_ID],
        eos_id=special[KEYS.EOS_ID],
        ending_ids=frozenset(id_ for key in ENDING_IDS if (id_ := special[key]) is not None),
    )


def _of_type(types: Sequence[int], *wanted: TokenType) -> frozenset[int]:
    return frozenset(id_ for id_, type_ in enumerate(types) if type_ in wanted)


def _strips_right(fields: CheckedFields) -> Callable[[str], bool]:
    """Return whether a special token includes the white space after it, which GGUF cannot express.

    Source: the tokenizer.json of the Phi-3 models, which llama.cpp also recognizes by name.
    """
    name = (fields.get(Keys.General.NAME, str) or "").lower()
    is_phi3 = "phi-3" in name or "phi3" in name
    return lambda text: is_phi3 and text not in ("<unk>", "<s>", "<|endoftext|>")


def _ids_by_text(texts: Sequence[str]) -> dict[str, int]:
    """Return the id of each token, without those that have no text."""
    ids = {text: id_ for id_, text in enumerate(texts)}
    ids.pop("", None)
    if not ids:
        raise malformed(f"{KEYS.LIST} contains no tokens")
    try:
        "".join(ids).encode()
    except UnicodeEncodeError:
        raise malformed(f"{KEYS.LIST} contains a token that is not valid UTF-8") from None
    if max(map(len, ids)) > MAX_TOKEN_CHARACTERS:
        raise malformed(f"{KEYS.LIST} contains a token of more than {MAX_TOKEN_CHARACTERS} characters")
    if len(ids) < len(texts):  # some have no text, or are repeated
        text, count = collections.Counter(filter(None, texts)).most_common(1)[0]
        if count > 1:
            raise malformed(f"{KEYS.LIST} contains {text!r} {count} times")
    return ids


def _listed_pairs(fields: CheckedFields, tokens: _Tokens) -> list[tuple[str, str]]:
    """Return the merges that a file lists, each as two strings with a space between them."""
    merges = split_merges(fields.array(KEYS.MERGES, str))
    return merge_pairs(merges, tokens.vocab, tokens.control.ids, field=KEYS.MERGES)


def _scored_pairs(fields: CheckedFields, tokens: _Tokens) -> list[tuple[str, str]]:
    """Return the merges of a vocabulary with scores.

    Any two tokens that form a third token are merged. Merges are sorted by the score of that token, best first. Their
    strings are the keys of the vocabulary, so that they take no more memory.
    """
    scores = _per_token(fields, KEYS.SCORES, float, len(tokens.texts))
    if not all(map(math.isfinite, scores)):
        raise malformed(f"{KEYS.SCORES} contains a value that is not finite")
    text_types = (TokenType.NORMAL, TokenType.UNUSED)
    vocab = tokens.vocab
    made = [text for text, id_ in vocab.items() if tokens.types[id_] in text_types]
    made.sort(key=lambda text: -scores[vocab[text]])
    keys = {text: text for text in vocab}
    pairs = []
    for text in made:
        for cut in range(1, len(text)):
            left, right = text[:cut], text[cut:]
            if left in keys and right in keys:
                pairs.append((keys[left], keys[right]))
    return pairs


def _per_token(fields: CheckedFields, name: str, kind: type[T], size: int) -> Sequence[T]:
    """Return a field that must be an array with one element for each of `size` tokens."""
    values = fields.array(name, kind)
    if len(values) != size:
        raise malformed(f"{name} has {len(values)} elements for {size} tokens")
    return values


def _token_id(fields: CheckedFields, name: str, size: int, default: int | None) -> int | None:
    """Return the id of a special token in a vocabulary of `size` tokens."""
    id_ = fields.get(name, int)
    if id_ is None:
        return default if default is not None and default < size else None
    if id_ in _NO_TOKEN:
        return None
    if not 0 <= id_ < size:
        raise malformed(f"{name} is {id_}, but there are {size} tokens")
    return id_
