"""Repositories of models: their names, and which of their files form a model.

A model is a safetensors checkpoint with the files that describe it, or a GGUF file, whole or in parts. Other files,
such as pickles and code, are never used. This module works on names only, so it serves the Hub, its cache, and any
folder.
"""

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Self

from app.errors import ModelNotFound
from quant.safetensors_shards import INDEX, SINGLE_FILE

CONFIG = "config.json"
DESCRIPTIONS = (
    CONFIG,
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
    "modules.json",  # this file and the next two belong to embedding models
    "sentence_bert_config.json",
    "1_Pooling/config.json",
)

# A path component that is valid on POSIX and Windows: no separator, drive, leading or trailing dot, or device name, and
# of limited length.
_DEVICE = r"(?i:con|prn|aux|nul|com\d|lpt\d)(?![A-Za-z0-9_+-])"
COMPONENT = rf"(?!{_DEVICE})[A-Za-z0-9_](?:[A-Za-z0-9._+-]{{0,126}}[A-Za-z0-9_+-])?"
FILE = re.compile(f"{COMPONENT}(?:/{COMPONENT})*")

_NAME = re.compile(
    r"(?:hf:|(?:https://)?(?:hf\.co|huggingface\.co)/)?"
    rf"(?P<repo>{COMPONENT}/{COMPONENT})"
    rf"(?::(?P<quant>[A-Za-z0-9][A-Za-z0-9_.-]{{0,60}})|/(?:blob|resolve)/main/(?P<file>{COMPONENT}(?:/{COMPONENT})*)(?:\?download=true)?)?"
)
PREFERRED = ("Q4_K_M", "Q4_0", "Q8_0")  # quantizations to choose, in this order, if the name has none
_PART = re.compile(r"-(\d{5})-of-(\d{5})$")
QUANTIZATION = r"(?:i?q|tq)\d(?:_\w+)?|bf16|f16|f32|mxfp4\w*"  # pattern of quantizations in names; case is ignored
_QUANTIZATION = re.compile(rf"(?:^|[-._/])({QUANTIZATION})(?=[-./]|$)", re.IGNORECASE)
_NO_MODELS = ("mmproj", "imatrix")  # GGUF files that are not models


@dataclass(frozen=True, slots=True)
class RepositoryName:
    """`org/repo`, or `org/repo:Q4_K_M` for the GGUF file of that quantization."""

    repo: str
    quantization: str | None = None

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """Parse a name. Returns None if the text is no repository name."""
        found = _NAME.fullmatch(text)
        if found is None or "--" in found["repo"] or ".." in found["repo"]:
            return None  # cache folders have two hyphens instead of the slash, so a name may not contain two hyphens
        quantization = found["quant"] or quantization_of(found["file"] or "")
        return cls(found["repo"], quantization.upper() or None)

    def __str__(self) -> str:
        return f"{self.repo}:{self.quantization}" if self.quantization else self.repo


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """The files of one model, by name. The shards of a checkpoint are not included: its index names them."""

    quantization: str  # upper case; empty: the file names have none
    files: tuple[str, ...]  # the parts of a GGUF model in order

    @property
    def is_gguf(self) -> bool:
        return self.files[0].lower().endswith(".gguf")

    @property
    def is_whole(self) -> bool:
        """Whether all parts of a GGUF model are present."""
        part = _PART.search(self.files[0][: -len(".gguf")])
        return part is None or len(self.files) == int(part[2])


def models_among(names: Collection[str]) -> list[ModelFiles]:
    """Return all models that the files of a repository form."""
    parts: dict[str, list[str]] = {}
    for name in sorted(name for name in names if name.lower().endswith(".gguf")):
        if not any(word in name.lower() for word in _NO_MODELS):
            parts.setdefault(_PART.sub("", name[: -len(".gguf")]), []).append(name)
    models = [ModelFiles(quantization_of(stem), tuple(files)) for stem, files in parts.items()]
    weights = [name for name in (SINGLE_FILE, INDEX) if name in names]
    if weights and CONFIG in names:
        described = [name for name in DESCRIPTIONS if name in names]
        models.insert(0, ModelFiles("", (*described, weights[0])))
    return models


def quantization_of(name: str) -> str:
    """Return the quantization in the name of a GGUF file, in upper case; empty if there is none."""
    found = _QUANTIZATION.findall(_PART.sub("", name.removesuffix(".gguf")))
    return found[-1].upper() if found else ""


def matching_models(name: RepositoryName, models: Iterable[ModelFiles]) -> list[ModelFiles]:
    """Return the models to which the name can refer.

    Without a quantization: the checkpoint, else the first quantization of PREFERRED that exists, else all models.
    """
    models = list(models)
    if name.quantization:
        return [model for model in models if model.quantization == name.quantization]
    wishes = ([model for model in models if model.quantization == wish] for wish in PREFERRED)
    checkpoint = [model for model in models if not model.is_gguf]
    return checkpoint or next((found for found in wishes if found), models)


def choose(name: RepositoryName, names: Collection[str]) -> ModelFiles:
    """Return the model to which the name refers. Raises ModelNotFound with a list of the choices."""
    models = models_among(names)
    wanted = matching_models(name, models)
    if len(wanted) == 1:
        return wanted[0]
    choices = {str(RepositoryName(name.repo, model.quantization)) for model in models}
    if choices:
        problem = "is ambiguous" if wanted else "is not a model of this repository"
        raise ModelNotFound(f"{name} {problem}", f"Choose one of: {', '.join(sorted(choices))}.")
    raise ModelNotFound(
        f"{name.repo} has no model that can run here: no GGUF file, and no safetensors with a {CONFIG}",
        "Choose another repository: many models are also available as GGUF files.",
    )
