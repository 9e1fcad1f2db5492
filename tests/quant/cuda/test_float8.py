"""The layout of 8-bit float matrices on a GPU."""

import torch

from quant.cuda.float8 import joined, to_device
from quant.kernels import reference
from quant.kernels.float8_unpack import unpacked
from quant.tensor import Float8Tensor
from tests.quant.float8_weights import float8_weight

CPU = torch.device("cpu")


def test_matrix_of_aligned_width_is_as_large_as_in_the_file() -> None:
    for block in ((1, None), (128, 128)):
        weight = float8_weight((512, 1024), block)
        assert to_device(weight, CPU).nbytes == weight.nbytes


def test_scales_of_any_type_become_float32() -> None:
    weight = float8_weight((8, 32), (1, None))
    for dtype in (torch.bfloat16, torch.float16, torch.float8_e8m0fnu):
        scale = weight.scale.to(dtype)
        matrix = to_device(Float8Tensor(weight.shape, "F8", weight.values, scale, weight.block), CPU)
        assert torch.equal(matrix.scales, scale.float())


def test_matrices_of_equal_form_are_concatenated(device: torch.device) -> None:
    cases: list[list[tuple[tuple[int, int], tuple[int | None, int | None]]]] = [
        [((16, 48), (None, None)), ((8, 48), (1, None)), ((5, 48), (None, None))],
        [((128, 160), (64, 32)), ((100, 160), (64, 32))],  # blocks do not straddle matrices
        [((100, 160), (64, 32)), ((20, 160), (64, 32))],  # blocks would straddle matrices
    ]
    for case in cases:
        weights = [float8_weight(shape, block) for shape, block in case]
        matrices = [to_device(weight, device) for weight in weights]
        assert len({matrix.form for matrix in matrices}) == 1
        want = torch.cat([reference.dequantize(weight) for weight in weights])
        whole = joined(matrices)
        assert whole.shape == want.shape
        assert torch.equal(unpacked(whole, torch.float32).cpu(), want)


def test_joining_one_matrix_returns_it() -> None:
    matrix = to_device(float8_weight((4, 16), (1, None)), CPU)
    assert joined([matrix]) is matrix
