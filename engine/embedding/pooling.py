"""Read from a checkpoint how the states of a text are pooled.

GGUF metadata has `{arch}.pooling_type`; folders have the files of sentence-transformers (`modules.json`,
`1_Pooling/config.json`, `sentence_bert_config.json`). The default is the mean over all tokens, as in
sentence-transformers. Vectors are always normalized. The files are not trusted: they are validated, and no file outside
the folder is opened.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from gguf.constants import Keys, PoolingType

from engine.checkpoints.metadata import Key, Metadata
from engine.embedding.encoder import Pooling
from engine.errors import UnsupportedModel
from quant.bounded_json import JSONProblem, parse_object
from quant.checkpoint_files import read_bytes, read_object
from quant.errors import DAMAGED, ModelFileError, printable
from quant.safetensors_shards import member

MODULES = "modules.json"
LIMITS = "sentence_bert_config.json"

_POOLING_TYPE = Key(Keys.LLM.POOLING_TYPE)
_ARCHITECTURES = Key("", "architectures")
_RANKING = "ForSequenceClassification"
_LONGEST = Key("", "max_seq_length")
_OF_TYPE: dict[int, Pooling] = {
    PoolingType.MEAN: Pooling.MEAN,
    PoolingType.CLS: Pooling.CLS,
    PoolingType.LAST: Pooling.LAST,
}
_OF_FLAG = {
    "pooling_mode_mean_tokens": Pooling.MEAN,
    "pooling_mode_cls_token": Pooling.CLS,
    "pooling_mode_lasttoken": Pooling.LAST,
}
# values of `pooling_mode` in newer files
_OF_NAME = {"mean": Pooling.MEAN, "cls": Pooling.CLS, "lasttoken": Pooling.LAST}
_FOLDER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]{0,200}")
_COMPUTED = ("Transformer", "Pooling", "Normalize")  # the modules that `Encoder` implements


@dataclass(frozen=True, slots=True)
class PoolingConfig:
    """How states are pooled, and the maximum length of a text."""

    pooling: Pooling = Pooling.MEAN
    max_tokens: int | None = None  # token limit of a text; None: the number of positions of the model


def has_pooling_config(path: Path, metadata: Metadata) -> bool:
    """Whether the checkpoint describes pooling. Checkpoints of models that generate text do not."""
    return (path / MODULES).exists() if metadata.is_config else metadata.get(_POOLING_TYPE) is not None


def is_cross_encoder(metadata: Metadata) -> bool:
    """Whether the checkpoint is a cross-encoder, which reads two texts together and returns one score."""
    if not metadata.is_config:
        return metadata.get(_POOLING_TYPE) == PoolingType.RANK
    architectures = metadata.get(_ARCHITECTURES)
    return isinstance(architectures, list | tuple) and [str(it)[-len(_RANKING) :] for it in architectures] == [_RANKING]


def read_pooling(path: Path, metadata: Metadata) -> PoolingConfig:
    """Return the pooling of the checkpoint at `path`. Raises UnsupportedModel or ModelFileError."""
    return _of_folder(path) if metadata.is_config else _of_gguf(metadata)


def _of_gguf(metadata: Metadata) -> PoolingConfig:
    number = metadata.integer(_POOLING_TYPE, PoolingType.MEAN.value, minimum=0, maximum=1 << 10)
    if number not in _OF_TYPE:
        raise UnsupportedModel(f"{metadata.name(_POOLING_TYPE)} = {number} is not supported by this version")
    return PoolingConfig(_OF_TYPE[number])


def _of_folder(folder: Path) -> PoolingConfig:
    limits = Metadata(read_object(folder, LIMITS) or {}, "", is_config=True)
    maximum = None if limits.get(_LONGEST) is None else limits.integer(_LONGEST)
    return PoolingConfig(_pooling(folder), maximum)


def _pooling(folder: Path) -> Pooling:
    pooling = Pooling.MEAN
    for module in _modules(folder):
        kind, path = module.get("type"), module.get("path")
        name = kind.rpartition(".")[2] if isinstance(kind, str) else ""
        if name not in _COMPUTED:
            raise UnsupportedModel(
                f"{folder / MODULES} has a module of type {printable(str(kind))}, which is not supported",
                f"Supported modules: {', '.join(_COMPUTED)}.",
            )
        if name == "Pooling":
            if not isinstance(path, str) or not _FOLDER.fullmatch(path):
                raise ModelFileError(f"{folder / MODULES}: {printable(str(path))} is not a valid module name", DAMAGED)
            member(folder, path)
            pooling = _pooling_mode(folder / path, read_object(folder, f"{path}/config.json") or {})
    return pooling


def _pooling_mode(folder: Path, config: Mapping[str, object]) -> Pooling:
    """Return the mode that a pooling module's configuration selects. Raises UnsupportedModel if it is not exactly
    one.
    """
    named = config.get("pooling_mode")
    flags = [name for name, value in config.items() if name.startswith("pooling_mode_") and value is True]
    known = [_OF_NAME.get(named)] if isinstance(named, str) else [_OF_FLAG.get(flag) for flag in flags]
    if len(known) != 1 or known[0] is None:
        asked = named if isinstance(named, str) else ", ".join(sorted(flags)) or "nothing"
        raise UnsupportedModel(
            f"{folder} asks for the pooling mode {printable(asked)}, which is not supported",
            f"Supported: {', '.join(_OF_NAME)}.",
        )
    return known[0]


def _modules(folder: Path) -> list[Mapping[str, object]]:
    """Return the modules that sentence-transformers' `modules.json` lists; empty if the folder has no such file."""
    raw = read_bytes(folder, MODULES)
    if raw is None:
        return []
    try:
        # the parser accepts only objects, and this file is a list, so it is wrapped in an object
        read = parse_object(b'{"": %b}' % raw)
    except JSONProblem as problem:
        raise ModelFileError(f"{folder / MODULES}: {problem}", DAMAGED) from None
    listed = read.pop("", None)
    if read or not isinstance(listed, list) or not all(isinstance(module, dict) for module in listed):
        raise ModelFileError(f"{folder / MODULES} is not a list of objects", DAMAGED)
    return listed
