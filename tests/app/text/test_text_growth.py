"""Normalizers that multiply text are refused before any text is encoded; common ones are accepted."""

import base64
import json
from typing import Any

import pytest
from tokenizers import normalizers, pre_tokenizers

from app.errors import UnsupportedTokenizer
from app.text import encoder_tokenizer
from app.text.json_tokenizer import from_json
from app.text.text_growth import check_growth
from tests.app.text.small_wordpiece import document
from tests.app.text.test_json_tokenizer import byte_level, saved

REPLACE = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 10}
PREPEND = {"type": "Prepend", "prepend": "a" * 5000}
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
LONG_TABLE = base64.b64encode((4).to_bytes(4, "little") + bytes(4) + b"a" * 1000 + b"\0").decode()


def nested(levels: int) -> Any:
    step: Any = REPLACE
    for _ in range(levels):
        step = {"type": "Sequence", "normalizers": [step, step]}
    return step


GROWING: dict[str, tuple[Any, Any]] = {
    "replacements": ({"type": "Sequence", "normalizers": [REPLACE] * 8}, None),
    "nested sequences": (nested(3), None),
    "sequences as deep as can be": (nested(9), None),
    "prefixes": ({"type": "Sequence", "normalizers": [PREPEND]}, None),
    "a regular expression": ({"type": "Replace", "pattern": {"Regex": "(?=a)"}, "content": "b" * 600}, None),
    "an empty text": ({"type": "Replace", "pattern": {"String": ""}, "content": "b" * 600}, None),
    "byte-level steps": (None, {"type": "Sequence", "pretokenizers": [BYTES] * 30}),
    "both kinds": (REPLACE, {"type": "Sequence", "pretokenizers": [BYTES] * 4}),
    "many small steps": ({"type": "Sequence", "normalizers": [{"type": "Strip"}] * 1000}, None),
    "a table": ({"type": "Precompiled", "precompiled_charsmap": LONG_TABLE}, None),
}
USED = {
    "Llama": (normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]), None),
    "CLIP": (
        normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()]),
        pre_tokenizers.Sequence([pre_tokenizers.ByteLevel()]),
    ),
    "BERT": (normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()),
    "NFKC": (normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()]), pre_tokenizers.Metaspace()),
}


@pytest.mark.parametrize("name", GROWING)
def test_steps_that_multiply_text_are_refused(name: str) -> None:
    normalizer, pre_tokenizer = GROWING[name]
    with pytest.raises(UnsupportedTokenizer, match="normalizers"):
        from_json(
            saved(byte_level(), normalizer=normalizer, **({"pre_tokenizer": pre_tokenizer} if pre_tokenizer else {}))
        )


def test_encoder_tokenizer_with_steps_that_multiply_text_is_refused() -> None:
    changed = json.loads(document()) | {"normalizer": GROWING["replacements"][0]}
    with pytest.raises(UnsupportedTokenizer, match="normalizers"):
        encoder_tokenizer.from_json(json.dumps(changed).encode())


@pytest.mark.parametrize("name", USED)
def test_common_steps_are_accepted(name: str) -> None:
    check_growth(*(step and json.loads(step.__getstate__()) for step in USED[name]))
