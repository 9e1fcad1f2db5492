"""The tiles that run on real cards compute what float32 torch computes. Only the numbers of rows are smaller.

A run draws a share of the tiles. The kernels run under Triton's interpreter, or with INGLE_TEST_GPU on a card.
"""

from dataclasses import dataclass

import pytest
import torch

from engine.kernels import reference
from engine.kernels.reference import ScoreRule
from quant.cuda.linear import CudaLinear
from quant.cuda.loading import to_device
from quant.cuda.matrix import PackedMatrix
from quant.kernels.card import Card
from quant.kernels.reference import dequantize
from quant.kernels.tiles import TOKENS as SIZES
from quant.kernels.tiles import ProductShape, TileTable
from tests.engine.kernels.test_paged_attention import Shape, Step, filled, run_attention
from tests.kernels.cards import CARDS
from tests.kernels.shapes import LLAMA_8B, matrices, mixer_of
from tests.kernels.weights import fits, weight

pytestmark = pytest.mark.usefixtures("fenced_memory")

REAL = {card.name.split()[-1]: card for card in CARDS if card.architecture in (86, 89, 90, 120)}
ROWS = 40  # rows of a matrix: a program of 32 rows, and a part of one
KINDS = ("Q4_K", "Q6_K", "Q4_0", "Q8_0", "MXFP4", "int4 g128 zeros", "e4m3 channel", "e4m3 128x128")
TOKENS = (1, 4, 16, 32)
ERROR = 1 / 64  # of the root mean square of the result: weights and inputs are rounded to bfloat16
CLOSE = 2e-2  # of attention, whose weights are rounded to bfloat16
HEADS, KV_HEADS, HEAD_DIM = 8, 2, mixer_of(LLAMA_8B).head_dim  # as many query heads per KV head as in an 8B Llama


@dataclass(frozen=True)
class Product:
    """The inputs of one matrix of an 8B Llama, and the tile of all of its rows on a card."""

    kind: str
    columns: int
    matrix: PackedMatrix
    card: Card
    full: tuple[int, int]

    def layer(self, tokens: int) -> CudaLinear:
        """Return a layer of the matrix, with the tile that the card uses for the full matrix."""
        name = self.matrix.form.kind
        few = self.matrix.form.few_tokens
        tile = TileTable(self.card, {}).product(name, *self.full, tokens, few, deterministic=False)
        rows, columns = self.matrix.shape
        shapes = [ProductShape(name, rows, columns, limit, few) for limit in SIZES]
        return CudaLinear([self.matrix], self.card, deterministic=False, measured=dict.fromkeys(shapes, tile))


@pytest.mark.share(1, "tokens")
@pytest.mark.parametrize("part", ["qkv", "gate_up", "down", "head"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", REAL)
@pytest.mark.parametrize("tokens", TOKENS)
def test_product_with_the_tile_of_a_card(tokens: int, name: str, kind: str, part: str, device: torch.device) -> None:
    rows, columns = matrices(LLAMA_8B)[part]
    assert fits(kind, columns)
    stored = weight(kind, ROWS, columns, torch.device("cpu"))
    matrix, card = to_device(stored, device), REAL[name]
    layer = (
        Product(kind, columns, matrix, card, (rows, columns)).layer(tokens)
        if isinstance(matrix, PackedMatrix)
        else CudaLinear([matrix], card, deterministic=False)
    )
    x = torch.randn(tokens, columns, generator=torch.Generator().manual_seed(tokens)).bfloat16()
    want = x.float() @ dequantize(stored).mT
    got = layer.multiply(x.to(device), out_dtype=torch.float32).cpu()
    assert (got - want).square().mean().sqrt() <= ERROR * want.square().mean().sqrt()
    assert (got - want).abs().max() <= 6 * ERROR * want.square().mean().sqrt()


@pytest.mark.share(1, "step")
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("pool", [torch.bfloat16, torch.float16, torch.uint8])
@pytest.mark.parametrize("step", [Step((1,), (700,)), Step((1, 1, 1), (65, 300, 1)), Step((70,), (150,))])
@pytest.mark.parametrize("name", REAL)
def test_attention_with_the_tile_of_a_card(
    name: str, step: Step, pool: torch.dtype, deterministic: bool, device: torch.device
) -> None:
    keys, tables = filled(Shape(HEADS, KV_HEADS, HEAD_DIM, pool), step.contexts)
    q, rule = torch.randn(step.starts[-1], HEADS, HEAD_DIM).bfloat16(), ScoreRule(HEAD_DIM**-0.5)
    got = run_attention(q, keys, tables, step, rule, None, device, deterministic=deterministic, card=REAL[name])
    starts, contexts = torch.tensor(step.starts), torch.tensor(step.contexts)
    want = reference.batch_attention(q.float(), keys, tables, starts, contexts, rule, None)
    assert (got.float() - want.reshape(got.shape)).abs().max() <= CLOSE
