"""Facts that a model states in the headers of its files, read without weights, torch, or the vocabulary.

A value of the wrong type is ignored. The engine checks the configuration as it does when it loads the model.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from app.models.catalog import Sampling
from app.models.repository import CONFIG
from app.models.sampling_defaults import read_sampling
from app.models.stored_model import StoredModel
from app.models.tensor_classes import HeaderTensor
from app.text.folder_tokenizer import VOCABULARY, tokenizer_config
from app.text.infilling import MARKS
from app.text.json_tokenizer import chat_template
from engine.checkpoints.checkpoint import NOTHING
from engine.checkpoints.metadata import Metadata
from engine.errors import UnsupportedModel
from engine.models import check_config, ignored_tensors
from quant.checkpoint_files import read_bytes, read_object
from quant.errors import printable
from quant.gguf_parts import GGUFParts
from quant.safetensors_shards import SafetensorsShards
from quant.string_array import StringArray

_FIM = tuple(marks.prefix for marks in MARKS)
_LICENSE = re.compile(rb"\A---\n(?:.*\n)*?license: *([\w.-]+) *\n")
_README_BYTES = 4096


@dataclass(frozen=True, slots=True)
class ModelHeader:
    """Facts from the headers. A field is None or empty if the files do not state it."""

    architecture: str | None
    context_length: int | None
    vocab_size: int | None
    license: str | None
    quantization: str | None
    packed_bits: int | None  # bits of a weight that is packed into wider integers
    chat_template: str | None
    bos_token: str
    fills_in_the_middle: bool
    sampling: Sampling | None  # recommended by the files
    tensors: tuple[HeaderTensor, ...]
    support: "Support"


@dataclass(frozen=True, slots=True)
class Support:
    """The result of the engine's check of a configuration."""

    problem: str = ""  # why this version of ingle cannot run the model; empty: it can
    idle_parameters: int = 0  # weights that do not compute one token: those of the experts that are not chosen for it
    ignored: re.Pattern[str] = NOTHING  # matches tensors that are not loaded


def read_header(stored: StoredModel) -> ModelHeader:
    """Read the headers of a model. Raises ModelFileError."""
    return _of_folder(stored.path) if stored.is_folder else _of_gguf(stored.path)


def _of_gguf(path: Path) -> ModelHeader:
    with GGUFParts(path) as checkpoint:
        values, tensors = checkpoint.metadata, checkpoint.tensors.values()
        architecture = _text(values, "general.architecture")
        texts = values.get("tokenizer.ggml.tokens")
        texts = texts if isinstance(texts, StringArray) else ()
        bos = _number(values, "tokenizer.ggml.bos_token_id")
        return ModelHeader(
            architecture=architecture,
            context_length=_number(values, f"{architecture}.context_length"),
            vocab_size=_number(values, f"{architecture}.vocab_size") or len(texts) or None,
            license=_text(values, "general.license"),
            quantization=None,
            packed_bits=None,
            chat_template=_text(values, "tokenizer.chat_template", shown=False),
            bos_token=str(texts[bos]) if bos is not None and bos < len(texts) else "",
            fills_in_the_middle="tokenizer.ggml.fim_pre_token_id" in values or not set(_FIM).isdisjoint(texts),
            sampling=read_sampling(path, values),
            tensors=tuple(HeaderTensor(t.name, t.type.name, t.shape, t.nbytes) for t in tensors),
            support=_support(Metadata(values, architecture or "")),
        )


def _of_folder(folder: Path) -> ModelHeader:
    config, tokens = read_object(folder, CONFIG) or {}, tokenizer_config(folder)
    inner = config.get("text_config")  # the language model of a model that also processes images
    values = {**config, **inner} if isinstance(inner, dict) else config
    section = config.get("quantization_config")
    section = section if isinstance(section, dict) else {}
    vocabulary = read_bytes(folder, VOCABULARY) or b""
    with SafetensorsShards(folder) as checkpoint:
        tensors = checkpoint.tensors.values()
        return ModelHeader(
            architecture=_text(config, "model_type"),
            context_length=_number(values, "max_position_embeddings"),
            vocab_size=_number(values, "vocab_size"),
            license=_license(folder),
            quantization=_text(section, "quant_method"),
            packed_bits=_packed_bits(section),
            chat_template=chat_template(tokens),
            bos_token=_token(tokens.get("bos_token")),
            fills_in_the_middle=any(f'"{token}"'.encode() in vocabulary for token in _FIM),
            sampling=read_sampling(folder, {}),
            tensors=tuple(HeaderTensor(t.name, t.type.name, t.shape, t.nbytes) for t in tensors),
            support=_support(Metadata(config, _text(config, "model_type") or "", is_config=True)),
        )


def _support(metadata: Metadata) -> Support:
    try:
        config = check_config(metadata)
        if config is None:
            return Support()
        return Support("", config.matrix_elements - config.active_elements, ignored_tensors(metadata))
    except UnsupportedModel as error:
        return Support(printable(f"{error.message}. {error.remedy}".strip()))


def _packed_bits(section: Mapping[str, object]) -> int | None:
    match section:
        case {"bits": int(bits)} | {"config_groups": {"group_0": {"weights": {"num_bits": int(bits)}}}}:
            return bits if 0 < bits <= 8 else None
        case {"load_in_4bit": True}:
            return 4
    return None


def _license(folder: Path) -> str | None:
    """Return the license at the start of a model card, if the folder has one."""
    found = _LICENSE.search((read_bytes(folder, "README.md") or b"")[:_README_BYTES])
    return found[1].decode() if found else None


def _token(value: object) -> str:
    match value:
        case str(text) | {"content": str(text)}:
            return text
    return ""


def _text(values: Mapping[str, object], key: str, *, shown: bool = True) -> str | None:
    value = values.get(key)
    return (printable(value) if shown else value) if isinstance(value, str) and value else None


def _number(values: Mapping[str, object], key: str) -> int | None:
    value = values.get(key)
    return value if type(value) is int and value >= 0 else None
