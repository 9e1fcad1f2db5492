"""Attention of encoders on a GPU against torch's, and a text's bits alone and among others."""

import itertools

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from engine.kernels.attention_tiles import query_tiles
from engine.kernels.encoder_attention import QUERIES, encoder_attention

pytestmark = pytest.mark.usefixtures("fenced_memory")


def attended(qkv: Tensor, lengths: list[int], heads: int, device: torch.device) -> Tensor:
    starts = [0, *itertools.accumulate(lengths)]
    tiles = query_tiles(starts, lengths, QUERIES).to(device)
    numbers = torch.tensor(starts, dtype=torch.int32, device=device)
    return encoder_attention(qkv.to(device), numbers, heads, tiles).cpu()


@pytest.mark.parametrize(("heads", "head_dim"), [(3, 32), (2, 64), (1, 48), (1, 80)])
def test_it_is_torchs(heads: int, head_dim: int, device: torch.device) -> None:
    lengths = [1, 130, 64, 33]
    qkv = (2 * torch.randn(sum(lengths), 3 * heads * head_dim)).bfloat16()
    got = attended(qkv, lengths, heads, device).split(lengths)  # type: ignore[no-untyped-call]  # torch's own
    for own, text in zip(got, qkv.float().split(lengths), strict=True):  # type: ignore[no-untyped-call]
        q, k, v = text.view(len(text), 3, heads, head_dim).permute(1, 2, 0, 3)
        want = F.scaled_dot_product_attention(q, k, v).transpose(0, 1).flatten(1)
        torch.testing.assert_close(own.float(), want, rtol=1e-2, atol=2e-2)


def test_bits_of_a_text_are_its_own(device: torch.device) -> None:
    lengths, hidden = [70, 5], 32
    qkv = torch.randn(sum(lengths), 3 * hidden).bfloat16()
    together = attended(qkv, lengths, 1, device)
    assert torch.equal(together[70:], attended(qkv[70:], [5], 1, device))
    assert torch.equal(together[:70], attended(qkv[:70], [70], 1, device))
