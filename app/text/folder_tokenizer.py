"""The tokenizer of a checkpoint folder, built from all files in the folder that concern text.

This module lists those files, and defines which file overrides which. Source: transformers' behavior.
"""

from pathlib import Path

from app.errors import UnsupportedTokenizer
from app.text.checked_fields import CheckedFields, malformed
from app.text.json_tokenizer import from_json
from app.text.tokenizer import Tokenizer
from quant.checkpoint_files import read_bytes, read_object, read_text

VOCABULARY = "tokenizer.json"
TEMPLATE = "chat_template.jinja"
EOS = "eos_token_id"
MAX_ENDING_IDS = 256


def from_folder(folder: Path) -> Tokenizer:
    """Return the tokenizer. Raises UnsupportedTokenizer for unknown kinds, and ModelFileError for malformed files."""
    vocabulary = read_bytes(folder, VOCABULARY)
    if vocabulary is None:
        raise UnsupportedTokenizer(
            f"{folder} has no {VOCABULARY}",
            "Pull the model again, or choose its GGUF version, which includes the tokenizer.",
        )
    return from_json(vocabulary, tokenizer_config(folder), _ending_ids(folder), _rows(folder))


def tokenizer_config(folder: Path) -> dict[str, object]:
    """Return tokenizer_config.json, merged with other files. Raises ModelFileError.

    A template in a separate file is the newest form, and overrides the others. Special tokens in a separate file are
    the oldest form, and are only a fallback. The template of a model's image processor is only a fallback as well.
    """
    special = read_object(folder, "special_tokens_map.json") or {}
    processor = read_object(folder, "chat_template.json") or {}
    template = read_text(folder, TEMPLATE)
    newest: dict[str, object] = {} if template is None else {"chat_template": template}
    return special | processor | (read_object(folder, "tokenizer_config.json") or {}) | newest


def _rows(folder: Path) -> int | None:
    """Return the size of the model's vocabulary, or None if config.json does not contain it."""
    match read_object(folder, "config.json"):
        case {"vocab_size": int(rows)} | {"text_config": {"vocab_size": int(rows)}} if rows > 0:
            return rows
    return None


def _ending_ids(folder: Path) -> frozenset[int]:
    """Return the ids that end generation, from generation_config.json or, in older checkpoints, config.json."""
    files = ("generation_config.json", "config.json")
    listed = [ids for name in files if (ids := _listed_ids(folder, name)) is not None]
    return listed[0] if listed else frozenset()


def _listed_ids(folder: Path, name: str) -> frozenset[int] | None:
    """Return the ids that end generation according to one file, or None if the file has none. Raises ModelFileError."""
    fields = CheckedFields(read_object(folder, name) or {}, f"{name}: ")
    if EOS not in fields:
        return None
    ids = fields.array(EOS, int) if fields.is_array(EOS) else [fields.require(EOS, int)]
    if len(ids) > MAX_ENDING_IDS or min(ids, default=0) < 0:
        raise malformed(f"{name}: {EOS} is not a list of at most {MAX_ENDING_IDS} ids")
    return frozenset(ids)
