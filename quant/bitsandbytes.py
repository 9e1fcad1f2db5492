"""bitsandbytes checkpoints, 4 bits (NF4 and FP4) and 8 bits (LLM.int8): decode linear layers, and encode NF4.

The layout that bitsandbytes writes (`bitsandbytes/functional.py`, `QuantState.as_dict`; `bitsandbytes/nn/modules.py`),
for a weight of `out` rows and `in` columns. With 4 bits, in blocks of `blocksize` consecutive elements, row after row:

    weight                  bytes [out * in / 2]  two elements in a byte, the first in the high half
    weight.absmax           float32 [blocks]      or uint8 if the scales are also quantized ("double quantization")
    weight.quant_map        float32 [16]          the value of each code
    weight.nested_absmax    float32 [blocks / nested_blocksize, rounded up]
    weight.nested_quant_map float32 [256]         the value of each code of a scale
    weight.quant_state.bitsandbytes__nf4 (or __fp4)   JSON in uint8: shape, blocksize, nested_blocksize, nested_offset

    value = quant_map[code] * scale
    scale = absmax, or nested_quant_map[absmax] * nested_absmax[block // nested_blocksize] + nested_offset

quant_map must equal the standard table of NF4 or FP4. Other tables are rejected, because bitsandbytes' kernels ignore
quant_map. Blocks that straddle two rows are rejected.

With 8 bits: weight int8 [out, in], SCB float32 [out], and weight_format 0. value = (SCB / 127) * weight.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quant.errors import UnsupportedQuantization
from quant.layer_tensors import LayerTensors
from quant.packed_integers import Bytes, pack
from quant.quantization_section import OTHER_COPY, QuantizationSection
from quant.tensor import GroupedTensor, GroupScale, Integers, NestedScale

NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
FP4 = tuple(sign * number / 12 for sign in (1, -1) for number in (0.0, 0.0625, 8, 12, 4, 6, 2, 3))
TABLES = {"nf4": NF4, "fp4": FP4}
TABLE_ERROR = 1e-6  # tolerance: writers that divide in a different order get slightly different tables

# types in which checkpoints store the bytes of 4-bit weights
STORAGE_TYPES = (torch.uint8, torch.float16, torch.bfloat16, torch.float32)
MAX_STATE_BYTES = 1 << 16
INT8_UNIT = 1.0 / 127.0


@dataclass(frozen=True, slots=True)
class BitsAndBytes:
    """The quantization settings of a checkpoint's layers."""

    table: str | None  # "nf4" or "fp4"; None: 8 bits

    @classmethod
    def read(cls, config: object) -> "BitsAndBytes":
        """Read `quantization_config` of a config.json. Raises ModelFileError."""
        section = QuantizationSection(config)
        section.text("quant_method", ("bitsandbytes",))
        four, eight = (section.flag(f"load_in_{bits}bit", default=False) for bits in (4, 8))
        if four == eight:
            raise section.unsupported("load_in_4bit", ("true, or load_in_8bit: true",))
        return cls(section.text("bnb_4bit_quant_type", tuple(TABLES), default="fp4") if four else None)


def decode(layer: str, tensors: Mapping[str, Tensor], config: BitsAndBytes) -> GroupedTensor:
    """Return a copy of the weight of `layer`. `tensors` are keyed by names within the layer. Raises ModelFileError."""
    given = LayerTensors(layer, tensors)
    weight = _eight_bits(given) if config.table is None else _four_bits(given, config.table)
    given.finish()
    return weight


def encode(weight: GroupedTensor, dtype: torch.dtype) -> dict[str, Tensor]:
    """Encode an NF4 weight as the tensors of a layer, keyed by their names in it. `decode` restores the weight.

    `dtype` is the type of the weights before quantization. bitsandbytes multiplies in that type.
    """
    rows, columns = weight.shape
    codes = weight.codes.values()[:, :columns]
    state: dict[str, object] = {"quant_type": "nf4", "blocksize": weight.group, "dtype": _name(dtype)}
    state["shape"] = [rows, columns]
    tensors = {
        "weight": (codes[:, 0::2] << 4 | codes[:, 1::2]).reshape(-1, 1),
        "weight.quant_map": torch.tensor(NF4),
    }
    scale = weight.scale
    if isinstance(scale, NestedScale):
        tensors["weight.absmax"] = scale.codes.flatten()
        tensors["weight.nested_absmax"] = scale.block_scales
        tensors["weight.nested_quant_map"] = scale.table
        state |= {"nested_blocksize": scale.block_size, "nested_dtype": "float32", "nested_offset": scale.offset}
    else:
        tensors["weight.absmax"] = scale.stored.flatten()
    tensors["weight.quant_state.bitsandbytes__nf4"] = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    return tensors


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _eight_bits(given: LayerTensors) -> GroupedTensor:
    weight = given.take("weight", (torch.int8,), None, None)
    rows, columns = weight.shape
    scale = given.take("SCB", (torch.float32,), rows)
    if "weight_format" in given and given.take("weight_format", (torch.uint8,)).item() != 0:
        raise UnsupportedQuantization(f"The weight of {given.layer} is not stored row by row", OTHER_COPY)
    signed = weight.numpy().view(np.uint8)
    codes = pack((rows, columns), 8, lambda some: signed[some] ^ np.uint8(0x80))
    scales = GroupScale(scale.clone().view(rows, 1), INT8_UNIT)
    return GroupedTensor((rows, columns), "LLM.int8", columns, codes, scales, zero=128)


def _four_bits(given: LayerTensors, table: str) -> GroupedTensor:
    state = _state(given, f"weight.quant_state.bitsandbytes__{table}")
    state.text("quant_type", (table,))
    rows, columns = state.shape("shape")
    block = state.positive("blocksize")
    if columns % block or columns % 2:
        raise UnsupportedQuantization(
            f"Blocks of {block} elements, or bytes, straddle the rows of {columns} elements of {given.layer}",
            OTHER_COPY,
        )
    quant_map = given.take("weight.quant_map", (torch.float32,), 16)
    if not torch.allclose(quant_map, torch.tensor(TABLES[table]), rtol=0, atol=TABLE_ERROR):
        raise given.damaged("weight.quant_map", f"is not the {table} table")
    return GroupedTensor(
        shape=(rows, columns),
        type_name=table.upper(),
        group=block,
        codes=_codes(given, rows, columns),
        scale=_scale(given, state, rows, columns // block),
        table=TABLES[table],
    )


def _codes(given: LayerTensors, rows: int, columns: int) -> Integers:
    data = given.take("weight", STORAGE_TYPES, None, 1).flatten().view(torch.uint8).numpy()
    if 2 * len(data) != rows * columns:
        raise given.damaged("weight", f"has {len(data)} bytes for {rows} by {columns} elements of 4 bits")
    by_row = data.reshape(rows, -1)

    def halves(some: slice) -> Bytes:
        out = np.empty((some.stop - some.start, columns), np.uint8)
        out[:, 0::2], out[:, 1::2] = by_row[some] >> np.uint8(4), by_row[some] & np.uint8(0x0F)
        return out

    return pack((rows, columns), 4, halves)


def _scale(given: LayerTensors, state: QuantizationSection, rows: int, groups: int) -> GroupScale | NestedScale:
    if "nested_blocksize" not in state:
        return GroupScale(given.take("weight.absmax", (torch.float32,), rows * groups).clone().view(rows, groups))
    block_size = state.positive("nested_blocksize")
    absmax = given.take("weight.absmax", (torch.uint8,), rows * groups)
    return NestedScale(
        codes=absmax.clone().view(rows, groups),
        table=given.take("weight.nested_quant_map", (torch.float32,), 256).clone(),
        block_scales=given.take("weight.nested_absmax", (torch.float32,), -(-rows * groups // block_size)).clone(),
        block_size=block_size,
        offset=state.number("nested_offset"),
    )


def _state(given: LayerTensors, name: str) -> QuantizationSection:
    data = given.take(name, (torch.uint8,), None)
    if len(data) > MAX_STATE_BYTES:
        raise given.damaged(name, f"has {len(data)} bytes, more than {MAX_STATE_BYTES}")
    try:
        values = json.loads(bytes(data.numpy()))
    except (ValueError, RecursionError):
        raise given.damaged(name, "is not JSON") from None
    return QuantizationSection(values, f"{given.layer}.{name}")
