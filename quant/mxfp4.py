"""MXFP4 matrices of safetensors checkpoints: 32 codes of 4 bits with one power of two as their scale.

Format: OCP Microscaling Formats 1.0. A byte has two adjacent columns, the first in its low bits. Blocks of GGUF files
have the same values in another order, so that kernels for them are used.
"""

import torch
from torch import Tensor

from quant.ggml_blocks import decode as decode_blocks
from quant.ggml_types import ggml_types
from quant.safetensors_values import as_bytes
from quant.tensor import BlockTensor

GROUP = 32  # columns that share a scale
MXFP4 = next(it for it in ggml_types().values() if it.name == "MXFP4")


def decode(blocks: Tensor, scales: Tensor) -> BlockTensor:
    """Return a matrix [rows, GROUP * groups] from `blocks` and `scales`, uint8 [rows, groups, 16] and [rows, groups].

    A scale is the exponent plus 127.
    """
    codes = torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(-2)  # [rows, groups, GROUP]
    first, second = codes.chunk(2, dim=-1)  # a block of a GGUF file has columns i and i + 16 in one byte
    stored = torch.cat((scales.unsqueeze(-1), first | second << 4), dim=-1)
    rows, groups = scales.shape
    return decode_blocks(MXFP4, as_bytes(stored), (rows, GROUP * groups))


def sample() -> BlockTensor:
    """Return a small matrix with arbitrary values."""
    return decode(torch.zeros(2, 4, GROUP // 2, dtype=torch.uint8), torch.zeros(2, 4, dtype=torch.uint8))
