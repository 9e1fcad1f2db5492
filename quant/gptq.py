"""GPTQ checkpoints, versions 1 and 2, of 2, 4, and 8 bits: convert a linear layer to its canonical form.

The layout that AutoGPTQ and GPTQModel write (`nn_modules/qlinear/__init__.py`, `pack_block` and `dequantize_weight`),
for a weight of `out` rows and `in` columns, b bits, in groups of columns:

    qweight  int32 [in * b / 32, out]      a word holds 32 / b consecutive columns of one row, the lowest bits first
    qzeros   int32 [groups, out * b / 32]  a word holds the zero points of 32 / b consecutive rows
    scales   float [groups, out]
    g_idx    int32 [in]                    the group of each column

    value[r, c] = scales[g_idx[c], r] * (code[r, c] - zero[g_idx[c], r])

Version 1 (`checkpoint_format` "gptq", the default) stores zero points minus one. The ones were subtracted from whole
words, so that a zero point of 0 borrows from the next one. They are added to whole words here, as GPTQModel does
(`convert_gptq_v1_to_v2_format_module`). Version 2 ("gptq_v2") stores zero points unchanged.

With `desc_act`, columns were quantized by the size of their activations and g_idx has any order. Without, g_idx is in
order; in some old files it is all zeros, with the same meaning.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from quant.layer_tensors import SCALE_TYPES, LayerTensors
from quant.packed_integers import WIDTHS, columns_by_group, pack, unpack
from quant.quantization_section import QuantizationSection
from quant.tensor import GroupedTensor, GroupScale

FORMATS = ("gptq", "gptq_v2")


@dataclass(frozen=True, slots=True)
class GPTQ:
    """The quantization settings of a checkpoint's layers."""

    bits: int
    group: int | None  # columns that share a scale; None: a whole row
    zeros_less_one: bool
    ordered: bool  # whether columns were quantized in the order of their activations' size

    @classmethod
    def read(cls, config: object) -> "GPTQ":
        """Read `quantization_config` of a config.json. Raises ModelFileError."""
        section = QuantizationSection(config)
        section.text("quant_method", ("gptq",))
        section.text("pack_dtype", ("int32",), default="int32")
        section.refuse("dynamic")  # different parameters for some layers are not supported
        section.refuse("is_marlin_format")
        key = "checkpoint_format" if "checkpoint_format" in section else "format"
        version = section.text(key, FORMATS, default="gptq")
        bits, group = section.bits("bits", WIDTHS), section.group_size()
        return cls(bits, group, version == "gptq", section.flag("desc_act", default=False))


def decode(layer: str, tensors: Mapping[str, Tensor], config: GPTQ) -> GroupedTensor:
    """Return a copy of the weight of `layer`. `tensors` are keyed by names within the layer. Raises ModelFileError."""
    per_word = 32 // config.bits
    given = LayerTensors(layer, tensors)
    qweight = given.take("qweight", (torch.int32,), None, None)
    columns, rows = qweight.shape[0] * per_word, qweight.shape[1]
    group = min(config.group or columns, columns)
    groups = -(-columns // group)
    scales = given.take("scales", SCALE_TYPES, groups, rows)
    qzeros = given.take("qzeros", (torch.int32,), groups, -(-rows // per_word))
    order = _order(given, columns, group, config)
    given.finish()
    taken = slice(None) if order is None else order.numpy()
    ones = sum(1 << shift for shift in range(0, 32, config.bits))
    zeros = unpack(qzeros + ones if config.zeros_less_one else qzeros, config.bits)
    return GroupedTensor(
        shape=(rows, columns),
        type_name=f"GPTQ-INT{config.bits}",
        group=group,
        codes=pack((rows, columns), config.bits, lambda some: unpack(qweight[:, some].T, config.bits)[:, taken]),
        scale=GroupScale(scales.T.clone(memory_format=torch.contiguous_format)),
        zero=pack((rows, groups), config.bits, lambda some: zeros.T[some]),
        order=order,
    )


def _order(given: LayerTensors, columns: int, group: int, config: GPTQ) -> Tensor | None:
    if "g_idx" not in given and not config.ordered:
        return None
    g_idx = given.take("g_idx", (torch.int32,), columns)
    if not config.ordered and not g_idx.any():
        return None
    try:
        order = columns_by_group(g_idx, group)
    except ValueError as error:
        raise given.damaged("g_idx", str(error)) from None
    if order is not None and not config.ordered:
        raise given.damaged("g_idx", "is not in order, but config.json sets desc_act to false")
    return order
