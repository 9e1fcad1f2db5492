"""The tokenizer of a checkpoint's folder, from all of its files that say something about text.

What `app.text.json_tokenizer` does not know: which files there are, and which of them decides where several speak.
Source: what transformers does with the same folder.
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
    """Raises UnsupportedTokenizer for a kind that is not known, ModelFileError for malformed files."""
    vocabulary = read_bytes(folder, VOCABULARY)
    if vocabulary is None:
        raise UnsupportedTokenizer(
            f"{folder} has no {VOCABULARY}",
            "Pull the model again, or choose a GGUF file of it, which includes the tokenizer.",
        )
    return from_json(vocabulary, tokenizer_config(folder), _ending_ids(folder), _rows(folder))


def tokenizer_config(folder: Path) -> dict[str, object]:
    """tokenizer_config.json, with what other files have of it. Raises ModelFileError.

    A template in a file of its own is the newest way to store one, and overrides. Special tokens in a file of their own
    are the oldest, and fill in; so does the template that belongs to a model's image processor.
    """
    special = read_object(folder, "special_tokens_map.json") or {}
    processor = read_object(folder, "chat_template.json") or {}
    template = read_text(folder, TEMPLATE)
    newest: dict[str, object] = {} if template is None else {"chat_template": template}
    return special | processor | (read_object(folder, "tokenizer_config.json") or {}) | newest


def _rows(folder: Path) -> int | None:
    """How many ids the model knows; None: config.json does not say."""
    match read_object(folder, "config.json"):
        case {"vocab_size": int(rows)} | {"text_config": {"vocab_size": int(rows)}} if rows > 0:
            return rows
    return None


def _ending_ids(folder: Path) -> frozenset[int]:
    """The ids after which generation ends: of generation_config.json, or as it was before there was one."""
    files = ("generation_config.json", "config.json")
    listed = [ids for name in files if (ids := _listed_ids(folder, name)) is not None]
    return listed[0] if listed else frozenset()


def _listed_ids(folder: Path, name: str) -> frozenset[int] | None:
    """Those of one file; None: it names none. Raises ModelFileError."""
    fields = CheckedFields(read_object(folder, name) or {}, f"{name}: ")
    if EOS not in fields:
        return None
    ids = fields.array(EOS, int) if fields.is_array(EOS) else [fields.require(EOS, int)]
    if len(ids) > MAX_ENDING_IDS or min(ids, default=0) < 0:
        raise malformed(f"{name}: {EOS} is not a list of at most {MAX_ENDING_IDS} ids")
    return frozenset(ids)
