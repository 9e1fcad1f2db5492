"""A tokenizer from the contents of a checkpoint's tokenizer.json and tokenizer_config.json.

The ids are those of the `tokenizers` library for the same file, except that text never becomes a control token. The
files are untrusted. Only byte-pair vocabularies that represent bytes in a known way are supported; others are refused.
"""

import json
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import tokenizers
from tokenizers import AddedToken, models

from app.errors import UnsupportedTokenizer
from app.text.bpe_model import bpe_model, merge_pairs, split_merges
from app.text.checked_fields import CheckedFields, malformed
from app.text.control_tokens import ControlToken, ControlTokens, end_of_generation_ids, looks_like_control
from app.text.text_growth import check_growth
from app.text.tokenizer import TextEncoder, Tokenizer, Vocabulary, byte_level_bytes, library_errors, sentencepiece_bytes
from quant.bounded_json import JSONProblem, parse_object

_REMEDY = "Choose a model of another family, or a GGUF file of this one."
# Limit of the ids without a token in a vocabulary. Some vocabularies have gaps, but a forged one could exhaust the
# memory.
MAX_UNUSED_IDS = 1 << 16


@dataclass(frozen=True, slots=True)
class _Added:
    """One entry of `added_tokens`."""

    id: int
    text: str
    special: bool
    normalized: bool
    single_word: bool
    strip_left: bool
    strip_right: bool

    @property
    def is_markup(self) -> bool:
        return self.special or looks_like_control(self.text)


@dataclass(frozen=True, slots=True)
class _Spelling:
    """The way in which tokens represent bytes."""

    to_bytes: Callable[[str], bytes]
    space_prefix: bool = False


def from_json(
    content: bytes,
    tokenizer_config: Mapping[str, object] | None = None,
    ending_ids: Collection[int] = (),
    rows: int | None = None,
) -> Tokenizer:
    """Return the tokenizer for a tokenizer.json and a parsed tokenizer_config.json.

    Without the second, the tokens that start and end a document are unknown, and there is no chat template.
    `ending_ids` end a reply, as do eos_token and known control tokens. `rows` is the size of the model's vocabulary:
    added tokens beyond it are left out, because a text-only model may come with the vocabulary of a vision model.
    Raises UnsupportedTokenizer for unknown kinds, and ModelFileError for a malformed file.
    """
    document = CheckedFields(_parse(content))
    config = CheckedFields(tokenizer_config or {}, "tokenizer_config.")
    spelling = _spelling(document)
    added = [token for token in _added_tokens(document) if rows is None or token.id < rows]
    ids = _token_ids(document, added)
    control = {token.text: token for token in added if token.is_markup}
    verbatim = [token for token in added if not token.is_markup]
    backend, start_prefix = _backend(document, {text: id_ for text, id_ in ids.items() if text not in control}, control)
    with library_errors("building its vocabulary"):
        backend.add_tokens([_library_token(token) for token in verbatim])
    bos_id, eos_id = (_named_id(config, name, ids) for name in ("bos_token", "eos_token"))
    control_ids = {text: token.id for text, token in control.items()}
    texts = _texts_by_id(ids)
    ending = {*(id_ for id_ in ending_ids if id_ < (rows or len(texts))), *([] if eos_id is None else [eos_id])}
    vocabulary = Vocabulary(
        texts=texts,
        to_bytes=spelling.to_bytes,
        control=ControlTokens({text: _control_token(token) for text, token in control.items()}),
        verbatim=frozenset(token.id for token in added if token.is_markup or spelling.to_bytes is byte_level_bytes),
        hidden=frozenset(token.id for token in added if token.special),
        bos_id=bos_id,
        eos_id=eos_id,
        end_of_generation_ids=end_of_generation_ids(control_ids, ending),
        add_bos=bos_id is not None and _adds_bos(config, backend, bos_id),
        space_prefix=spelling.space_prefix,
        chat_template=chat_template(tokenizer_config or {}),
        response_template=config.get("response_template", dict) if config.is_object("response_template") else None,
    )
    # the encoder adds BOS itself, and a malformed post-processor could drop the text
    backend.post_processor = None
    encoder = TextEncoder(backend, start_prefix=start_prefix, verbatim=[token.text for token in verbatim])
    return Tokenizer(encoder, vocabulary)


def _parse(content: bytes) -> dict[str, object]:
    try:
        return parse_object(content)
    except JSONProblem as problem:
        raise malformed(f"tokenizer.json: {problem}") from None


def _added_tokens(document: CheckedFields) -> list[_Added]:
    if "added_tokens" not in document:
        return []
    added = []
    for position, entry in enumerate(document.array("added_tokens", dict)):
        fields = CheckedFields(entry, f"added_tokens[{position}].")
        token = _Added(
            id=fields.require("id", int),
            text=fields.require("content", str),
            special=fields.get("special", bool) or False,
            normalized=fields.get("normalized", bool) is not False,
            single_word=fields.get("single_word", bool) or False,
            strip_left=fields.get("lstrip", bool) or False,
            strip_right=fields.get("rstrip", bool) or False,
        )
        if not token.text:
            raise malformed(f"added_tokens[{position}].content is empty")
        added.append(token)
    return added


def _token_ids(document: CheckedFields, added: list[_Added]) -> dict[str, int]:
    """Return the ids of all tokens, including added ones."""
    ids = dict(document.child("model").require("vocab", dict))
    for token in added:
        ids[token.text] = token.id
    if not ids or any(type(text) is not str or type(id_) is not int for text, id_ in ids.items()):
        raise malformed("model.vocab does not map texts to ids")
    if len(set(ids.values())) != len(ids):
        raise malformed("model.vocab and added_tokens give the same id to two tokens")
    if min(ids.values()) < 0 or max(ids.values()) >= len(ids) + MAX_UNUSED_IDS:
        raise malformed(f"model.vocab has an id that is out of range for {len(ids)} tokens")
    try:
        "".join(ids).encode()
    except UnicodeEncodeError:
        raise malformed("model.vocab contains a token that is not valid UTF-8") from None
    return ids


def _texts_by_id(ids: Mapping[str, int]) -> list[str]:
    texts = [""] * (max(ids.values()) + 1)
    for text, id_ in ids.items():
        texts[id_] = text
    return texts


def _spelling(document: CheckedFields) -> _Spelling:
    """Return how tokens represent bytes, as the decoder defines it. All steps of the decoder must be known."""
    decoder = document.child("decoder")
    kind = decoder.require("type", str)
    if kind == "ByteLevel":
        return _Spelling(byte_level_bytes)
    steps = decoder.array("decoders", dict) if kind == "Sequence" else [document.require("decoder", dict)]
    space_prefix = False
    for step in steps:
        match step:
            case {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "}:
                pass
            case {"type": "ByteFallback" | "Fuse"}:
                pass
            case {"type": "Strip", "content": " ", "start": 1, "stop": 0}:
                space_prefix = True
            case {"type": "Metaspace", "replacement": "\u2581"}:
                space_prefix = step.get("prepend_scheme", "always") != "never"
            case _:
                raise UnsupportedTokenizer(f"The tokenizer's decoder {step.get('type')!r} is not supported", _REMEDY)
    return _Spelling(sentencepiece_bytes, space_prefix)


def _backend(
    document: CheckedFields, vocab: dict[str, int], control: Collection[str]
) -> tuple[tokenizers.Tokenizer, str]:
    """Return the library's tokenizer for plain text, and the prefix of text at the start of the input.

    A prefix for the first piece only is removed from the library's tokenizer, which would add it after each control
    token.
    """
    normalizer = document.get("normalizer", dict)
    pre_tokenizer, start_prefix = _without_first_prefix(document.get("pre_tokenizer", dict))
    check_growth(normalizer, pre_tokenizer)
    parts: dict[str, object] = {
        "version": "1.0",
        "normalizer": normalizer,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": document.get("post_processor", dict),
        "added_tokens": [],
        "model": {"type": "BPE", "vocab": {}, "merges": []},
    }
    with library_errors("reading tokenizer.json"):
        backend = tokenizers.Tokenizer.from_str(json.dumps(parts))
    backend.model = _model(document.child("model"), vocab, control)
    return backend, start_prefix


def _without_first_prefix(pre_tokenizer: Any) -> tuple[Any, str]:
    """Remove the prefix of a Metaspace step that only prefixes the first piece.

    Returns the pre-tokenizer without the prefix, and the prefix.
    """
    match pre_tokenizer:
        case {"type": "Metaspace", "prepend_scheme": "first", "replacement": "\u2581"}:
            return {**pre_tokenizer, "prepend_scheme": "never"}, " "
        case {"type": "Sequence", "pretokenizers": [first, *others]}:
            changed, prefix = _without_first_prefix(first)
            return {**pre_tokenizer, "pretokenizers": [changed, *others]}, prefix
    return pre_tokenizer, ""


def _model(model: CheckedFields, vocab: dict[str, int], control: Collection[str]) -> models.BPE:
    if (kind := model.get("type", str)) not in ("BPE", None):
        raise UnsupportedTokenizer(f"The tokenizer's model {kind!r} is not supported", _REMEDY)
    for option in ("continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(option, str):
            raise UnsupportedTokenizer(f"The tokenizer's option {option} is not supported", _REMEDY)
    pairs = merge_pairs(_listed_pairs(model), vocab, control, field="model.merges")
    byte_fallback = model.get("byte_fallback", bool) or False
    return bpe_model(vocab, pairs, byte_fallback=byte_fallback, ignore_merges=model.get("ignore_merges", bool) or False)


def _listed_pairs(model: CheckedFields) -> Iterable[tuple[str, str]]:
    """Return the merges, in either form that the library writes: "left right" or ["left", "right"]."""
    merges = model.require("merges", list)
    if merges and isinstance(merges[0], str):
        return split_merges(model.array("merges", str))
    pairs = []
    for merge in model.array("merges", list):
        match merge:
            case [str() as left, str() as right]:
                pairs.append((left, right))
            case _:
                raise malformed("model.merges contains a merge that is not a pair of texts")
    return pairs


def _control_token(token: _Added) -> ControlToken:
    if token.single_word:
        raise UnsupportedTokenizer(
            f"The tokenizer recognizes the control token {token.text!r} only as a whole word, which is not supported",
            _REMEDY,
        )
    return ControlToken(token.id, strip_left=token.strip_left, strip_right=token.strip_right)


def _library_token(token: _Added) -> AddedToken:
    return AddedToken(
        token.text,
        normalized=token.normalized,
        single_word=token.single_word,
        lstrip=token.strip_left,
        rstrip=token.strip_right,
    )


def _named_id(config: CheckedFields, name: str, ids: Mapping[str, int]) -> int | None:
    """Return the id of a token. The configuration contains its text, or an object with its text."""
    if name not in config:
        return None
    text = config.child(name).require("content", str) if config.is_object(name) else config.require(name, str)
    if text not in ids:
        raise malformed(f"tokenizer_config.{name} is {text!r}, which is not a token")
    return ids[text]


def _adds_bos(config: CheckedFields, backend: tokenizers.Tokenizer, bos_id: int) -> bool:
    named = config.get("add_bos_token", bool)
    if named is not None:
        return named
    with library_errors("encoding text"):
        return backend.encode("", add_special_tokens=True).ids[:1] == [bos_id]


def chat_template(tokenizer_config: Mapping[str, object]) -> str | None:
    """Return the template, or the one named default if there are several. Raises ModelFileError."""
    config = CheckedFields(tokenizer_config, "tokenizer_config.")
    if not config.is_array("chat_template"):
        return config.get("chat_template", str)
    templates = [CheckedFields(entry, "chat_template.") for entry in config.array("chat_template", dict)]
    return next((t.require("template", str) for t in templates if t.require("name", str) == "default"), None)
