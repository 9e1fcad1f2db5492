"""How products are divided into programs: by a rule, or by measurements on a card."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from quant.kernels.card import Card

TOKENS = (1, 8, 16, 32, 64, 128)  # token counts up to each of these numbers have their own tiles
FIXED_TOKENS = 16  # tokens of a tile when a row's bits must not depend on the batch
MOST_TOKENS = 256  # with more tokens, the whole matrix is unpacked for the library's product
LEAST_WARPS = 16  # smallest number of warps per multiprocessor: some have work while others wait for memory
LARGE = 1 << 25  # smallest number of weights for which adding the sums of several programs in a second launch pays off
# group sizes for which one token has a separate kernel, which can do the work of norms (`packed_vector`)
VECTOR_GROUPS = (16, 32)
# the values that the fields of a tile can have
ROWS, BATCH_ROWS, WARPS, SPLITS, STAGES = (16, 32), (64, 128), (1, 2, 4, 8, 16), (1, 2, 4, 8), (1, 2, 3)
BATCH_WORK = 90  # smallest number of tokens times programs per multiprocessor; measured on an H200
FEW_PROGRAMS = 3  # up to this number per multiprocessor, warps have few steps, and weights are loaded ahead
AHEAD = 8, 3  # warps and stages of these programs
# compute capabilities whose matrix units read operands from shared memory; on other cards, a program of 128 rows and
# 128 tokens spills registers or takes too much shared memory with weights of some formats
ASYNCHRONOUS = (9, 10)
IDLE = 1.1  # limit of the busiest multiprocessor's work, relative to the average


@dataclass(frozen=True, slots=True)
class ProductTile:
    """How a product is divided into programs."""

    rows: int = 32  # rows of a program: one of `ROWS`, or of `BATCH_ROWS` for `packed_batch`
    warps: int = 4  # one of `WARPS`; warps of `packed_matmul` share a row's columns
    tokens: int = 16  # tokens of a program, one of `TOKENS`
    splits: int = 1  # programs that share a row's columns, one of `SPLITS`
    stages: int = 1  # one of `STAGES`; steps whose weights are in flight, of products of one token or a batch


@dataclass(frozen=True, slots=True)
class ProductShape:
    """The shape of a product, on which the choice of its tile depends."""

    kind: str  # bits and group size of the weights, see `PackedForm.kind`
    outputs: int
    inputs: int
    tokens: int  # number of tokens, rounded up to one of `TOKENS`
    few_tokens: int = 16  # see `PackedForm.few_tokens`
    # number of experts that multiply `tokens` tokens each by matrices of this size; 0: one matrix and all tokens
    experts: int = 0

    @property
    def is_row(self) -> bool:
        """Whether this is one token and has a kernel for it, in which a program needs all columns for the norms."""
        return self.tokens == 1 and self.kind.endswith(tuple(f" by {group}" for group in VECTOR_GROUPS))


MeasuredTiles = Mapping[ProductShape, ProductTile]


@dataclass(frozen=True, slots=True)
class TileTable:
    """The tiles of one card: measured tiles, and the rule's tiles for all other shapes."""

    card: Card
    measured: MeasuredTiles

    def product(
        self, kind: str, outputs: int, inputs: int, tokens: int, few_tokens: int, *, deterministic: bool
    ) -> ProductTile:
        """Return the tile for `tokens` tokens. With `deterministic`, it does not depend on their number."""
        wanted = FIXED_TOKENS if deterministic else next((it for it in TOKENS if it >= tokens), TOKENS[-1])
        shape = ProductShape(kind, outputs, inputs, wanted, few_tokens)
        return self.measured[shape] if shape in self.measured else self.by_rule(shape)

    def of_experts(
        self, kind: str, outputs: int, inputs: int, tokens: int, few_tokens: int, experts: int
    ) -> ProductTile:
        """Return the tile in which each of `experts` experts multiplies `tokens` tokens."""
        shape = ProductShape(kind, outputs, inputs, tokens, few_tokens, experts)
        return self.measured[shape] if shape in self.measured else self.by_rule(shape)

    def by_rule(self, shape: ProductShape) -> ProductTile:
        """Return the tile of a shape that was not measured."""
        if shape.experts:  # as for one matrix with as many programs
            together = replace(shape, outputs=shape.experts * shape.outputs, experts=0)
            return replace(self.by_rule(together), splits=1)
        if shape.tokens > shape.few_tokens:
            return self._batch(shape)
        processors, columns = self.card.multiprocessors, shape.inputs // 128
        # With 32 rows per program, more rows share the loads of x, but registers spill in groups of 16 columns.
        rows = 16
        programs = -(-shape.outputs // rows)
        warps = 4 if programs * 4 >= LEAST_WARPS * processors else 8
        stages = 1
        if shape.tokens == 1 and programs <= FEW_PROGRAMS * processors:
            warps, stages = AHEAD
        while warps > 1 and warps > columns:
            warps //= 2
        splits = 1
        if not shape.is_row and shape.outputs * shape.inputs >= LARGE:
            splits = next((it for it in (1, 2, 4) if _balanced(programs * it, processors)), 4)
        return ProductTile(rows, warps, shape.tokens, splits, stages)

    def _batch(self, shape: ProductShape) -> ProductTile:
        tokens, most = max(16, shape.tokens), shape.inputs // 128
        rows, warps, stages = (128, 8, 3) if tokens == TOKENS[-1] else (64, 4, 3)
        if rows == BATCH_ROWS[-1] and self.card.capability[0] not in ASYNCHRONOUS:
            rows, stages = BATCH_ROWS[0], 2
        work = -(-shape.outputs // rows) * tokens
        wanted = next((it for it in SPLITS if it * work >= BATCH_WORK * self.card.multiprocessors), SPLITS[-1])
        return ProductTile(
            rows, warps, tokens, next(it for it in reversed(SPLITS) if it <= min(wanted, max(1, most))), stages
        )


def _balanced(programs: int, processors: int) -> bool:
    most = -(-programs // processors)
    return most * processors <= IDLE * programs
