"""compressed-tensors checkpoints in the format "pack-quantized", 2, 4, and 8 bits: decode and encode a linear layer.

The layout that the compressed-tensors package writes (`compressors/pack_quantized/`), for a weight of `out` rows and
`in` columns, b bits, in groups of columns or with one group per row ("channel"):

    weight_packed      int32 [out, in * b / 32]     a word holds 32 / b consecutive columns, the lowest bits first;
                                                    rows are padded to whole words
    weight_scale       float [out, groups]
    weight_shape       int64 [2]                    out, in
    weight_zero_point  int32 [out * b / 32, groups] only if not symmetric: a word holds 32 / b consecutive rows
    weight_g_idx       int32 [in]                   only with `actorder` "group": the group of each column, or -1
                                                    for all columns if they are in order

    value[r, c] = weight_scale[r, g] * (code[r, c] - zero[r, g]), where g is the group of column c

Codes and zero points are signed, and are stored with 2 ** (b - 1) added. The canonical form keeps this offset in both,
since it cancels. Other widths are rejected, because versions of the package pack them differently. Settings for the
quantization of activations do not affect weights and are not read.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quant.errors import UnsupportedQuantization
from quant.layer_tensors import SCALE_TYPES, LayerTensors
from quant.packed_integers import WIDTHS, columns_by_group, pack, unpack, words
from quant.quantization_section import OTHER_COPY, QuantizationSection
from quant.tensor import GroupedTensor, GroupScale, Integers

# Values of `actorder`. Those in ORDERED store the order of the columns, as g_idx. The others affect calibration alone.
ORDERED, UNORDERED = ("group", "dynamic"), ("weight", "static", "none")
UNUSED_TENSORS = ("bias", "input_scale", "input_zero_point", "output_scale", "output_zero_point")


@dataclass(frozen=True, slots=True)
class PackQuantized:
    """The quantization of one layer."""

    bits: int
    group: int | None  # columns that share a scale; None: a whole row
    symmetric: bool
    ordered: bool  # whether columns are ordered by the size of their activations

    @classmethod
    def read(cls, config: object, layer: str) -> "PackQuantized":
        """Read the quantization of `layer` from `quantization_config` of a config.json. Raises ModelFileError."""
        section = QuantizationSection(config)
        section.text("quant_method", ("compressed-tensors",))
        if "transform_config" in section:
            # rotations of a layer's input are not supported
            section.section("transform_config").refuse("config_groups")
        if "sparsity_config" in section:
            section.section("sparsity_config").text("format", ("dense",), default="dense")
        scheme = _scheme(section, layer)
        holder = scheme if "format" in scheme else section
        holder.text("format", ("pack-quantized",))
        weights = scheme.section("weights")
        weights.text("type", ("int",), default="int")
        bits = weights.bits("num_bits", WIDTHS)
        by_group = weights.text("strategy", ("group", "channel")) == "group"
        group = weights.positive("group_size") if by_group else None
        order = weights.text("actorder", (*ORDERED, *UNORDERED), default="none")
        return cls(bits, group, weights.flag("symmetric", default=True), order in ORDERED)


def _scheme(section: QuantizationSection, layer: str) -> QuantizationSection:
    """Return the scheme whose targets include `layer`, else the scheme for "Linear".

    A single scheme applies to all quantized layers.
    """
    schemes = section.sections("config_groups")
    if len(schemes) == 1:
        return schemes[0]
    targets = [(scheme, scheme.texts("targets")) for scheme in schemes]
    if any(target.startswith("re:") for _, names in targets for target in names):
        # Matching a hostile pattern could take unlimited time.
        raise UnsupportedQuantization(
            f"{section.path} has regular expressions as targets, which are not supported", OTHER_COPY
        )
    for wanted in (layer, "Linear"):
        found = [scheme for scheme, names in targets if wanted in names]
        if len(found) == 1:
            return found[0]
    raise UnsupportedQuantization(
        f"{section.path}.config_groups does not have exactly one scheme for {layer}", OTHER_COPY
    )


def decode(layer: str, tensors: Mapping[str, Tensor], config: PackQuantized) -> GroupedTensor:
    """Return a copy of the weight of `layer`. `tensors` are keyed by names within the layer. Raises ModelFileError."""
    bits, per_word = config.bits, 32 // config.bits
    given = LayerTensors(layer, tensors, unused=UNUSED_TENSORS)
    rows, columns = (int(size) for size in given.take("weight_shape", (torch.int64, torch.int32), 2))
    if rows <= 0 or columns <= 0:
        raise given.damaged("weight_shape", f"is {rows} by {columns}")
    group = min(config.group or columns, columns)
    groups = -(-columns // group)
    packed = given.take("weight_packed", (torch.int32,), rows, -(-columns // per_word))
    scale = given.take("weight_scale", SCALE_TYPES, rows, groups)
    zero_words = (
        None if config.symmetric else given.take("weight_zero_point", (torch.int32,), -(-rows // per_word), groups)
    )
    order = _order(given, columns, group) if config.ordered else None
    given.finish()
    taken = slice(columns) if order is None else order.numpy()
    zeros = None if zero_words is None else unpack(zero_words.T, bits).T
    return GroupedTensor(
        shape=(rows, columns),
        type_name=f"CT-INT{bits}",
        group=group,
        codes=pack((rows, columns), bits, lambda some: unpack(packed[some], bits)[:, taken]),
        scale=GroupScale(scale.clone(memory_format=torch.contiguous_format)),
        zero=1 << (bits - 1) if zeros is None else pack((rows, groups), bits, lambda some: zeros[some]),
        order=order,
    )


def _order(given: LayerTensors, columns: int, group: int) -> Tensor | None:
    g_idx = given.take("weight_g_idx", (torch.int32, torch.int64), columns)
    if bool((g_idx == -1).all()):
        return None
    try:
        return columns_by_group(g_idx, group)
    except ValueError as error:
        raise given.damaged("weight_g_idx", str(error)) from None


def encode(weight: GroupedTensor) -> dict[str, Tensor]:
    """Encode a weight as the tensors of a layer, keyed by their names in it. `decode` restores the weight.

    Raises ValueError unless `weight` has integer zero points, plain scales, and its columns in order.
    """
    rows, columns = weight.shape
    if not isinstance(weight.zero, Integers) or not isinstance(weight.scale, GroupScale) or weight.order is not None:
        raise ValueError(f"a {weight.type_name} tensor without integer zero points cannot be stored as pack-quantized")
    bits = weight.codes.bits
    zeros = weight.zero.values()[:, : weight.groups].numpy()
    return {
        "weight_packed": words(weight.codes.values()[:, :columns].numpy(), bits),
        "weight_scale": weight.scale.stored,
        "weight_zero_point": words(np.ascontiguousarray(zeros.T), bits).T.contiguous(),
        "weight_shape": torch.tensor([rows, columns]),
    }
