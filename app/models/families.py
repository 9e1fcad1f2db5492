"""Families of models with a short name: which repository of the Hub each size is, and what there is to know beforehand.

The data is families.toml, checked when it is read; a mistake in it is ours, so it raises ValueError. Nothing here
touches the network or knows what is stored.
"""

import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from app.models.kv_formula import read_count
from app.models.repository import QUANTIZATION, RepositoryName

FAMILIES_FILE = Path(__file__).with_name("families.toml")
KINDS = ("chat", "reasoning", "code", "embedding")
_USUAL_BYTES = 0.62  # of a weight, in the quantization that is usual
_NAME = r"[a-z0-9][a-z0-9.-]*"
_SIZE = "[0-9.]+[mb]"
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
    draft: str | None  # the name of a small model with the same vocabulary; of itself, None

    @property
    def usual_size(self) -> int:
        """Bytes of its files, about, in the quantization that is usual."""
        return round(read_count(self.name.partition(":")[2]) * _USUAL_BYTES)


@dataclass(frozen=True, slots=True)
class Families:
    """All known models, by name."""

    models: Mapping[str, KnownModel]
    defaults: Mapping[str, str]  # the model that a family's bare name means
    recommended: tuple[KnownModel, ...]  # for chats, the best first

    def __iter__(self) -> Iterator[KnownModel]:
        return iter(self.models.values())

    def repository(self, name: str) -> RepositoryName | None:
        """What "qwen3", "qwen3:4b" or "qwen3:4b-q8_0" means, in any case."""
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
        """Names close to a mistyped one, closest first."""
        return get_close_matches(name.lower(), [*self.models, *self.defaults], n=3)


def load_families(path: Path = FAMILIES_FILE) -> Families:
    """Read and check the file. Raises ValueError that names what is wrong."""
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
    named = [*defaults.values(), *(model.draft for model in models if model.draft), *recommended]
    if len(by_name) != len(models) or len(defaults) != len(bare) or not by_name.keys() >= set(named):
        raise ValueError("families: a name is given twice, or means nothing")
    return Families(by_name, defaults, tuple(by_name[name] for name in recommended))


def _models(
    *, name: str, title: str, kind: str, license: str, context: int, repositories: dict[str, Any],  # noqa: A002
    default: str = "", draft: str | None = None,
) -> Iterator[KnownModel]:  # fmt: skip
    """The sizes of one family."""
    if not re.fullmatch(_NAME, name) or kind not in KINDS or context <= 0 or not repositories:
        raise ValueError(f"families: {name}: {kind}, {context} tokens")
    for size, repo in repositories.items():
        repository = RepositoryName.parse(repo)
        if repository is None or not re.fullmatch(_SIZE, size):
            raise ValueError(f"families: {name}:{size}: {repo}")
        whole = f"{name}:{size}"
        yield KnownModel(whole, title, kind, license, context, repository, draft if draft != whole else None)
