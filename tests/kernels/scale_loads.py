"""Count the loads of scales in the machine code that unpacks whole matrices, without a GPU.

    python -m tests.kernels.scale_loads

Prints a line for each kind of weights and architecture. Fails if a thread loads more than one 16-bit scale, or one
scale and one minimum, for four weights.
"""

import sys

import torch

from quant.cuda.loading import to_device
from quant.cuda.matrix import PackedMatrix
from quant.kernels.unpack import FRAGMENTS, ROWS, unpack
from tests.kernels.compilation import machine_code
from tests.kernels.launches import record_launches
from tests.kernels.weights import weight

KINDS = ("Q4_K", "Q6_K", "Q4_0", "Q8_0", "int4 g128 zeros")  # their scales have 16 bits
ARCHITECTURES = (86, 90, 120)
META = torch.device("meta")
THREADS = 128  # threads of a program


def main() -> int:
    good = True
    for kind in KINDS:
        matrix = to_device(weight(kind, 4096, 4096, META), META)
        assert isinstance(matrix, PackedMatrix)
        with record_launches() as launches:
            unpack(matrix)
        (launch,) = launches.values()
        weights = ROWS * FRAGMENTS * matrix.form.fragment // THREADS  # weights of a thread
        most = weights // 4 * (1 if matrix.minimums is None else 2)
        for architecture in ARCHITECTURES:
            loads = machine_code(launch, architecture).count("LDG.E.U16")
            good = good and 0 < loads <= most
            print(f"{kind}, sm_{architecture}: {loads} loads of scales for {weights} weights, at most {most}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
