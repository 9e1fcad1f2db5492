"""Regions of an arena: alignment, guards, and address ranges."""

import ctypes
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quant.cpu.arena import ALIGNMENT, CHUNK, Arena, Overrun
from tests.quant.cpu.poisoning import poison

SIZES = st.one_of(st.integers(1, 300), st.sampled_from([CHUNK // 2, CHUNK - 64, CHUNK, CHUNK + 1]))


@given(st.lists(SIZES, max_size=12))
def test_regions_are_aligned_zeroed_and_disjoint(sizes: list[int]) -> None:
    arena = Arena()
    regions = [arena.allocate(f"region {number}", size) for number, size in enumerate(sizes)]
    assert [region.size for region in regions] == sizes
    assert all(region.address % ALIGNMENT == 0 for region in regions)
    assert not any(region.bytes[:200].any() or region.bytes[-200:].any() for region in regions)
    for number, region in enumerate(regions):
        region.bytes[:200] = region.bytes[-200:] = number + 1
    assert all((region.bytes[:200] == number + 1).all() for number, region in enumerate(regions))
    assert arena.nbytes == sum(sizes)
    arena.check_guards()


def test_threads_get_disjoint_regions() -> None:
    arena, threads = Arena(), 8
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(threads) as pool:
            regions = list(pool.map(lambda number: arena.allocate(f"region {number}", 100), range(4000)))
    finally:
        sys.setswitchinterval(interval)
    starts = sorted(region.address for region in regions)
    assert all(second - first > 100 for first, second in pairwise(starts))
    assert arena.nbytes == 4000 * 100


@pytest.mark.parametrize("offset", [0, 1, 63])
@pytest.mark.parametrize("size", [1, 64, 1000])
def test_overrun_names_the_region(size: int, offset: int) -> None:
    arena = Arena()
    arena.allocate("before", 100)
    region = arena.allocate("the victim", size)
    arena.allocate("after", 100)
    arena.check_guards()
    ctypes.c_uint8.from_address(region.address + size + offset).value ^= 1
    with pytest.raises(Overrun, match=f"past the {size} bytes of the victim"):
        arena.check_guards()


def test_poison_fills_only_named_regions_with_nan() -> None:
    arena = Arena()
    rows, weight = arena.allocate("rows", 256), arena.allocate("weight", 256)
    again = arena.allocate("rows", 64)
    poison(arena, "rows", "unknown")
    assert np.isnan(rows.view(np.float32, 64)).all()
    assert np.isnan(rows.view(np.float16, 128)).all()
    assert np.isnan(again.view(np.float32, 16)).all()
    assert not weight.bytes.any()
    arena.check_guards()


def test_views_start_at_the_region_address() -> None:
    region = Arena().allocate("words", 100)
    region.view(np.int64, 3, 2)[:] = np.arange(6).reshape(3, 2)
    assert region.view(np.int64, 6).tolist() == [0, 1, 2, 3, 4, 5]
    assert region.view(np.int64, 3, 2).ctypes.data == region.address


def test_shared_region_is_reallocated_only_for_a_larger_size() -> None:
    arena = Arena()
    first = arena.shared("pieces", 100)
    assert arena.shared("pieces", 60) is first
    assert arena.shared("pieces", 100) is first
    assert arena.shared("others", 60) is not first
    assert arena.shared("pieces", 101).size == 101


def test_address_range_must_be_within_one_region() -> None:
    arena = Arena()
    first, second = arena.allocate("first", 128), arena.allocate("second", 64)
    ranges = arena.address_ranges()
    assert ranges.contains(first.address, 128)
    assert ranges.contains(first.address + 127, 1)
    assert ranges.contains(second.address + 64, 0)
    assert not ranges.contains(first.address, 129)
    assert not ranges.contains(first.address - 1, 1)
    assert not ranges.contains(first.address + 128, 1)  # the address is in the guard
    assert not ranges.contains(first.address, second.address - first.address + 1)
    assert not ranges.contains(first.address, -1)
    assert not ranges.contains(0, 1)
    assert not ranges.contains(1 << 62, 1)
    assert not Arena().address_ranges().contains(first.address, 0)


def test_adopted_memory_becomes_a_region() -> None:
    arena = Arena()
    memory = np.zeros(256, np.uint8)
    region = arena.adopt("pool", memory)
    assert arena.address_ranges().contains(memory.ctypes.data, 256)
    assert not arena.address_ranges().contains(memory.ctypes.data, 257)
    region.bytes[3] = 7
    assert memory[3] == 7
    arena.check_guards()
