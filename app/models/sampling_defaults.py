"""The sampling that suits a model, as its catalog entry or its own generation_config.json says.

What a file leaves out has the value that transformers gives it. Refuses to know what a request asks for.
"""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from app.models.catalog import Catalog, Sampling, load_catalog
from app.text.checked_fields import malformed
from quant.checkpoint_files import read_object

GENERATION_CONFIG = "generation_config.json"
_BOUNDS = {  # name: (least, most); the names are those of `Sampling`, too
    "temperature": (0.0, 2.0),
    "top_p": (0.0, 1.0),
    "top_k": (-1, 1 << 31),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (0.5, 2.0),
}


# What is used where neither the command line nor the model says anything.
DEFAULT_SAMPLING = {"temperature": 0.7, "top_p": 0.95}


def suitable_sampling(name: str, path: Path) -> dict[str, Any]:
    """The sampling that the catalog or the model's own files have for it, or the one for all others, by the names of
    `SamplingParams`. Raises ModelFileError for a value out of bounds."""
    suitable = sampling_of(name, path, load_catalog())
    return DEFAULT_SAMPLING if suitable is None else asdict(suitable)


def sampling_of(name: str, path: Path, catalog: Catalog) -> Sampling | None:
    """Of the model of that name at that path; None: nobody says. Raises ModelFileError for a value out of bounds."""
    if entry := catalog.find(name):
        return entry.sampling
    return read_sampling(path) if path.is_dir() else None


def read_sampling(folder: Path) -> Sampling | None:
    """What a checkpoint's folder says. Raises ModelFileError for a value out of bounds."""
    content = read_object(folder, GENERATION_CONFIG) or {}
    given: dict[str, float] = {}
    for name, (least, most) in _BOUNDS.items():
        value = content.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
            raise malformed(
                f"{folder / GENERATION_CONFIG}: {name} is {value!r:.60}, not a number from {least} to {most}"
            )
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
