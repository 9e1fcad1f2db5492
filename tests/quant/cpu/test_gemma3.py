"""The tensors of a real Q4_K_M file, which has four types. Values equal those of the `gguf` package, and products have
no more error than quantized activations cause.
"""

from collections import Counter
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from quant.cpu.activations import GROUP
from quant.cpu.arena import Arena
from quant.cpu.linear import CpuBackend
from quant.ggml_blocks import PLAIN_TYPES, decode
from quant.ggml_types import GGMLType
from quant.gguf import GGUFFile
from quant.kernels.reference import dequantize
from tests.support.gguf_reader import Reader

SLAB = 384  # rows that are checked at the start and at the end of a matrix


@pytest.mark.share(1)
@pytest.mark.parametrize("part", range(4))
def test_every_matrix_of_a_real_file_is_read_and_multiplied(gemma3: Path, every_layout: Path, part: int) -> None:
    """Each parameter selects a quarter of the matrices of each type."""
    with GGUFFile(gemma3) as file:
        tensors = Reader(gemma3).tensors
        kinds = [file.tensors[tensor.name].type.name for tensor in tensors]
        quantized = [kind for kind in kinds if kind not in PLAIN_TYPES]
        assert Counter(quantized) == {"Q4_K": 27, "Q5_0": 81, "Q6_K": 9, "Q8_0": 10}
        by_kind = [[tensor for tensor, it in zip(tensors, kinds, strict=True) if it == kind] for kind in set(quantized)]
        for tensor in (tensor for alike in by_kind for tensor in alike[part::4]):
            entry = file.tensors[tensor.name]
            rows, columns = entry.shape
            for first in {0, max(0, rows - SLAB)}:
                raw = np.array(tensor.data[first : first + SLAB])
                check(tensor.name, entry.type, raw, columns)


def check(name: str, kind: GGMLType, raw: np.ndarray[tuple[int, ...], np.dtype[np.uint8]], columns: int) -> None:
    weight = decode(kind, memoryview(raw.tobytes()), (len(raw), columns))
    values = torch.from_numpy(gguf.dequantize(raw, gguf.GGMLQuantizationType[kind.name]))
    assert torch.equal(dequantize(weight), values), name
    made = CpuBackend(Arena()).linear([weight])
    assert made.parts[0].region.size <= 1.03 * raw.nbytes, name
    x = torch.randn(3, columns)
    half_steps = x.view(3, -1, GROUP).abs().amax(-1) / (127 * 128) / 2
    bound = half_steps @ values.view(len(values), -1, GROUP).abs().sum(-1).T
    rounding = 4e-6 * (x.abs() @ values.abs().T)
    exact = x.double() @ values.double().T
    assert ((made.forward(x) - exact).abs() <= 1.001 * bound + rounding).all(), name
