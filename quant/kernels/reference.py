"""Reference in plain torch: dequantizes and multiplies every canonical form, in code that is easy to verify by reading.

It is the oracle for tests of the fast kernels, and the fallback on machines that the fast kernels do not support. A row
of a product depends on that row alone, bit for bit: rows are multiplied in tiles of a fixed height, so that the matrix
library always sees the same shape and therefore sums in the same order.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from quant.tensor import (
    CodedTensor,
    Float8Tensor,
    GroupedTensor,
    GroupScale,
    Integers,
    NestedScale,
    PlainTensor,
    QTensor,
    Scale,
)

SPAN = 32  # columns that share a scale if a matrix is rounded to integers
ROW_TILE = 16  # rows per library call: more would speed up prompts and slow down single tokens


def dequantize(weight: QTensor) -> Tensor:
    """Return the values of `weight`, float32, in its shape."""
    if isinstance(weight, PlainTensor):
        return weight.values.float()
    if isinstance(weight, Float8Tensor):
        return weight.values.float() * _scales(weight)
    if isinstance(weight, GroupedTensor):
        return _grouped(weight)
    rows, columns = weight.shape
    codes = weight.codes.values()
    numbers = codes.float() - weight.zero if weight.table is None else _numbers(weight.table)[codes.int()]
    values = weight.scale.values().unsqueeze(-1) * numbers.view(rows, columns // weight.group, weight.group)
    if weight.minimum is not None:
        values -= weight.minimum.values().unsqueeze(-1)
    return values.view(rows, columns)


def _grouped(weight: GroupedTensor) -> Tensor:
    columns = weight.shape[1]
    codes = weight.codes.values()[:, :columns]
    if weight.table is not None:
        numbers = _numbers(weight.table)[codes.int()]
    elif isinstance(weight.zero, Integers):
        zeros = weight.zero.values()[:, : weight.groups].float()
        numbers = codes.float() - _spread(zeros, weight.group, columns)
    else:
        numbers = codes.float() - weight.zero
    values = _spread(weight.scale.values(), weight.group, columns) * numbers
    if weight.order is None:
        return values
    restored = torch.empty_like(values)
    restored[:, weight.order] = values
    return restored


def _spread(parts: Tensor, group: int, columns: int) -> Tensor:
    """Repeat the value of each group for its columns: [rows, groups] -> [rows, columns]."""
    return parts.repeat_interleave(group, dim=1)[:, :columns]


def _numbers(table: tuple[float, ...]) -> Tensor:
    return torch.tensor(table, dtype=torch.float32)


def _scales(weight: Float8Tensor) -> Tensor:
    """Return the scale of every element, float32 [rows, columns], or [rows, 1] if each row has one scale."""
    (rows, columns), (height, width) = weight.shape, weight.block
    scales = weight.scale.float().repeat_interleave(height, 0)[:rows]
    return scales if width == columns else scales.repeat_interleave(width, 1)[:, :columns]


def dequantize_rows(weight: QTensor, rows: Tensor) -> Tensor:
    """Return the rows `rows` (int64 [n]) of a matrix, float32 [n, columns]."""
    if isinstance(weight, PlainTensor):
        return weight.values[rows].float()
    return dequantize(weight.rows(rows))


def matmul(x: Tensor, values: Tensor) -> Tensor:
    """Multiply x [rows, inputs] by values [outputs, inputs] transposed, float32 -> [rows, outputs].

    It takes 2 * rows * outputs * inputs operations, with rows rounded up to tiles of `ROW_TILE`.
    """
    rows = len(x)
    if rows == 0:
        return x.new_empty(0, len(values))
    padded = F.pad(x, (0, 0, 0, -rows % ROW_TILE))
    return torch.cat([padded[at : at + ROW_TILE] @ values.T for at in range(0, rows, ROW_TILE)])[:rows]


def expert_product(x: Tensor, values: Tensor, ids: Tensor) -> Tensor:
    """Multiply the tokens by the matrices of their experts.

    - x: float32 [tokens, inputs], or [slots, inputs] with a row for each expert of a token
    - values: float32 [experts, outputs, inputs]
    - ids: int64 [tokens, active], the experts of each token

    Returns float32 [slots, outputs], where slots = tokens * active.
    """
    rows = x.repeat_interleave(ids.numel() // len(x), 0)
    return torch.einsum("si,soi->so", rows, values[ids.flatten()])


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize x [rows, columns] float32 to float8_e4m3fn of the same shape, with one scale per row, [rows, 1].

    x is about values * scale: the largest magnitude of a row becomes the largest finite float8 value.
    """
    largest = torch.finfo(torch.float8_e4m3fn).max
    peak = x.abs().amax(1, keepdim=True).clamp(min=2.0**-100)
    # torch rounds twice when it divides a Python number by a tensor, so the number is converted to a tensor first.
    return (x * (torch.tensor(largest) / peak)).clamp(-largest, largest).to(torch.float8_e4m3fn), peak / largest


def integer_inputs(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize x [rows, columns] float32: codes int8 [spans, rows, SPAN] and scales float32 [spans, rows].

    x is about codes * scales, and the largest code of a span is 127. Columns are padded with zeros.
    """
    spans = _spans(x)
    return _codes(spans, _peak_factor(spans.abs().amax(2)))


def integer_weights(weight: CodedTensor | GroupedTensor) -> tuple[Tensor, Tensor]:
    """Quantize a matrix as `integer_inputs` does, or to multiples of its codes where this is more exact.

    A value is number * s - b. If the numbers of a span are whole and share s and b, a code is k * number less k * b /
    s, and only the latter is rounded. Four values of k are compared, and the one with the smallest error is used. The
    columns must be in order.
    """
    spans = _spans(dequantize(weight))
    peaks = spans.abs().amax(2)
    factor = _peak_factor(peaks)
    if (weight.table is None or is_whole(weight.table)) and (
        weight.group % SPAN == 0 or weight.group >= weight.shape[1]
    ):
        minimum = weight.minimum if isinstance(weight, CodedTensor) else None
        step, b = (_of_spans(it, weight) if it else torch.zeros_like(peaks) for it in (weight.scale, minimum))
        factor = _step_factor(peaks, step.abs(), b, factor)
    return _codes(spans, factor)


def is_whole(table: tuple[float, ...]) -> bool:
    """Whether all numbers of a table are integers of 8 bits."""
    return all(float(number).is_integer() and abs(number) <= 127 for number in table)


def _spans(values: Tensor) -> Tensor:
    """Return values in spans, [spans, rows, SPAN]."""
    padded = F.pad(values, (0, -values.shape[1] % SPAN))
    return padded.view(len(values), -1, SPAN).transpose(0, 1)


def _of_spans(scale: Scale | GroupScale | NestedScale, weight: CodedTensor | GroupedTensor) -> Tensor:
    """Return the scale of each span, [spans, rows]."""
    return _spread(scale.values(), weight.group, weight.shape[1])[:, ::SPAN].T


def _codes(spans: Tensor, factor: Tensor) -> tuple[Tensor, Tensor]:
    return (spans * factor.unsqueeze(-1)).round().to(torch.int8), torch.tensor(1.0) / factor


def _peak_factor(peaks: Tensor) -> Tensor:
    # see `quantize_rows`
    return torch.tensor(127.0) / peaks.clamp(min=2.0**-100)


def _step_factor(peaks: Tensor, step: Tensor, minimum: Tensor, by_peak: Tensor) -> Tensor:
    """Return codes per unit of spans of multiples of `step`: `by_peak`, or those with the smallest error."""
    found, least = by_peak, peaks / 127 / 12**0.5  # the mean error of rounding
    most = (step * by_peak + 1e-3).floor()
    for codes in (most, most - 1, most - 2, most - 3):
        multiple = minimum / step * codes
        error = (multiple - multiple.round()).abs() * step / codes
        better = (codes >= 1) & (error < least)
        found, least = torch.where(better, codes / step, found), torch.where(better, error, least)
    return found
