"""Models with a short name (families.toml), and memory estimates from the shape of a model."""

import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from app.models.repository import QUANTIZATION, RepositoryName

_COUNT = re.compile(r"(\d{1,6}(?:\.\d{1,6})?) ?([kmbt]?)", re.IGNORECASE)
_UNITS: Mapping[str, int] = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
BITS = (16, 8, 4)
_MIXTURE = re.compile(r"(\d+(?:\.\d+)?b)-a(\d+(?:\.\d+)?[bm])(?![a-z])", re.IGNORECASE)  # "30B-A3B", "3b-a800m"
# parts of names of other mixtures of experts: "OLMoE", "Mixtral", "8x7B", "Qwen1.5-MoE-A2.7B", "GLM-4.5", "MiniMax-M2",
# "gpt-oss"
_OTHER_MIXTURE = re.compile(r"moe|mixtral|\d+x\d+(\.\d+)?b|glm-4\.[5-7]|minimax-m\d|gpt-oss", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class KVShape:
    """The dimensions on which the size of the KV cache depends."""

    layers: int
    kv_heads: int
    head_dim: int

    def token_bytes(self, bits: int) -> int:
        """Return the size in bytes of one token's keys and values, at `bits` bits per element."""
        return 2 * self.layers * self.kv_heads * self.head_dim * bits // 8


def weight_bytes(parameters: int, bits: int) -> int:
    return parameters * bits // 8


def read_count(text: str) -> int:
    """Parse a number of parameters: 70b, 1.5B, 135m, 7000000000. Raises ValueError."""
    found = _COUNT.fullmatch(text.strip()) or re.fullmatch(r"(\d{1,15})()", text.strip())
    if found is None:
        raise ValueError(f"must be a number such as 70b, 1.5b, or 135m, not {text!r}")
    return round(float(found[1]) * _UNITS[found[2].lower()])


def active_bytes(name: str, size: int) -> int | None:
    """Return the bytes of the weights that compute one token, of a model whose files have `size` bytes.

    The names of many mixtures of experts state all and the active parameters, as in Qwen3-30B-A3B. Returns None for
    the name of another mixture, of which the active parameters are unknown. All weights of other models count.
    """
    if (found := _MIXTURE.search(name)) is not None and (total := read_count(found[1])):
        return round(size * read_count(found[2]) / total)
    return None if _OTHER_MIXTURE.search(name) else size


FAMILIES_FILE = Path(__file__).with_name("families.toml")
KINDS = ("chat", "reasoning", "code", "embedding")
# Size of a file in the usual quantization: bytes per weight, and bytes for the embedding, which has more bits a weight
# and is a larger part of a small model. Within 10 % of the files of models with 0.5 to 70 billion weights.
_USUAL_BYTES, _EMBEDDING_BYTES = 0.63, 100_000_000
_NAME = r"[a-z0-9][a-z0-9.-]*"
_SIZE = "e?[0-9.]+[mb]"  # "e4b": 4 billion weights besides the tables of layers
_ASKED = re.compile(rf"({_NAME})(?::({_SIZE})(?:-({QUANTIZATION}))?)?", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class KnownModel:
    """One size of a family."""

    name: str  # "qwen3:4b"
    title: str
    kind: str  # one of KINDS
    license: str
    context: int  # tokens
    repository: RepositoryName
    draft: str | None  # short name of a small model with the same vocabulary; None for that model itself
    file_bytes: int | None = None  # approximate size of files that have another quantization

    @property
    def usual_size(self) -> int:
        """Approximate size in bytes of the model's files in the usual quantization."""
        if self.file_bytes is not None:
            return self.file_bytes
        return _EMBEDDING_BYTES + round(read_count(self.name.partition(":")[2]) * _USUAL_BYTES)


@dataclass(frozen=True, slots=True)
class Families:
    """All known models, by name."""

    models: Mapping[str, KnownModel]
    defaults: Mapping[str, str]  # family name without a size -> model
    recommended: tuple[KnownModel, ...]  # models recommended for chats, the best first

    def __iter__(self) -> Iterator[KnownModel]:
        return iter(self.models.values())

    def repository(self, name: str) -> RepositoryName | None:
        """Return the repository for a name such as "qwen3", "qwen3:4b", or "qwen3:4b-q8_0", ignoring case."""
        asked = _ASKED.fullmatch(name)
        if asked is None:
            return None
        family, size, quantization = asked.groups()
        wanted = f"{family}:{size}".lower() if size else self.defaults.get(family.lower(), "")
        known = self.models.get(wanted)
        if known is None or quantization is None:
            return known.repository if known else None
        return RepositoryName(known.repository.repo, quantization.upper())

    def similar(self, name: str) -> list[str]:
        """Return names similar to a mistyped one, the most similar first."""
        return get_close_matches(name.lower(), [*self.models, *self.defaults], n=3)


def load_families(path: Path = FAMILIES_FILE) -> Families:
    """Read and check the file. Raises ValueError that names the invalid entry."""
    with path.open("rb") as file:
        content = tomllib.load(file)
    try:
        models = [model for table in content["family"] for model in _models(**table)]
        bare = [(table["name"], table["default"]) for table in content["family"] if "default" in table]
        recommended: list[str] = content["recommended"]
    except (KeyError, TypeError) as problem:
        raise ValueError(f"families: missing or unknown key: {problem}") from None
    defaults = {name: f"{name}:{size}" for name, size in bare}
    by_name = {model.name: model for model in models}
    named = [*defaults.values(), *recommended]
    if len(by_name) != len(models) or len(defaults) != len(bare) or not by_name.keys() >= set(named):
        raise ValueError("families: a name is defined twice, or refers to no model")
    return Families(by_name, defaults, tuple(by_name[name] for name in recommended))


def _models(
    *, name: str, title: str, kind: str, license: str, context: int, repositories: dict[str, Any],  # noqa: A002
    default: str = "", draft: str | None = None, file_bytes: dict[str, int] | None = None,
) -> Iterator[KnownModel]:  # fmt: skip
    """Yield the sizes of one family."""
    if not re.fullmatch(_NAME, name) or kind not in KINDS or context <= 0 or not repositories:
        raise ValueError(f"families: {name}: {kind}, {context} tokens")
    for size, repo in repositories.items():
        repository = RepositoryName.parse(repo)
        if repository is None or not re.fullmatch(_SIZE, size):
            raise ValueError(f"families: {name}:{size}: {repo}")
        whole = f"{name}:{size}"
        own_draft = draft if draft != whole else None
        yield KnownModel(whole, title, kind, license, context, repository, own_draft, (file_bytes or {}).get(size))
