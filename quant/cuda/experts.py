"""Linear layers of equal shape in GPU memory, for the experts of a mixture: each token is multiplied by some of them.

The rows of all experts form one matrix, so an expert is a range of its rows. Products read only the experts in use.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from quant.cuda import float8
from quant.cuda.float8 import Float8Matrix
from quant.cuda.joining import joining_form
from quant.cuda.linear import CudaLinear, packed
from quant.cuda.matrix import DENSE, TILE_ROWS, CudaMatrix, PackedMatrix
from quant.errors import UnsupportedQuantization
from quant.kernels import float8_matmul, integer_experts
from quant.kernels.card import Card
from quant.kernels.integer_experts import integer_expert_product
from quant.kernels.integer_rows import IntegerRows, integer_inputs
from quant.kernels.packed_product import gated_expert_product, has_vector_kernel, packed_expert_product
from quant.kernels.plain_experts import plain_expert_product
from quant.kernels.tiles import FIXED_TOKENS, TOKENS, MeasuredTiles, ProductTile, TileTable
from quant.kernels.token_tiles import TokenTiles, token_tiles
from quant.tensor import GroupedTensor, GroupScale, NestedScale, QTensor

TILE_TOKENS = tuple(it for it in TOKENS if it >= FIXED_TOKENS)  # slots of a tile, unless each slot is a tile
# tiles have more slots than an expert has on average, because reading an expert twice takes longer than empty slots
SPARE = 1.25


class ExpertStack:
    """The linear layers of `count` experts. Each matrix has rows of all of them (see `stacked`)."""

    def __init__(
        self,
        matrices: Sequence[CudaMatrix],
        count: int,
        card: Card,
        *,
        deterministic: bool,
        measured: MeasuredTiles | None = None,
        integer_prompts: bool = False,
    ) -> None:
        self.matrices = tuple(matrices)
        self.count, self.deterministic, self.card, self.measured = count, deterministic, card, measured
        self._has_integers = integer_prompts and not deterministic and all(map(_has_integers, self.matrices))
        self.outputs = sum(matrix.shape[0] for matrix in self.matrices) // count
        self.inputs = self.matrices[0].shape[1]

    @property
    def most_slots(self) -> int:
        """The largest number of slots in a tile."""
        if self._has_integers:
            return integer_experts.SLOTS
        return min(
            float8_matmul.most_slots(it) if isinstance(it, Float8Matrix) else TILE_TOKENS[-1] for it in self.matrices
        )

    @property
    def packed_slots(self) -> tuple[int, ...]:
        """Numbers of slots of the tiles whose packed weights are not multiplied as integers."""
        return 1, *(it for it in TILE_TOKENS if it < integer_experts.SLOTS or not self._has_integers)

    def expert(self, number: int) -> list[CudaMatrix]:
        """Return the matrices of one expert, which share the memory of the stack."""
        return [_part(matrix, number, self.count) for matrix in self.matrices]

    def takes_integers(self, tiles: TokenTiles) -> bool:
        """Whether `multiply` rounds the inputs of these tiles to 8-bit integers, or takes them rounded."""
        return self._has_integers and tiles.tokens == integer_experts.SLOTS

    def multiply(self, x: Tensor | IntegerRows, tiles: TokenTiles, out_dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """Multiply each slot by its expert. Returns [slots, outputs] in `out_dtype`.

        x: [tokens, inputs], or [slots, inputs]; it is converted to bfloat16, or to integers if `takes_integers`.
        """
        out = torch.empty(tiles.count, self.outputs, dtype=out_dtype, device=tiles.ids.device)
        if isinstance(x, Tensor):
            x = x.to(DENSE).contiguous()
            x = integer_inputs(x) if self.takes_integers(tiles) else x
        first = 0
        for matrix in self.matrices if tiles.count else ():
            columns = slice(first, first := first + matrix.shape[0] // self.count)
            self._multiply(matrix, x, out[:, columns], tiles)
        return out

    def multiply_gated(self, x: Tensor, tiles: TokenTiles, gate: str) -> Tensor | None:
        """Return gate(first half) * second half of each row of the product, bfloat16 [slots, outputs / 2].

        `gate` is the value of a `Gate`. Returns None if no kernel does this, as for most tiles.
        """
        matrix = self.matrices[0]
        if tiles.slots is not None or not tiles.count or len(self.matrices) > 1 or self.outputs % (2 * TILE_ROWS):
            return None
        if not isinstance(matrix, PackedMatrix) or matrix.order is not None or not has_vector_kernel(matrix):
            return None
        out = torch.empty(tiles.count, self.outputs // 2, dtype=DENSE, device=x.device)
        tile = self._tile(matrix, self.outputs, tiles)
        gated_expert_product(matrix, x.to(DENSE).contiguous(), out, tile, tiles, gate, early=self.card.starts_early)
        return out

    def _tile(self, matrix: PackedMatrix, rows: int, tiles: TokenTiles) -> ProductTile:
        form, experts = matrix.form, tiles.active if tiles.slots is None else self.count
        table = TileTable(self.card, self.measured or {})
        return table.of_experts(form.kind, rows, form.columns, tiles.tokens, form.few_tokens, experts)

    def _multiply(self, matrix: CudaMatrix, x: Tensor | IntegerRows, out: Tensor, tiles: TokenTiles) -> None:
        if isinstance(x, IntegerRows):
            integer_expert_product(packed(matrix), x, out, tiles)
        elif isinstance(matrix, PackedMatrix):
            ordered = x if matrix.order is None else _in_column_order(x, matrix.order, tiles)
            tile = self._tile(matrix, out.shape[1], tiles)
            packed_expert_product(matrix, ordered, out, tile, tiles, early=self.card.starts_early)
        elif isinstance(matrix, Float8Matrix):
            out.copy_(float8_matmul.multiply_experts(x, matrix, tiles, out.shape[1], out_dtype=out.dtype))
        else:
            plain_expert_product(matrix.values, x, out, tiles)


def _has_integers(matrix: CudaMatrix) -> bool:
    return isinstance(matrix, PackedMatrix) and matrix.order is None and matrix.form.has_integers


def _in_column_order(x: Tensor, orders: Tensor, tiles: TokenTiles) -> Tensor:
    """Return a row for each slot, with the columns in the order of its expert. `orders`: int32 [experts, columns]."""
    rows = x.repeat_interleave(tiles.count // len(x), 0)
    return rows.gather(1, orders[tiles.ids].long())


class CudaExpert(CudaLinear):
    """The linear layer of one expert, whose weight is a part of a stack."""

    def __init__(self, stack: ExpertStack, number: int) -> None:
        super().__init__(stack.expert(number), stack.card, deterministic=stack.deterministic, measured=stack.measured)
        self.stack = stack


def tiles_of_experts(ids: Tensor, stacks: Sequence[ExpertStack]) -> TokenTiles:
    """Divide the tokens of a step into tiles for the products of all stacks.

    `ids`: the experts of each token, int32 [tokens, active]. In deterministic mode, the size of a tile does not depend
    on the number of tokens.
    """
    count, slots = stacks[0].count, ids.numel()
    if stacks[0].deterministic:
        return token_tiles(ids, count, FIXED_TOKENS)
    if len(ids) == 1 or 2 * slots <= count:  # most experts have at most one token
        return token_tiles(ids, count, 1)
    wanted = next((it for it in TILE_TOKENS if it * count >= SPARE * slots), TILE_TOKENS[-1])
    return token_tiles(ids, count, min(wanted, *(stack.most_slots for stack in stacks)))


def first_numbers_of_tokens(experts: int, active: int) -> list[int]:
    """Return the smallest number of tokens for each size of tiles of several slots."""
    least = max(2, experts // (2 * active) + 1)
    return [max(least, int(size * experts / (SPARE * active)) + 1) for size in (0, *TILE_TOKENS[:-1])]


def stacked(layers: Iterable[Sequence[CudaMatrix]], count: int) -> list[CudaMatrix]:
    """Join the matrices of the layers of `count` experts: the first of all layers, the second, and so on.

    They are copied before those of the next expert are made, so that at most two experts are in memory twice. Raises
    UnsupportedQuantization if no kernel supports their form.
    """
    whole: list[CudaMatrix] = []
    forms: list[object] = []
    for number, matrices in enumerate(layers):
        parts = [_checked(matrix) for matrix in matrices]
        if not whole:
            whole, forms = [_empty(matrix, count) for matrix in parts], [_form(matrix) for matrix in parts]
        if [_form(matrix) for matrix in parts] != forms:
            raise UnsupportedQuantization(
                "The experts of a layer have different quantization formats, which the GPU kernels do not support",
                "Use the CPU: --device cpu.",
            )
        for matrix, all_rows in zip(parts, whole, strict=True):
            own = _part(all_rows, number, count).row_tensors
            for name, tensor in matrix.row_tensors.items():
                own[name].copy_(tensor)
            if isinstance(all_rows, PackedMatrix) and all_rows.order is not None:
                all_rows.order[number].copy_(_order(matrix))
    return whole


def _order(matrix: CudaMatrix) -> Tensor:
    if not isinstance(matrix, PackedMatrix) or matrix.order is None:
        raise TypeError("the matrix has no order of columns")
    return matrix.order


def with_own_scales(weight: QTensor) -> QTensor:
    """Return a weight without nested scales: the rows of several experts cannot share their block scales."""
    if isinstance(weight, GroupedTensor) and isinstance(weight.scale, NestedScale):
        return replace(weight, scale=GroupScale(weight.scale.values()))
    return weight


def _form(matrix: CudaMatrix) -> object:
    tensors = [(name, tensor.shape, tensor.dtype) for name, tensor in matrix.row_tensors.items()]
    if isinstance(matrix, PackedMatrix) and matrix.order is not None:  # each expert may have its own order
        return matrix.shape, joining_form(0, replace(matrix, order=None)), tensors, "ordered"
    return matrix.shape, joining_form(0, matrix), tensors


def _checked(matrix: CudaMatrix) -> CudaMatrix:
    """Return a matrix that can be stacked. Raises UnsupportedQuantization if no kernel supports its form."""
    if isinstance(matrix, PackedMatrix) and matrix.shape[0] % TILE_ROWS:
        raise UnsupportedQuantization(
            f"The GPU kernels do not support experts of {matrix.shape[0]} rows: the number of rows must be a multiple "
            f"of {TILE_ROWS}",
            "Use the CPU: --device cpu.",
        )
    return float8.with_whole_blocks(matrix) if isinstance(matrix, Float8Matrix) else matrix


def _empty(matrix: CudaMatrix, count: int) -> CudaMatrix:
    """Return a matrix with memory for the rows of `count` matrices. An order of columns is int32 [count, columns]."""
    whole = matrix.with_rows(count * matrix.shape[0], lambda it: it.new_empty(count * len(it), *it.shape[1:]))
    if isinstance(whole, PackedMatrix) and whole.order is not None:
        return replace(whole, order=whole.order.new_empty(count, len(whole.order)))
    return whole


def _part(matrix: CudaMatrix, number: int, count: int) -> CudaMatrix:
    """Return one of `count` equal ranges of a matrix's rows, in the same memory."""
    part = matrix.with_rows(matrix.shape[0] // count, lambda it: it.view(count, -1, *it.shape[1:])[number])
    if isinstance(part, PackedMatrix) and part.order is not None:
        return replace(part, order=part.order[number])
    return part
