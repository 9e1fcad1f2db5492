"""Measures the kernel tiles of a GPU for a model, and saves them for later loads."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from app.models.load.kernel_preparation import common_options
from app.models.sources import pull
from app.progress import Progress
from app.settings.settings import Settings

if TYPE_CHECKING:
    from engine.backends.cuda.tuning import Timer
    from quant.kernels.card import Card
    from quant.kernels.tiles import ProductShape, ProductTile


@dataclass(frozen=True, slots=True)
class Tuned:
    """The result of tuning."""

    card: str
    file: Path
    tiles: "dict[ProductShape, ProductTile]"
    faster: int  # number of tiles that are faster than the default ones


def tune(settings: Settings, progress: Progress, card: "Card | None" = None, timer: "Timer | None" = None) -> Tuned:
    """Measure the tiles of the model's matrices. An interrupted run saves the tiles that it has measured.

    `card` and `timer` replace a GPU and its clock in tests. Raises UnsupportedModel if there is no GPU, AppError, or
    ModelFileError.
    """
    from engine.backends.device_choice import gpu_for
    from engine.errors import UnsupportedModel
    from engine.loading import open_checkpoint

    gpu = gpu_for(replace(common_options(settings), backend="cuda", card=card))
    if gpu is None:
        raise UnsupportedModel("No GPU is selected, and only GPU kernels have tiles to tune", "Use --device cuda.")
    from engine.backends.cuda.tile_file import write_tiles
    from engine.backends.cuda.tuning import Tuning
    from quant.kernels.tile_search import rule_tile

    stored = pull(settings.model, settings, progress)
    loading = progress.task(f"Loading {stored.name}", stored.size)
    with open_checkpoint(stored.path, settings.quantize_method) as checkpoint, loading as report:
        bits = settings.activation_bits
        tuning = Tuning(checkpoint, gpu, lambda done, _total: report(done), timer, activation_bits=bits)
    shapes, tiles = tuning.shapes, dict["ProductShape", "ProductTile"]()
    try:
        with progress.task(f"Measuring tiles on {gpu.card.name}", len(shapes), unit="products") as report:
            for done, shape in enumerate(shapes, 1):
                tiles[shape] = tuning.fastest(shape)
                report(done)
    finally:
        file = write_tiles(settings.cache_dir, gpu.card, tiles)
    faster = sum(tile != rule_tile(shape, gpu.card) for shape, tile in tiles.items())
    return Tuned(gpu.card.name, file, tiles, faster)
