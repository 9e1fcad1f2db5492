"""Sampling that a model recommends: in its catalog entry, its generation_config.json, or its GGUF metadata.

A value that a file omits has the default of transformers.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

from app.models.catalog import Catalog, Sampling, load_catalog
from app.text.checked_fields import malformed
from quant.checkpoint_files import read_object
from quant.gguf_parts import GGUFParts

if TYPE_CHECKING:
    from app.process.instance import Instance

GENERATION_CONFIG = "generation_config.json"
_BOUNDS = {  # name -> (least, most); `Sampling` has fields with the same names
    "temperature": (0.0, 2.0),
    "top_p": (0.0, 1.0),
    "top_k": (-1, 1 << 31),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (0.5, 2.0),
}
_GGUF_KEYS = {  # llama.cpp's converter writes the values of generation_config.json under these keys
    "temperature": "general.sampling.temp",
    "top_p": "general.sampling.top_p",
    "top_k": "general.sampling.top_k",
    "min_p": "general.sampling.min_p",
    "repetition_penalty": "general.sampling.penalty_repeat",
}
_FLOAT32_DIGITS = 7  # exact digits: a GGUF file stores 0.95 as 0.949999988

# The sampling of models that recommend none.
DEFAULT_SAMPLING: Final = Sampling(temperature=0.7, top_p=0.95)


def suitable_sampling(name: str, path: Path) -> Sampling:
    """Return the recommended sampling of the model `name` at `path`, or the default.

    Opens a GGUF file only if the catalog has no entry. Raises ModelFileError for a value out of bounds.
    """
    catalog = load_catalog()
    if found := catalogued_sampling(name, path, catalog):
        return found
    if not path.is_file():
        return read_sampling(path, {}) or DEFAULT_SAMPLING
    with GGUFParts(path) as checkpoint:
        return read_sampling(path, checkpoint.metadata) or DEFAULT_SAMPLING


def sampling_from_files(server: "Instance") -> Mapping[str, float]:
    """Return the sampling values that the files of a server's model recommend. For servers that report no defaults."""
    return suitable_sampling(server.model, Path(server.model_path)).values


def catalogued_sampling(name: str, path: Path, catalog: Catalog) -> Sampling | None:
    """Return the sampling that the catalog recommends for the model `name` at `path`; None if it recommends none."""
    entry = catalog.find(name) or catalog.find_file(path)
    return entry.sampling if entry else None


def read_sampling(path: Path, metadata: Mapping[str, object]) -> Sampling | None:
    """Return the sampling that the files at `path` recommend, or None.

    Reads generation_config.json of a folder, or the `metadata` of a GGUF file. Raises ModelFileError for a value out of
    bounds.
    """
    if path.is_dir():
        content = read_object(path, GENERATION_CONFIG) or {}
        return _checked({name: (name, content.get(name)) for name in _BOUNDS}, path / GENERATION_CONFIG)
    found = {name: (key, _rounded(metadata.get(key))) for name, key in _GGUF_KEYS.items()}
    return _checked(found, path)


def _rounded(value: object) -> object:
    return float(f"{value:.{_FLOAT32_DIGITS}g}") if isinstance(value, float) else value


def _checked(found: Mapping[str, tuple[str, object]], file: Path) -> Sampling | None:
    """Return the sampling that (key, value) pairs of a file state, keyed by field; None if the file states none."""
    given: dict[str, float] = {}
    for name, (key, value) in found.items():
        least, most = _BOUNDS[name]
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
            raise malformed(f"{file}: {key} is {value!r:.60}, not a number from {least} to {most}")
        given[name] = value
    if not given:
        return None
    return Sampling(
        temperature=given.get("temperature", 1.0),
        top_p=given.get("top_p") or 1.0,
        top_k=max(0, int(given.get("top_k", 0))),
        min_p=given.get("min_p", 0.0),
        repetition_penalty=given.get("repetition_penalty", 1.0),
    )
