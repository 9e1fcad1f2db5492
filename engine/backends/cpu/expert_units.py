"""Units of the instructions of a mixture of experts: choosing experts, and multiplying by the chosen ones only.

The rows of the step are copied into the order of their experts, so that each expert multiplies adjacent rows. A row of
a result is a sum in ascending order of experts. Its bits do not depend on the other rows.
"""

from typing import Any

import numba
import numpy as np

from engine.backends.cpu.exponentials import sigmoid_floats, softmax_floats
from engine.backends.cpu.floats import (
    add_floats,
    copy_floats,
    each_vector,
    init_with_bias,
    largest,
    load_some,
    multiply_floats,
    store_some,
)
from engine.backends.cpu.instructions import BLOCK_WORDS, TOKENS, Record
from quant.cpu.activations import gated_product, take_columns
from quant.cpu.ggml_formats import GROUP, PAIR
from quant.cpu.kernel import jit, kernel, pointer, word
from quant.cpu.matmul import multiply_pair
from quant.cpu.vector import F32, Emit


@kernel
def add_scaled_floats(e: Emit, x: Any, count: Any, factor: Any, out: Any) -> None:
    """Add `count` floats at x, times the float32 at address `factor`, to those at `out`."""
    factors = e.splat(e.load(factor, F32))

    def add(number: Any, live: Any) -> None:
        at = e.at(out, number, 64)
        product = e.b.fmul(load_some(e, e.at(x, number, 64), live), factors)
        store_some(e, at, e.b.fadd(load_some(e, at, live), product), live)

    each_vector(e, count, add)


@jit
def _floats(address: int, count: int) -> Any:
    return numba.carray(pointer(address), count, np.float32)


@jit
def _integers(address: int, count: int) -> Any:
    return numba.carray(pointer(address), count, np.int64)


# -- choosing experts


@jit
def _sum_of_two_largest(values: Any, first: int, end: int) -> float:
    largest_value, second = -np.inf, -np.inf
    for index in range(first, end):
        if values[index] > largest_value:
            largest_value, second = values[index], largest_value
        elif values[index] > second:
            second = values[index]
    return largest_value + (second if end - first > 1 else 0.0)


@jit
def _keep_best_groups(a: Record, choice: Any, sums: Any) -> None:
    """Set the scores of experts to -inf, except in the groups whose two largest scores have the largest sums."""
    size = a.experts // a.expert_groups
    for group in range(a.expert_groups):
        sums[group] = _sum_of_two_largest(choice, group * size, (group + 1) * size)
    for group in range(a.expert_groups):
        better = 0
        for other in range(a.expert_groups):
            if sums[other] > sums[group] or (sums[other] == sums[group] and other < group):
                better += 1
        if better >= a.active_groups:
            for expert in range(group * size, (group + 1) * size):
                choice[expert] = -np.inf


@jit
def _contains(ids: Any, count: int, expert: int) -> bool:
    found = False
    for index in range(count):
        found = found or ids[index] == expert
    return found


@jit
def _choose(a: Record, choice_at: int, ids: Any, pair: int) -> None:
    """Write the indices of the largest scores to `ids`, in ascending order. Overwrites the scores.

    All indices are valid and distinct, even if scores are NaN. `pair` is scratch memory of 8 bytes.
    """
    choice = _floats(choice_at, a.experts)
    for k in range(a.choices):
        largest(choice_at, a.experts, 0, pair)
        expert = word(pair, 0) >> 32
        if not choice[expert] > -np.inf:  # the other scores are NaN or -inf
            expert = 0
            while _contains(ids, k, expert):
                expert += 1
        choice[expert] = -np.inf
        at = k
        while at > 0 and ids[at - 1] > expert:
            ids[at] = ids[at - 1]
            at -= 1
        ids[at] = expert


@jit
def _weigh(a: Record, scores: Any, ids: Any, weights: Any) -> None:
    settings, total = _floats(a.settings, 2), np.float32(0)
    for k in range(a.choices):
        weights[k] = scores[ids[k]]
        total += weights[k]
    divisor = total + settings[0] if a.normalized else np.float32(1)
    for k in range(a.choices):
        weights[k] = weights[k] / divisor * settings[1]
        if a.expert_scale != 0:
            weights[k] *= _floats(a.expert_scale, a.experts)[ids[k]]


@jit
def scores_bytes(experts: int) -> int:
    """Return the size of the scores of one token in bytes."""
    return 4 * experts + 64


@jit
def route(a: Record, first: int, last: int, scratch: int) -> None:
    """Choose the experts of tokens first..last. A token's weights are followed by that of the shared MLP."""
    size = scores_bytes(a.experts)
    scores, choice, sums = scratch, scratch + size, scratch + 2 * size
    for m in range(first, last):
        logits, weights = a.x + m * a.x_stride, a.weights + 4 * (a.choices + 1) * m
        if a.sigmoid:
            sigmoid_floats(logits, a.experts, scores)
        else:
            softmax_floats(logits, a.experts, scores)
        # without a bias and groups, the order of the logits is that of the scores, and it is exact
        by_score = a.choice_bias != 0 or a.expert_groups > 1
        copy_floats(scores if by_score else logits, a.experts, choice)
        if a.choice_bias != 0:
            add_floats(a.choice_bias, a.experts, choice)
        if a.expert_groups > 1:
            _keep_best_groups(a, _floats(choice, a.experts), _floats(sums, a.expert_groups))
        ids = _integers(a.ids + 8 * a.choices * m, a.choices)
        _choose(a, choice, ids, sums)
        _weigh(a, _floats(scores, a.experts), ids, _floats(weights, a.choices))
        if a.gates_shared:
            sigmoid_floats(logits + 4 * a.experts, 1, weights + 4 * a.choices)
        else:
            _floats(weights, a.choices + 1)[a.choices] = 1


@jit
def sort_routes(a: Record, n: int, scratch: int) -> None:
    """Sort the choices of n tokens by expert, and divide the rows of each expert into blocks of up to TOKENS rows."""
    ids, ends = _integers(a.ids, n * a.choices), _integers(scratch, a.experts)
    token_of, row_of = _integers(a.token_of, n * a.choices), _integers(a.row_of, n * a.choices)
    for expert in range(a.experts):
        ends[expert] = 0
    for index in range(n * a.choices):
        ends[ids[index]] += 1
    count, start = 0, 0
    for expert in range(a.experts):
        rows = ends[expert]
        for done in range(0, rows, TOKENS):
            block = _integers(a.blocks + 8 * (1 + BLOCK_WORDS * count), BLOCK_WORDS)
            block[0], block[1], block[2] = expert, start + done, min(TOKENS, rows - done)
            count += 1
        ends[expert] = start  # from here on, where the next row of the expert is
        start += rows
    _integers(a.blocks, 1)[0] = count
    for index in range(n * a.choices):
        row = ends[ids[index]]
        ends[ids[index]] += 1
        row_of[index], token_of[row] = row, index // a.choices


# -- products


@jit
def gather_rows(a: Record, first: int, last: int) -> None:
    """Write rows first..last in the order of experts, copied from the rows of tokens."""
    for row in range(first, last):
        copy_floats(a.x + word(a.token_of, row) * a.x_stride, a.words, a.out + row * a.out_stride)


@jit
def order_rows(a: Record, first: int, last: int, copy: int) -> None:
    """Copy float rows in the order of experts. Columns are in the order of the expert. A unit is a block of rows."""
    for unit in range(first, last):
        block = a.blocks + 8 * (1 + BLOCK_WORDS * unit)
        order = word(a.orders, word(block, 0))
        for row in range(word(block, 1), word(block, 1) + word(block, 2)):
            source = word(a.token_of, row) if a.token_of != 0 else row
            x = a.x + copy * a.x_copy + source * a.x_stride
            take_columns(x, order, a.groups, a.out + row * a.out_stride)


@jit
def count_blocks(a: Record) -> int:
    blocks: int = word(a.blocks, 0)
    return blocks


@jit
def count_expert_units(a: Record) -> int:
    return count_blocks(a) * ((a.rows + PAIR - 1) // PAIR)


@jit
def expert_matmul(a: Record, first: int, last: int) -> None:
    """Multiply blocks of rows by the weight of their expert. A unit is a block and a pair of tiles."""
    pairs = (a.rows + PAIR - 1) // PAIR
    for unit in range(first, last):
        block, pair = a.blocks + 8 * (1 + BLOCK_WORDS * (unit // pairs)), unit % pairs
        expert, start, rows = word(block, 0), word(block, 1), min(PAIR, a.rows - PAIR * pair)
        out = a.out + start * a.out_stride + 4 * PAIR * pair
        if a.bias != 0:
            init_with_bias(a.bias + 4 * (expert * a.rows + PAIR * pair), rows, 0, word(block, 2), out, a.out_stride)
        multiply_pair(
            a.one, a.two, a.four, a.six, word(a.weight, expert) + 2 * pair * a.tile_bytes, a.tile_bytes,
            a.groups, a.x + start * a.x_stride, a.x_stride, word(block, 2), out, a.out_stride, a.bias != 0, rows,
        )  # fmt: skip


@jit
def expert_gated(a: Record, n: int, first: int, last: int, copy: int, scratch: int) -> None:
    """Multiply blocks of rows by gate and up of their expert. A unit is a block and 32 columns of the product."""
    pairs, half = a.rows // PAIR, 4 * PAIR
    for unit in range(first, last):
        block, pair = a.blocks + 8 * (1 + BLOCK_WORDS * (unit // pairs)), unit % pairs
        expert, start, count = word(block, 0), word(block, 1), word(block, 2)
        # the row of a single token is not copied for each of its experts
        x = a.single + copy * a.x_copy if n == 1 and a.single != 0 else a.x + start * a.x_stride
        if a.bias != 0:
            bias = a.bias + 4 * (expert * 2 * a.rows + PAIR * pair)
            init_with_bias(bias, PAIR, 0, count, scratch, 2 * half)
            init_with_bias(bias + 4 * a.rows, PAIR, 0, count, scratch + half, 2 * half)
        multiply_pair(
            a.one, a.two, a.four, a.six, word(a.weight, expert) + 2 * pair * a.tile_bytes, a.tile_bytes, a.groups,
            x, a.x_stride, count, scratch, 2 * half, a.bias != 0, PAIR,
        )  # fmt: skip
        multiply_pair(
            a.up_one, a.up_two, a.up_four, a.up_six, word(a.up, expert) + 2 * pair * a.up_tile_bytes, a.up_tile_bytes,
            a.groups, x, a.x_stride, count, scratch + half, 2 * half, a.bias != 0, PAIR,
        )  # fmt: skip
        for m in range(count):
            row = scratch + 2 * half * m
            gated_product(a.kernel, row, row + half, pair, pairs, a.out + (start + m) * a.out_stride)


@jit
def combine(a: Record, first: int, last: int, scratch: int) -> None:
    """Write the weighted sums of the experts' rows and the shared MLP's row, or add them to existing rows."""
    width = GROUP * a.groups
    for m in range(first, last):
        weights, rows_of = a.weights + 4 * (a.choices + 1) * m, a.row_of + 8 * a.choices * m
        copy_floats(a.x + word(rows_of, 0) * a.x_stride, width, scratch)
        multiply_floats(scratch, width, word(weights, 0) & 0xFFFFFFFF)
        for k in range(1, a.choices):
            add_scaled_floats(a.x + word(rows_of, k) * a.x_stride, width, weights + 4 * k, scratch)
        if a.shared != 0:
            add_scaled_floats(a.shared + m * a.shared_stride, width, weights + 4 * a.choices, scratch)
        if a.add:
            add_floats(scratch, width, a.out + m * a.out_stride)
        else:
            copy_floats(scratch, width, a.out + m * a.out_stride)
