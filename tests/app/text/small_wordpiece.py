"""A WordPiece vocabulary of a few tokens, as a tokenizer.json and as GGUF metadata."""

import json

from gguf.constants import TokenType

from app.text.encoder_tokenizer import CONTINUES

MARKERS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")
PIECES = ("hello", "wor", "##ld", "##s", "cafe", "的", "我", "a", "##b", "[", "]", "cl", "!")
TOKENS = (*MARKERS, *PIECES)


def ids(*pieces: str) -> tuple[int, ...]:
    """Return the ids of pieces, with the markers around them."""
    return tuple(TOKENS.index(piece) for piece in ("[CLS]", *pieces, "[SEP]"))


def document(**model: object) -> bytes:
    """Return a tokenizer.json like BERT's, in which `model` changes fields of the model."""
    special = {"special": True, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return json.dumps(
        {
            "version": "1.0",
            "truncation": {"max_length": 3, "strategy": "LongestFirst", "stride": 0, "direction": "Right"},
            "padding": None,
            "added_tokens": [{"id": id_, "content": text, **special} for id_, text in enumerate(MARKERS)],
            "normalizer": {
                "type": "BertNormalizer",
                "clean_text": True,
                "handle_chinese_chars": True,
                "strip_accents": None,
                "lowercase": True,
            },
            "pre_tokenizer": {"type": "BertPreTokenizer"},
            "post_processor": {
                "type": "BertProcessing",
                "sep": ["[SEP]", TOKENS.index("[SEP]")],
                "cls": ["[CLS]", TOKENS.index("[CLS]")],
            },
            "decoder": {"type": "WordPiece", "prefix": CONTINUES, "cleanup": True},
            "model": {
                "type": "WordPiece",
                "unk_token": "[UNK]",
                "continuing_subword_prefix": CONTINUES,
                "max_input_chars_per_word": 100,
                "vocab": {text: id_ for id_, text in enumerate(TOKENS)},
                **model,
            },
        }
    ).encode()


def metadata(**changes: object) -> dict[str, object]:
    """Return GGUF metadata with changed fields.

    The keys of `changes` are the last parts of field names. None removes a field.
    """
    texts = [piece.removeprefix(CONTINUES) if piece.startswith(CONTINUES) else "\u2581" + piece for piece in PIECES]
    fields: dict[str, object] = {
        "model": "bert",
        "tokens": (*MARKERS, *texts),
        "token_type": (*[TokenType.CONTROL.value] * len(MARKERS), *[1] * len(PIECES)),
        "unknown_token_id": TOKENS.index("[UNK]"),
        "cls_token_id": TOKENS.index("[CLS]"),
        "seperator_token_id": TOKENS.index("[SEP]"),
        **changes,
    }
    return {f"tokenizer.ggml.{name}": value for name, value in fields.items() if value is not None}
