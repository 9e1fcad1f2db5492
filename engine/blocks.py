"""BlockPool: which KV blocks are free, who shares the others, and which hold a prefix that may be used again. No torch.

A full block can be found by its key, a digest of everything its keys and values depend on: the key of the block before
it, its token ids, and what the pool's owner says of model and cache (`salt`). It is published only after the step that
filled it has completed. A look-up returns blocks that are held already, so that nothing can take them in between, and
compares the stored token ids, so that no digest is trusted alone.

A block that nobody holds keeps its content, and stays findable, until it is the least recently used one and its memory
is needed; of one chain the deeper blocks go first. Block 0 is the null block: never handed out, it stands wherever a
block id is needed and none is meant.
"""

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NewType

from engine.config import BLOCK_SIZE

NULL_BLOCK = 0

BlockKey = NewType("BlockKey", bytes)


def root_key(*salt: str) -> BlockKey:
    """The key before the first block. Every part of `salt` is tagged with its length: no two lists meet in one key."""
    digest = hashlib.sha256()
    for part in salt:
        raw = part.encode()
        digest.update(len(raw).to_bytes(8, "little") + raw)
    return BlockKey(digest.digest())


def block_key(parent: BlockKey, token_ids: Sequence[int]) -> BlockKey:
    """The key of a full block of `token_ids` behind `parent`."""
    return BlockKey(hashlib.sha256(parent + array("q", token_ids).tobytes()).digest())


@dataclass(slots=True)
class Content:
    """What a findable block holds."""

    key: BlockKey
    token_ids: tuple[int, ...]


class BlockPool:
    """Reference-counted block ids 1 .. num_blocks - 1, findable by content."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise ValueError(f"a pool of {num_blocks} blocks has none to hand out")
        self.num_blocks = num_blocks
        self._references = [0] * num_blocks
        self._contents: list[Content | None] = [None] * num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks))  # next to be taken first
        self._by_key: dict[BlockKey, int] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_findable(self) -> int:
        """Blocks whose content may be used again, held or free."""
        return len(self._by_key)

    @property
    def num_usable(self) -> int:
        """Blocks there are to hand out when nothing is held."""
        return self.num_blocks - 1

    def allocate(self, count: int) -> list[int]:
        """`count` blocks with one reference each. The caller has checked `num_free`; ValueError otherwise."""
        if count > len(self._free):
            raise ValueError(f"{count} blocks asked for, {len(self._free)} free")
        blocks = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block in blocks:
            self._forget(block)
            self._references[block] = 1
        return blocks

    def release(self, table: Sequence[int]) -> None:
        """Drop one reference of each block of a chain; a block without any is free. ValueError for one not held."""
        for block in reversed(table):
            if not 0 < block < self.num_blocks or self._references[block] == 0:
                raise ValueError(f"block {block} is not held")
            self._references[block] -= 1
            if self._references[block] == 0:
                self._free[block] = None
                if self._contents[block] is None:
                    self._free.move_to_end(block, last=False)

    def publish(self, block: int, key: BlockKey, token_ids: Sequence[int]) -> None:
        """Make a held block findable: the step that filled it has completed. The first block of a key stays the one."""
        if self._references[block] == 0:
            raise ValueError(f"block {block} is not held")
        if len(token_ids) != BLOCK_SIZE:
            raise ValueError(f"a block of {len(token_ids)} tokens is not full")
        if self._contents[block] is None and key not in self._by_key:
            self._contents[block] = Content(key, tuple(token_ids))
            self._by_key[key] = block

    def find(self, root: BlockKey, token_ids: Sequence[int], most: int) -> tuple[list[int], list[BlockKey]]:
        """The longest cached prefix of `token_ids`, at most `most` blocks: the blocks, now held, and their keys."""
        blocks: list[int] = []
        keys: list[BlockKey] = []
        parent = root
        for start in range(0, most * BLOCK_SIZE, BLOCK_SIZE):
            wanted = tuple(token_ids[start : start + BLOCK_SIZE])
            parent = block_key(parent, wanted)
            block = self._by_key.get(parent, NULL_BLOCK)
            content = self._contents[block]
            if content is None or content.token_ids != wanted:
                break
            self._hold(block)
            blocks.append(block)
            keys.append(parent)
        return blocks, keys

    def check(self) -> None:
        """Raise RuntimeError unless every block is free or held, and every findable block is the one its key names."""
        for block in range(self.num_blocks):
            held, free = self._references[block] > 0, block in self._free
            if block == NULL_BLOCK and (held or free or self._contents[block]):
                raise RuntimeError("the null block was handed out")
            if block != NULL_BLOCK and held == free:
                raise RuntimeError(f"block {block} is {'both held and free' if held else 'neither held nor free'}")
            content = self._contents[block]
            if content and self._by_key.get(content.key) != block:
                raise RuntimeError(f"block {block} is not the one its key names")
        if len(self._by_key) != sum(content is not None for content in self._contents):
            raise RuntimeError("a key names a block without that content")

    def _hold(self, block: int) -> None:
        if self._references[block] == 0:
            del self._free[block]
        self._references[block] += 1

    def _forget(self, block: int) -> None:
        content = self._contents[block]
        if content is not None:
            del self._by_key[content.key]
            self._contents[block] = None
