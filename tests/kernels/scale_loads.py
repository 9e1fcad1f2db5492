"""Count the loads in the machine code that unpacks whole matrices, without a GPU.

    python -m tests.kernels.scale_loads

Prints a line for each kind of weights and architecture. Fails if a thread loads more than its words of each plane, its
scales, and its sub-scales or zero points, each at once.
"""

import sys

import torch

from quant.cuda.loading import to_device
from quant.cuda.matrix import TILE_COLUMNS, PackedMatrix
from quant.kernels.unpack import ROWS, TILES, unpack
from tests.kernels.compilation import machine_code
from tests.kernels.launches import record_launches
from tests.kernels.weights import weight

KINDS = ("Q4_K", "Q6_K", "Q4_0", "Q8_0", "int4 g128 zeros")
ARCHITECTURES = (86, 90, 120)
META = torch.device("meta")
WEIGHTS = ROWS * TILES * TILE_COLUMNS // 128  # weights of each of 128 threads


def main() -> int:
    good = True
    for kind in KINDS:
        matrix = to_device(weight(kind, 4096, 4096, META), META)
        assert isinstance(matrix, PackedMatrix)
        with record_launches() as launches:
            unpack(matrix)
        (launch,) = launches.values()
        most = sum(it is not None for it in (matrix.low, matrix.high, matrix.scales, matrix.sub_scales, matrix.zeros))
        for architecture in ARCHITECTURES:
            loads = machine_code(launch, architecture).count("LDG.E")
            good = good and 0 < loads <= most
            print(f"{kind}, sm_{architecture}: {loads} loads for {WEIGHTS} weights, at most {most}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
