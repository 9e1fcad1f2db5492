"""MXFP4 matrices of safetensors checkpoints: every code with every exponent, against transformers and gguf."""

import gguf
import numpy as np
import torch
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from quant import mxfp4
from quant.kernels.reference import dequantize

EXPONENTS = 256


def every_code() -> tuple[Tensor, Tensor]:
    """Return the codes and scales of a row for each exponent; each row has all pairs of codes in 8 groups."""
    pairs = torch.arange(256, dtype=torch.uint8)[:128].view(8, 16)
    other = torch.arange(128, 256, dtype=torch.uint8).view(8, 16)
    codes = torch.cat([pairs, other])
    scales = torch.arange(EXPONENTS, dtype=torch.uint8).view(-1, 1).expand(-1, 16)
    return codes.expand(EXPONENTS, -1, -1).contiguous(), scales.contiguous()


def test_every_code_and_exponent_equals_transformers() -> None:
    """An exponent of 255 is NaN in the format. transformers computes infinity or 0 there, so it is compared without."""
    codes, scales = every_code()
    ours = dequantize(mxfp4.decode(codes, scales))
    theirs = convert_moe_packed_tensors(codes.unsqueeze(0), scales.unsqueeze(0), dtype=torch.float32)[0].T
    assert torch.equal(ours[:-1], theirs[:-1])


def test_every_code_and_exponent_equals_gguf() -> None:
    codes, scales = every_code()
    decoded = mxfp4.decode(codes, scales)
    low, high = codes & 15, codes >> 4
    columns = torch.stack((low, high), -1).flatten(-2)
    stored = torch.cat((scales.unsqueeze(-1), columns[..., :16] | columns[..., 16:] << 4), -1)
    with np.errstate(over="ignore"):
        theirs = gguf.quants.dequantize(stored.flatten(1).numpy(), gguf.GGMLQuantizationType.MXFP4)
    np.testing.assert_array_equal(dequantize(decoded).numpy(), theirs)


def test_sample_is_a_matrix_of_several_rows_and_groups() -> None:
    assert mxfp4.sample().shape == (2, 128)
