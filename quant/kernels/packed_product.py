"""Products of packed weights and up to some hundred tokens. The kernel depends on the tile (`quant.kernels.tiles`).

Microseconds of a product of 28,672 x 4,096 on an H200, where reading the weights takes 16 (Q4_K) or 23 (Q6_K):

    tokens          1    4   16   32   64  128  256
    Q4_K           23   39   46   67   76  108  214
    Q6_K           50   59   66
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from quant.cuda.matrix import TILE_ROWS, PackedMatrix
from quant.kernels.early_start import launch_options
from quant.kernels.packed_batch import _batch_kernel
from quant.kernels.packed_matmul import _product_kernel
from quant.kernels.packed_values import BASE
from quant.kernels.packed_vector import _vector_kernel
from quant.kernels.result_type import result_operands, store_result
from quant.kernels.tiles import BATCH_ROWS, VECTOR_GROUPS, ProductTile
from quant.kernels.token_tiles import TokenTiles

SUM_BLOCK = 1024  # rows per program
VECTOR_ROWS = 16  # rows of its programs
NESTED_TOKENS = 64  # limit for the tokens of a program with nested scales; for 128, registers spill on an A100
# arguments of the kernel of one token, if x is complete, and if nothing is done after the product
SCALED: dict[str, Any] = {"squares": None, "square_count": 0, "epsilon": 0.0, "SQUARES": 1}
PLAIN: dict[str, Any] = SCALED | {"GATED": False, "GATE": "", "slope": None, "next_row": None, "next_squares": None}


@dataclass(frozen=True, slots=True)
class RowNorm:
    """RMS normalization of one row: x / sqrt(mean(x**2) + epsilon) * weight."""

    weight: Tensor  # float32 [n]
    epsilon: float


@dataclass(frozen=True, slots=True)
class UnscaledRow:
    """A row that is normalized except for the division by its root mean square, which products with it do."""

    values: Tensor  # bfloat16 [1, n]: x times the weight of the norm
    squares: Tensor  # float32 [parts]: sums of the squares of x
    epsilon: float

    @property
    def operands(self) -> dict[str, Any]:
        """Arguments of the kernel."""
        count = len(self.squares)
        return {
            "squares": self.squares,
            "square_count": count,
            "epsilon": self.epsilon,
            "SQUARES": triton.next_power_of_2(count),
        }


@triton.jit(do_not_specialize=["rows", "out", "out_stride", "split_stride", "splits", "add", "rounded"])
def _sum_kernel(
    partial: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    rows: tl.tensor,
    out_stride: tl.tensor,
    split_stride: tl.tensor,
    splits: tl.tensor,
    add: tl.tensor,
    rounded: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    token = tl.program_id(1).to(tl.int64)
    kept = row < rows
    sums = tl.zeros((BLOCK,), tl.float32)
    for split in range(splits):
        sums += tl.load(partial + split * split_stride.to(tl.int64) + token * rows + row, mask=kept, other=0.0)
    if bias is not None:
        sums += tl.load(bias + row, mask=kept, other=0.0)
    store_result(out, token * out_stride, row, sums, kept, add, rounded)


def packed_product(
    matrix: PackedMatrix, x: Tensor, out: Tensor, tile: ProductTile, *, bias: Tensor | None, add: bool
) -> None:
    """Write x [tokens, columns] times the matrix, plus `bias` (float32 [rows]), to `out` [tokens, rows].

    With `add`, the product is added to `out`. A tile of one token takes one token. x is bfloat16 and contiguous, with
    its columns in the matrix's order. `out` may be a range of columns of a wider tensor.
    """
    if matrix.form.nested_block:
        tile = replace(tile, tokens=min(tile.tokens, NESTED_TOKENS))
    if tile.splits == 1:
        _launch(matrix, x, out, tile, {"bias": bias, "split_stride": 0, "add": int(add)})
        return
    tokens, rows = len(x), matrix.shape[0]
    sums = torch.empty(tile.splits, tokens, rows, dtype=torch.float32, device=x.device)
    _launch(matrix, x, sums, tile, {"bias": None, "split_stride": sums.stride(0), "add": 0})
    _sum_kernel[triton.cdiv(rows, SUM_BLOCK), tokens](
        sums,
        bias,
        rows=rows,
        out_stride=out.stride(0),
        split_stride=sums.stride(0),
        splits=tile.splits,
        **result_operands(out, add=add),
        BLOCK=SUM_BLOCK,
    )


def row_product(
    matrix: PackedMatrix,
    x: Tensor | UnscaledRow,
    out: Tensor,
    tile: ProductTile,
    *,
    early: bool,
    bias: Tensor | None = None,
) -> None:
    """Write the product of one row, which may be unscaled, plus `bias`, to `out` [1, rows]. `has_row_kernel` holds.

    `early`: see `early_start`.
    """
    _launch_row(matrix, x, out, tile, {"bias": bias, "split_stride": 0, "add": 0}, early=early)


def summed_row_product(
    matrix: PackedMatrix,
    x: Tensor | UnscaledRow,
    out: Tensor,
    tile: ProductTile,
    norm: RowNorm,
    bias: Tensor | None,
    *,
    early: bool,
) -> UnscaledRow:
    """Add the product of one row to `out`, float32 [1, rows], and return the sum as `norm` needs it next.

    `has_row_kernel` holds. This saves the launch of the norm.
    """
    rows = out.shape[1]
    values = torch.empty(1, rows, dtype=torch.bfloat16, device=out.device)
    squares = torch.empty(triton.cdiv(rows, VECTOR_ROWS), dtype=torch.float32, device=out.device)
    ending = {"bias": bias, "split_stride": 0, "add": 1}
    ending |= {"slope": norm.weight, "next_row": values, "next_squares": squares}
    _launch_row(matrix, x, out, tile, ending, early=early)
    return UnscaledRow(values, squares, norm.epsilon)


def gated_row_product(
    matrix: PackedMatrix, x: Tensor | UnscaledRow, out: Tensor, tile: ProductTile, gate: str, *, early: bool
) -> None:
    """Write gate(first half) * second half of the product of one row to `out` [1, rows / 2].

    `has_row_kernel` holds, and the number of rows is a multiple of 2 * TILE_ROWS. `gate` is the value of a `Gate`.
    """
    ending = {"bias": None, "split_stride": 0, "add": 0, "GATED": True, "GATE": gate}
    _launch_row(matrix, x, out, tile, ending, 2 * out.shape[1], early=early)


def has_row_kernel(matrix: PackedMatrix, tile: ProductTile) -> bool:
    """Whether `row_product` and `gated_row_product` support a matrix with its tile of one token."""
    return has_vector_kernel(matrix) and tile.tokens == tile.splits == 1 and tile.rows not in BATCH_ROWS


def vector_operands(matrix: PackedMatrix, x: Tensor | UnscaledRow, tile: ProductTile) -> dict[str, Any]:
    """Return arguments of `vector_sums` for one row. `has_row_kernel` holds."""
    own = {"numbers": matrix.number_pairs, "base": BASE, "WARPS": tile.warps}
    return _matrix_operands(matrix, tile) | own | _row_operands(matrix, x)


def _matrix_operands(matrix: PackedMatrix, tile: ProductTile) -> dict[str, Any]:
    """Return the arguments that all kernels have for a matrix and its tile."""
    form = matrix.form
    stages = tile.stages if form.table is None else 1  # loads from the table would be pipelined as well
    return {**matrix.operands, **form.sizes, **form.constants, "splits": tile.splits, "STAGES": stages}


def _row_operands(matrix: PackedMatrix, x: Tensor | UnscaledRow) -> dict[str, Any]:
    """Return the arguments that describe one row."""
    scaling = x.operands if isinstance(x, UnscaledRow) else SCALED
    values = x.values if isinstance(x, UnscaledRow) else x
    return scaling | {"x": values if matrix.order is None else values.index_select(1, matrix.order)}


def _token_operands(
    matrix: PackedMatrix, out: Tensor, ending: dict[str, Any], routed: TokenTiles | None
) -> dict[str, Any]:
    """Return the arguments of the kernels of several tokens that describe the tokens and their results."""
    ragged = matrix.form.columns != matrix.form.width
    own = {"tokens": out.shape[-2], "slots": routed and routed.slots, "RAGGED": ragged}
    return own | result_operands(out, add=bool(ending["add"]), routed=routed is not None)


def _launch_row(
    matrix: PackedMatrix,
    x: Tensor | UnscaledRow,
    out: Tensor,
    tile: ProductTile,
    ending: dict[str, Any],
    rows: int = 0,
    *,
    early: bool,
) -> None:
    operands = _row_operands(matrix, x)
    _launch(matrix, operands.pop("x"), out, tile, ending | operands, rows=rows, early=early)


def packed_expert_product(
    matrix: PackedMatrix, x: Tensor, out: Tensor, tile: ProductTile, tiles: TokenTiles, *, early: bool
) -> None:
    """Write the product of each slot and its expert to `out` [slots, rows of an expert].

    The matrix has the rows of all experts, and an expert's number of rows is a multiple of TILE_ROWS. x [slots or
    tokens, columns] is bfloat16 and contiguous. `tile.tokens` equals `tiles.tokens`. With `early`, the kernel of one
    token starts early (`early_start`).

    The lower bound is reading the experts in use. An expert of Qwen3-30B-A3B has 1.77 MB of gate and up in Q4_K (1536 x
    2048), and 0.88 MB of down in Q4_K or 1.29 MB in Q6_K (2048 x 768): with 8 experts, 6.3 us per layer on an H100.
    """
    _launch(matrix, x, out, tile, {"bias": None, "split_stride": 0, "add": 0}, tiles, early=early)


def gated_expert_product(
    matrix: PackedMatrix, x: Tensor, out: Tensor, tile: ProductTile, tiles: TokenTiles, gate: str, *, early: bool
) -> None:
    """Write gate(first half) * second half of the product of each slot and its expert to `out` [slots, rows / 2].

    Each slot is a tile, and `has_vector_kernel` holds. `gate` is the value of a `Gate`. The rest is as in
    `packed_expert_product`, but saves a launch and its traffic.
    """
    ending = {"bias": None, "split_stride": 0, "add": 0, "GATED": True, "GATE": gate}
    _launch(matrix, x, out, tile, ending, tiles, rows=2 * out.shape[1], early=early)


def has_vector_kernel(matrix: PackedMatrix) -> bool:
    """Whether one token has a separate kernel."""
    return matrix.form.group in VECTOR_GROUPS


def _launch(
    matrix: PackedMatrix,
    x: Tensor,
    out: Tensor,
    tile: ProductTile,
    ending: dict[str, Any],
    routed: TokenTiles | None = None,
    rows: int = 0,
    *,
    early: bool = False,
) -> None:
    """Write the product to `out`, [..., tokens, rows]. `ending`: arguments of what follows the product.

    `rows` is the width of `out`, unless given.
    """
    tokens, rows = out.shape[-2], rows or out.shape[-1]
    numbers = {"numbers": matrix.number_pairs}
    common = {**_matrix_operands(matrix, tile), **ending, "x": x, "rows": rows}
    common |= {"num_warps": tile.warps, "out_stride": out.stride(-2)}
    common |= {"experts": routed and routed.experts, "sharing": tokens // len(x) if routed else 1}
    if tile.tokens == 1 and has_vector_kernel(matrix) and tile.rows not in BATCH_ROWS:
        grid_of_one = triton.cdiv(rows, VECTOR_ROWS), tile.splits, routed.number if routed else 1
        own = {"out": out, "base": BASE, "WARPS": tile.warps, **launch_options(early)}
        _vector_kernel[grid_of_one](**PLAIN | common | numbers | own, num_stages=1)
        return
    common |= _token_operands(matrix, out, ending, routed)
    grid = triton.cdiv(rows, tile.rows), routed.number if routed else triton.cdiv(tokens, tile.tokens), tile.splits
    if tile.rows in BATCH_ROWS:
        _batch_kernel[grid](**common, ROWS=tile.rows, TOKENS=tile.tokens, num_stages=common["STAGES"])
    else:
        _product_kernel[grid](
            **common | numbers,
            base=BASE,
            ROW_TILES=tile.rows // TILE_ROWS,
            WARPS=tile.warps,
            TOKENS=max(8, tile.tokens),
            SCALES_SUMS=tile.tokens == 1,
            num_stages=1,
        )
