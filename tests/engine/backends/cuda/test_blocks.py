"""The KV cache of a GPU: copies to host pools and back, and the contents of blocks."""

import random
import threading

import pytest
import torch

from engine.backends.cuda import blocks
from engine.backends.cuda.blocks import BlockRange, GpuBlocks, merge_ranges
from engine.backends.cuda.gpu import CopyStream, Gpu
from engine.kv.cache import bytes_of
from engine.kv.transfers import MoveBlock
from tests.engine.backends.cuda.two_devices import gpu
from tests.support.kv_groups import kv_group

MIB = 1 << 20
LAYERS = {(0, 2): (2, 16), (1,): (1, 32)}  # KV heads and head dimension of each group


def cache(device: torch.device, dtype: torch.dtype = torch.bfloat16) -> GpuBlocks:
    kv = GpuBlocks(gpu(device), [kv_group(layers, *heads, dtype) for layers, heads in LAYERS.items()], [9, 7], [11, 8])
    for pool in (*kv.pools, *kv.host_pools):
        pool.view(torch.uint8).random_(0, 256)
    return kv


def test_adjacent_blocks_are_copied_together() -> None:
    moves = [MoveBlock(0, source, source + 10, to_host=True) for source in (5, 3, 4, 7)]
    moves += [MoveBlock(0, 8, 19, to_host=True), MoveBlock(1, 8, 20, to_host=True), MoveBlock(1, 9, 21, to_host=False)]
    assert list(merge_ranges(moves, [100, 100])) == [
        BlockRange(0, True, 3, 13, 3),
        BlockRange(0, True, 7, 17, 1),
        BlockRange(0, True, 8, 19, 1),
        BlockRange(1, False, 9, 21, 1),
        BlockRange(1, True, 8, 20, 1),
    ]


def test_ranges_do_not_cross_pinned_parts() -> None:
    out = [MoveBlock(0, number, number + 2, to_host=True) for number in range(1, 9)]
    back = [MoveBlock(0, number, number + 3, to_host=False) for number in range(1, 9)]
    assert [(run.target, run.count) for run in merge_ranges(out, [4])] == [(3, 1), (4, 4), (8, 3)]
    assert [(run.source, run.count) for run in merge_ranges(back, [4])] == [(1, 3), (4, 4), (8, 1)]


def test_pieces_are_at_most_16_mb_and_whole_pages() -> None:
    for block_bytes in (2 * MIB, MIB + 512, 1536, 9 * MIB, 40 * MIB):
        size = blocks._piece_blocks(block_bytes) * block_bytes
        assert size <= max(16 * MIB, block_bytes)
        assert size % blocks.PAGE == 0
    assert blocks._piece_blocks(2 * MIB) == 8


def test_copies_of_adjacent_blocks_are_at_most_a_piece(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    kv = cache(device)
    monkeypatch.setattr(blocks, "PIECE_BYTES", 3 * kv.block_bytes[0])
    kv._pieces = [blocks._piece_blocks(size) for size in kv.block_bytes]
    sizes: list[int] = []
    monkeypatch.setattr(CopyStream, "copy", lambda _, source, target: sizes.append(source.nbytes))
    kv.move([MoveBlock(0, number, number, to_host=True) for number in range(1, 9)])
    assert max(sizes) <= 3 * kv.block_bytes[0]
    assert sum(sizes) == 8 * kv.block_bytes[0]


def test_memory_that_cannot_be_pinned_is_reported_once(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(blocks, "PIECE_BYTES", 1)
    monkeypatch.setattr(Gpu, "pin", lambda *_: False)
    cache(device).move([MoveBlock(0, number, number, to_host=True) for number in range(1, 9)])
    assert caplog.text.count("could not be pinned") == 1


@pytest.mark.parametrize("pinned", [1, 16 << 20])
def test_blocks_survive_a_round_trip_through_the_host(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, pinned: int
) -> None:
    monkeypatch.setattr(blocks, "PIECE_BYTES", pinned)
    kv, rng = cache(device), random.Random(pinned)
    for group, pool in enumerate(kv.pools):
        before = pool.cpu().view(torch.uint8).clone()
        chosen, slots = rng.sample(range(len(pool)), 5), rng.sample(range(len(kv.host_pools[group])), 5)
        kv.move([MoveBlock(group, *pair, to_host=True) for pair in zip(chosen, slots, strict=True)])
        pool.view(torch.uint8).zero_()
        targets = rng.sample(range(len(pool)), 5)
        kv.move([MoveBlock(group, *pair, to_host=False) for pair in zip(slots, targets, strict=True)])
        after = pool.cpu().view(torch.uint8)
        assert torch.equal(after[targets], before[chosen])
        assert not after[[block for block in range(len(pool)) if block not in targets]].any()


def test_block_contents_are_read_and_written_by_threads(device: torch.device) -> None:
    kv = cache(device)
    assert kv.block_bytes == [2 * 2 * 2 * 16 * 16 * 2, 2 * 16 * 32 * 2]
    contents = [bytes(content) for content in kv.contents(0, [3, 1])]
    assert contents == [bytes(bytes_of(kv.pools[0])[block].cpu().numpy()) for block in (3, 1)]
    thread = threading.Thread(target=kv.fill, args=(0, 5, memoryview(contents[0])))
    thread.start()
    thread.join()
    assert bytes(kv.contents(0, [5])[0]) == contents[0]


def test_host_pools_are_page_aligned(device: torch.device) -> None:
    assert all(pool.data_ptr() % blocks.PAGE == 0 for pool in cache(device).host_pools)
