"""AWQ checkpoints in the layout named "gemm", of 4 bits: one linear layer to its canonical form.

Layout, as AutoAWQ writes it (`awq/modules/linear/gemm.py`, `WQLinear_GEMM.from_linear`; `awq/utils/packing_utils.py`),
for a weight of `out` rows and `in` columns in groups of columns:

    qweight  int32 [in, out / 8]      a word holds 8 consecutive rows of one column
    qzeros   int32 [groups, out / 8]  a word holds the zero points of 8 consecutive rows
    scales   float [groups, out]

    value[r, c] = scales[c // group, r] * (code[r, c] - zero[c // group, r])

The eight rows of a word lie in the order 0, 2, 4, 6, 1, 3, 5, 7, the lowest bits first.
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
POSITIONS = (0, 4, 1, 5, 2, 6, 3, 7)  # of rows 0 to 7 in a word


@dataclass(frozen=True, slots=True)
class AWQ:
    """How the layers of a checkpoint are quantized."""

    group: int | None  # columns; None is a whole row

    @classmethod
    def read(cls, config: object) -> "AWQ":
        """From `quantization_config` of a config.json. Raises ModelFileError."""
        section = QuantizationSection(config)
        section.text("quant_method", ("awq",))
        section.text("version" if "version" in section else "format", ("gemm",), default="gemm")
        section.text("backend", ("auto", "autoawq"), default="autoawq")
        section.bits("bits", (BITS,))
        if not section.flag("zero_point", default=True):
            raise section.unsupported("zero_point", ("true",))
        return cls(section.group_size())


def decode(layer: str, tensors: Mapping[str, Tensor], config: AWQ) -> GroupedTensor:
    """The weight of `layer`, from its tensors by their names in the layer. Copies. Raises ModelFileError."""
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
    """Words [n, rows / 8] to the integers of some rows, whole words of them, uint8 [rows, n]."""
    codes = unpack(words[:, some.start // 8 : some.stop // 8], BITS).reshape(len(words), -1, 8)
    return codes[:, :, list(POSITIONS)].reshape(len(words), -1).T
