"""AWQ checkpoints, version "gemm", 4 bits: convert a linear layer to its canonical form.

The layout that AutoAWQ writes (`awq/modules/linear/gemm.py`, `WQLinear_GEMM.from_linear`;
`awq/utils/packing_utils.py`), for a weight of `out` rows and `in` columns in groups of columns:

    qweight  int32 [in, out / 8]      a word holds 8 consecutive rows of one column
    qzeros   int32 [groups, out / 8]  a word holds the zero points of 8 consecutive rows
    scales   float [groups, out]

    value[r, c] = scales[c // group, r] * (code[r, c] - zero[c // group, r])

The eight rows of a word are in the order 0, 2, 4, 6, 1, 3, 5, 7, from the lowest bits.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from quant.layer_tensors import SCALE_TYPES, LayerTensors
from quant.packed_integers import Bytes, pack, unpack
from quant.quantization_section import QuantizationSection
from quant.tensor import GroupedTensor, GroupScale

BITS = 4
POSITIONS = (0, 4, 1, 5, 2, 6, 3, 7)  # positions of rows 0 to 7 in a word


@dataclass(frozen=True, slots=True)
class AWQ:
    """The quantization settings of a checkpoint's layers."""

    group: int | None  # columns that share a scale; None: a whole row

    @classmethod
    def read(cls, config: object) -> "AWQ":
        """Read `quantization_config` of a config.json. Raises ModelFileError."""
        section = QuantizationSection(config)
        section.text("quant_method", ("awq",))
        section.text("version" if "version" in section else "format", ("gemm",), default="gemm")
        section.text("backend", ("auto", "autoawq"), default="autoawq")
        section.bits("bits", (BITS,))
        if not section.flag("zero_point", default=True):
            raise section.unsupported("zero_point", ("true",))
        return cls(section.group_size())


def decode(layer: str, tensors: Mapping[str, Tensor], config: AWQ) -> GroupedTensor:
    """Return a copy of the weight of `layer`. `tensors` are keyed by names within the layer. Raises ModelFileError."""
    given = LayerTensors(layer, tensors)
    qweight = given.take("qweight", (torch.int32,), None, None)
    columns, rows = qweight.shape[0], 8 * qweight.shape[1]
    group = min(config.group or columns, columns)
    groups = -(-columns // group)
    scales = given.take("scales", SCALE_TYPES, groups, rows)
    qzeros = given.take("qzeros", (torch.int32,), groups, rows // 8)
    given.finish()
    return GroupedTensor(
        shape=(rows, columns),
        type_name="AWQ-INT4",
        group=group,
        codes=pack((rows, columns), BITS, lambda some: _rows(qweight, some)),
        scale=GroupScale(scales.T.clone(memory_format=torch.contiguous_format)),
        zero=pack((rows, groups), BITS, lambda some: _rows(qzeros, some)),
    )


def _rows(words: Tensor, some: slice) -> Bytes:
    """Unpack int32 words [n, rows / 8] to codes or zero points, uint8 [rows, n]."""
    codes = unpack(words[:, some.start // 8 : some.stop // 8], BITS).reshape(len(words), -1, 8)
    return codes[:, :, list(POSITIONS)].reshape(len(words), -1).T
