"""Damaged vocabularies: each is refused with a typed error, or gives only ids of its vocabulary.

The full run is `pytest tests/app/text/test_tokenizer_mutations.py --mutations 5000`.
"""

import json
import random
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from app.text import encoder_tokenizer, gguf_tokenizer, json_tokenizer
from app.text.encoder_tokenizer import EncoderTokenizer
from app.text.tokenizer import Tokenizer
from quant.errors import InglenookError
from tests.app.text import small_vocabulary, small_wordpiece
from tests.app.text.test_json_tokenizer import byte_level, saved, sentencepiece
from tests.support.json_mutations import mutated

TEXTS = ("Hello hello <|im_end|> wörld", "<s></s><tool><x><|role|>\0 a cafe 的我 ab", "▁a<0x41>🙂\u202e\n\t" * 3)


def as_json(fields: dict[str, Any]) -> bytes:
    return json.dumps(fields).encode()


def as_metadata(fields: dict[str, Any]) -> dict[str, object]:
    """Return GGUF metadata, whose arrays are tuples."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}


class Source(NamedTuple):
    """A valid vocabulary, and the function that reads a changed one."""

    fields: dict[str, Any]
    read: Callable[[dict[str, Any]], Tokenizer | EncoderTokenizer]


def from_metadata(fields: dict[str, object], read: Callable[[Any], Tokenizer | EncoderTokenizer]) -> Source:
    lists = {name: list(value) if isinstance(value, tuple) else value for name, value in fields.items()}
    return Source(lists, lambda changed: read(as_metadata(changed)))


def from_file(content: bytes, read: Callable[[bytes], Tokenizer | EncoderTokenizer]) -> Source:
    return Source(json.loads(content), lambda changed: read(as_json(changed)))


def sentencepiece_metadata() -> dict[str, object]:
    tokens = ("<unk>", *map("<0x{:02X}>".format, range(256)), *"▁abc", "▁a", "ab")
    types = (2, *[6] * 256, *[1] * 6)
    scores = tuple(-float(number) for number in range(len(tokens)))
    return small_vocabulary.metadata(
        model="llama", pre=None, merges=None, tokens=tokens, token_type=types, scores=scores, bos_token_id=0,
        eos_token_id=0,
    )  # fmt: skip


SOURCES = {
    "byte-level tokenizer.json": from_file(saved(byte_level()), json_tokenizer.from_json),
    "sentencepiece tokenizer.json": from_file(saved(sentencepiece()), json_tokenizer.from_json),
    "wordpiece tokenizer.json": from_file(small_wordpiece.document(), encoder_tokenizer.from_json),
    "byte-level GGUF": from_metadata(small_vocabulary.metadata(), gguf_tokenizer.from_gguf),
    "sentencepiece GGUF": from_metadata(sentencepiece_metadata(), gguf_tokenizer.from_gguf),
    "wordpiece GGUF": from_metadata(small_wordpiece.metadata(), encoder_tokenizer.from_gguf),
}


def special_ids(tokenizer: Tokenizer | EncoderTokenizer) -> set[int]:
    """Return the ids that prompts start with and that replies end with. Encoders add theirs to every text."""
    if isinstance(tokenizer, EncoderTokenizer):
        return set()
    return {*tokenizer.end_of_generation_ids, *(id_ for id_ in (tokenizer.bos_id, tokenizer.eos_id) if id_ is not None)}


@pytest.mark.parametrize("name", SOURCES)
def test_mutated_vocabulary_is_refused_or_gives_only_its_ids(name: str, mutations: int) -> None:
    source, rng = SOURCES[name], random.Random(name)
    source.read(source.fields)
    accepted = refused = 0
    for _ in range(mutations // len(SOURCES)):
        try:
            tokenizer = source.read(mutated(source.fields, rng))
        except InglenookError as error:
            assert error.message
            refused += 1
            continue
        accepted += 1
        ids = {token_id for text in TEXTS for token_id in tokenizer.encode(text)} | special_ids(tokenizer)
        assert all(0 <= token_id < tokenizer.vocab_size for token_id in ids)
    print(f"{name}: {accepted} accepted, {refused} refused")
    assert accepted > 0
    assert refused > 0
