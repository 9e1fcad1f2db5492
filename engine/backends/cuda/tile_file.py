"""Measured tile sizes, stored in one file per GPU model and version of the kernels.

A damaged file is ignored: the default tiles always work.
"""

import json
import logging
import os
import re
from collections.abc import Mapping
from dataclasses import asdict
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import triton

from engine.private_folder import private_folder
from quant.kernels import (
    packed_batch,
    packed_matmul,
    packed_product,
    packed_scales,
    packed_values,
    packed_vector,
    result_type,
    tiles,
    token_tiles,
)
from quant.kernels.card import Card
from quant.kernels.tiles import (
    BATCH_ROWS,
    ROWS,
    SPLITS,
    STAGES,
    TOKENS,
    WARPS,
    MeasuredTiles,
    ProductShape,
    ProductTile,
)

log = logging.getLogger(__name__)

KERNELS = (
    packed_batch,
    packed_matmul,
    packed_product,
    packed_scales,
    packed_values,
    packed_vector,
    result_type,
    tiles,
    token_tiles,
)
CHOICES = {"rows": ROWS + BATCH_ROWS, "warps": WARPS, "tokens": TOKENS, "splits": SPLITS, "stages": STAGES}


def tile_file(folder: Path, card: Card) -> Path:
    """Return the path of a GPU model's tile file in the cache folder."""
    name = re.sub(r"[^a-z0-9]+", "-", card.name.lower()).strip("-")
    return folder / "tiles" / f"{name}-{_kernel_version()}.json"


def read_tiles(folder: Path | None, card: Card) -> MeasuredTiles:
    """Return the measured tiles. The result is empty if the file is missing or invalid."""
    if folder is None or not (file := tile_file(folder, card)).exists():
        return {}
    try:
        return {_shape(entry): _tile(entry["tile"]) for entry in json.loads(file.read_bytes())}
    except (OSError, ValueError, KeyError, TypeError) as problem:
        log.warning("ignoring the measured tiles in %s: %s. Measure again with ingle bench --tune", file, problem)
        return {}


def write_tiles(folder: Path, card: Card, found: Mapping[ProductShape, ProductTile]) -> Path:
    """Add tiles to the file of a GPU model, and return its path. Tiles measured for other language models are kept."""
    file = tile_file(folder, card)
    private_folder(file.parent)
    all_tiles = {**read_tiles(folder, card), **found}
    entries = [asdict(shape) | {"tile": asdict(tile)} for shape, tile in all_tiles.items()]
    unfinished = file.with_suffix(f".{os.getpid()}")
    with open(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as out:
        json.dump(entries, out, indent=1)
    unfinished.replace(file)
    return file


@cache
def _kernel_version() -> str:
    """Return a hash of everything that may change which tile is fastest."""
    sources = [Path(str(module.__file__)).read_bytes() for module in KERNELS]
    return sha256(b"".join([triton.__version__.encode(), *sources])).hexdigest()[:16]


def _shape(entry: Any) -> ProductShape:
    sizes = [entry[name] for name in ("outputs", "inputs", "tokens", "few_tokens")]
    numbers = [*sizes, entry["experts"]]
    is_valid = all(type(number) is int and number >= 0 for number in numbers) and all(sizes)
    if not isinstance(entry["kind"], str) or not is_valid:
        raise ValueError(f"invalid shape {entry!r:.80}")
    return ProductShape(entry["kind"], *numbers)


def _tile(entry: Any) -> ProductTile:
    for name, choices in CHOICES.items():
        if type(entry[name]) is not int or entry[name] not in choices:
            raise ValueError(f"{name} of a tile is {entry[name]!r:.40}, not one of {choices}")
    return ProductTile(**{name: entry[name] for name in CHOICES})
