"""Check in machine code that products of 8-bit floats run on their matrix units, and that each sum is promoted.

    python -m tests.kernels.float8_loops

Triton can convert 8-bit floats to 16 bits, and can move the addition to the total into the matrix unit, which keeps few
bits of a sum. The results are then right in Triton's interpreter. The check fails if a main loop has no instruction
for products of 8-bit floats, or fewer additions than sums. Prints the figures of each loop.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from unittest import mock

import torch

from quant.cuda.float8 import to_device
from quant.kernels import float8_batch
from quant.kernels.card import Card
from quant.kernels.float8_batch import TILES, Tile
from quant.tensor import Float8Tensor
from tests.kernels.calls import blank
from tests.kernels.cards import CARDS
from tests.kernels.compilation import Machine, compile_launch, machine_code
from tests.kernels.launches import Launch, record_launches
from tests.kernels.machine_loops import Loop, main_loop
from tests.kernels.time_model import RATES, SCHEDULERS, clocks, matrix_clocks
from tests.kernels.weights import weight

KINDS = ("e4m3 channel", "e4m3 128x128")
FLOAT8_PRODUCTS = {"QMMA", "QGMMA"}
ADDITIONS = {"FADD", "FFMA"}
TOKENS, ROWS, COLUMNS = 2048, 4096, 4096
META = torch.device("meta")


@dataclass(frozen=True)
class Figures:
    """The main loop of a tile on a card."""

    card: Card
    kind: str
    tile: Tile
    machine: Machine
    loop: Loop

    @cached_property
    def products(self) -> int:
        """Matrix instructions of a warp for 8-bit floats."""
        return sum(it.name in FLOAT8_PRODUCTS for it in self.loop.body)

    @property
    def share(self) -> float:
        """The share of the matrix units' peak that the loop can reach: other pipes may be busier."""
        return self._matrix_clocks / clocks(self.loop, RATES[self.card.architecture])

    @property
    def bytes_per_clock(self) -> float:
        """Bytes that a multiprocessor reads from the L2 cache at that share."""
        step = float8_batch.DEPTH * (self.tile.rows + self.tile.tokens)
        return self.share * step / (self._matrix_clocks * self.tile.warps / SCHEDULERS)

    @property
    def _matrix_clocks(self) -> float:
        return matrix_clocks(self.loop, RATES[self.card.architecture])

    @property
    def fault(self) -> str:
        """A message for `main`, or an empty string if the loop has no fault."""
        sums = self.tile.rows * self.tile.tokens // (32 * self.tile.warps)
        additions = sum(it.name in ADDITIONS for it in self.loop.body)
        if not self.products:
            return f"multiplies with {', '.join(self.loop.matrix)}"
        if additions < sums:
            return f"promotes {additions} of {sums} sums"
        return ""

    def __str__(self) -> str:
        tile = f"{self.tile.rows}x{self.tile.tokens}"
        return (
            f"sm_{self.card.architecture:<3} {self.kind:13} {tile:>7}: {self.products:2} products of "
            f"{len(self.loop.body)} instructions, {self.machine.registers} registers, {self.machine.spills} spills, "
            f"{self.machine.shared} bytes, {self.share:.0%} of the peak at {self.bytes_per_clock:.0f} bytes per clock"
        )


def figures() -> Iterator[Figures]:
    """Yield the figures of all tiles on cards with known rates that multiply 8-bit floats."""
    for card in CARDS:
        if card.multiplies_float8 and card.architecture in RATES:
            for kind in KINDS:
                for tile in TILES:
                    launch = _launch(card, kind, tile)
                    loop = main_loop(machine_code(launch, card.architecture))
                    assert loop
                    yield Figures(card, kind, tile, compile_launch(launch, card.architecture), loop)


def _launch(card: Card, kind: str, tile: Tile) -> Launch:
    stored = weight(kind, ROWS, COLUMNS, META)
    assert isinstance(stored, Float8Tensor)
    tile_of = mock.patch.object(float8_batch, "tile_of", return_value=tile)
    with tile_of, record_launches() as launches:
        float8_batch.multiply(blank(TOKENS, COLUMNS), to_device(stored, META), card=card)
    return next(it for it in launches.values() if it.name == "_float8_batch_kernel")


def main() -> int:
    found = list(figures())
    for it in found:
        print(it)
    faults = [f"FAULT: sm_{it.card.architecture} {it.kind} {it.tile}: {it.fault}" for it in found if it.fault]
    print(*faults, sep="\n", end="")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
