"""Decode the scales of a group, for formats that no file uses yet."""

import ctypes
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from quant.cpu.ggml_decoding import load_scales
from quant.cpu.ggml_formats import GROUP, SUPER_BLOCK_GROUPS, TILE, GGMLFormat, Scales, SubScales
from quant.cpu.ggml_tiles import Bytes, pack, unpack
from quant.cpu.kernel import Kernel
from quant.cpu.native import compile_kernels, link
from quant.cpu.tiers import choose
from quant.cpu.vector import I64, Emit
from quant.ggml_blocks import integers
from quant.tensor import CodedTensor, Scale

UNIT = 0.125
WITH_SUB_SCALES = Scales(sub_scales=SubScales((8,), 32), block_groups=SUPER_BLOCK_GROUPS, unit=UNIT)
MADE_UP = {
    "halves": GGMLFormat(0, (4,), zero=8, scales=Scales(unit=UNIT)),
    "exponents": GGMLFormat(0, (4,), zero=8, scales=Scales(exponent=True, unit=UNIT)),
    "minimums": GGMLFormat(0, (4,), scales=Scales(minimum=True, unit=UNIT)),
    "sub-scales": GGMLFormat(0, (4,), zero=8, scales=WITH_SUB_SCALES),
}
RNG = np.random.default_rng(3)


def weight_of(layout: GGMLFormat) -> CodedTensor:
    """Make a weight that fills two tiles of one block."""
    scales, rows = layout.scales, 2 * TILE
    stored = torch.from_numpy(RNG.integers(1, 255, (rows, 1), np.uint8))
    plain = Scale(stored if scales.exponent else stored.half() / 64, unit=UNIT)
    sub_scales = (
        integers(RNG.integers(0, 64, (rows, scales.block_groups), np.uint8), (8,)) if scales.sub_scales else None
    )
    with_sub_scales = replace(plain, sub_scales=sub_scales, sub_scale_zero=32)
    return CodedTensor(
        shape=(rows, GROUP * scales.block_groups),
        type_name="made up",
        group=GROUP,
        codes=integers(RNG.integers(0, 16, (rows, GROUP * scales.block_groups), np.uint8), (4,)),
        scale=plain if scales.sub_scales is None else with_sub_scales,
        zero=layout.zero,
        minimum=Scale((stored / 32).half()) if scales.minimum else None,
    )


@pytest.mark.parametrize("name", MADE_UP)
def test_unit_multiplies_scales_but_not_minimums(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = MADE_UP[name]
    weight = weight_of(layout)
    monkeypatch.setattr("quant.cpu.ggml_tiles.ggml_format_of", lambda _: layout)
    memory = np.zeros(2 * layout.tile_bytes(layout.scales.block_groups), np.uint8)
    pack(weight, memory)
    assert torch.equal(unpack(memory, layout, weight.shape).scale.values(), weight.scale.values())  # type: ignore[union-attr]
    for group in range(layout.scales.block_groups):
        scale, minimum = loaded(layout, memory, group)
        assert np.array_equal(scale, weight.scale.values()[:TILE, group].numpy())
        if weight.minimum is not None:
            # kernels add minimums, so the sign is flipped
            assert np.array_equal(minimum, -weight.minimum.values()[:TILE, group].numpy())


def loaded(layout: GGMLFormat, memory: Bytes, group: int) -> tuple[Any, Any]:
    """Return the scales and minimums of 16 rows as a kernel decodes them."""

    def load(e: Emit, tile: Any, number: Any, out: Any) -> None:
        at = e.b.add(tile, e.b.add(I64(layout.head_bytes), e.b.mul(number, I64(layout.group_bytes))))
        ((scale, minimum),) = load_scales(e, layout, at, tile, number)
        e.store(out, scale)
        if minimum is not None:
            e.store(e.at(out, 64), minimum)

    target, out = choose("auto"), np.zeros((2, TILE), np.float32)
    engine = link(compile_kernels([Kernel("load", load, returns=False)], target), target)
    kind = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 3)
    kind(engine.get_function_address("load"))(memory.ctypes.data, group, out.ctypes.data)
    return out[0], out[1]
