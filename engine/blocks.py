"""BlockPool: which KV blocks are free and who shares the others. Ids only; no torch, no contents.

Block 0 is the null block: never handed out, it stands wherever a block id is needed and none is meant.
"""

from collections import deque
from collections.abc import Iterable

NULL_BLOCK = 0


class BlockPool:
    """Reference-counted block ids 1 .. num_blocks - 1."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise ValueError(f"a pool of {num_blocks} blocks has none to hand out")
        self.num_blocks = num_blocks
        self._free = deque(range(1, num_blocks))
        self._references = [0] * num_blocks

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """`count` blocks with one reference each. The caller has checked `num_free`; ValueError otherwise."""
        if count > len(self._free):
            raise ValueError(f"{count} blocks asked for, {len(self._free)} free")
        blocks = [self._free.popleft() for _ in range(count)]
        for block in blocks:
            self._references[block] = 1
        return blocks

    def release(self, blocks: Iterable[int]) -> None:
        """Drop one reference of each block; a block without any is free again. ValueError for a block not held."""
        for block in blocks:
            if not 0 < block < self.num_blocks or self._references[block] == 0:
                raise ValueError(f"block {block} is not held")
            self._references[block] -= 1
            if self._references[block] == 0:
                self._free.append(block)

    def check(self) -> None:
        """Raise RuntimeError unless every block is free or held, exactly one of the two, and the null block neither."""
        free = set(self._free)
        if len(free) != len(self._free):
            raise RuntimeError("a block is in the free list twice")
        for block in range(self.num_blocks):
            held = self._references[block] > 0
            if block == NULL_BLOCK and (held or block in free):
                raise RuntimeError("the null block was handed out")
            if block != NULL_BLOCK and held == (block in free):
                raise RuntimeError(f"block {block} is {'both held and free' if held else 'neither held nor free'}")
