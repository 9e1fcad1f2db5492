"""BlockPool: reference counts of KV blocks, and lookup of cached blocks by content. Imports no torch.

A full block is found by its key, a digest of everything that its keys and values depend on: the key of the previous
block, its token ids, and a salt for the model and the cache. It is published only after the step that filled it has
completed. A lookup also compares the stored token ids, so it does not rely on the digest alone. The caller must hold
the blocks that it found before it allocates others.

A block without references keeps its content and can be found until it is evicted. Eviction takes the least recently
used block; within a chain, the deeper blocks first. Block 0 is the null block: it is never allocated, and marks table
entries without a block.
"""

import hashlib
from array import array
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NewType

from engine.config import BLOCK_SIZE

NULL_BLOCK = 0

BlockKey = NewType("BlockKey", bytes)


def root_key(*salt: str) -> BlockKey:
    """Return the key that serves as the parent of a chain's first block.

    Each string in `salt` is tagged with its length, so that different lists never give the same key.
    """
    digest = hashlib.sha256()
    for part in salt:
        raw = part.encode()
        digest.update(len(raw).to_bytes(8, "little") + raw)
    return BlockKey(digest.digest())


def block_key(parent: BlockKey, token_ids: Sequence[int]) -> BlockKey:
    """Return the key of a full block of `token_ids` that follows the block with key `parent`."""
    return BlockKey(hashlib.sha256(parent + array("q", token_ids).tobytes()).digest())


@dataclass(slots=True)
class Content:
    """The content by which a block can be found."""

    key: BlockKey
    token_ids: tuple[int, ...]
    on_host: bool = False  # whether the host pool has a copy, so that evicting the block costs little
    on_disk: bool = False  # whether it is stored in a file or queued to be written


class BlockPool:
    """Reference-counted block ids 1 .. num_blocks - 1, findable by content."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise ValueError(f"a pool of {num_blocks} blocks has none to allocate")
        self.num_blocks = num_blocks
        self._references = [0] * num_blocks
        self._contents: list[Content | None] = [None] * num_blocks
        self._empty = deque(range(1, num_blocks))  # free blocks without content, allocated from the left
        # free blocks with content, evicted when no empty block is left
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._by_key: dict[BlockKey, int] = {}

    @property
    def num_free(self) -> int:
        return len(self._empty) + len(self._cached)

    @property
    def num_cached(self) -> int:
        """Number of free blocks whose content can be reused."""
        return len(self._cached)

    @property
    def num_usable(self) -> int:
        """Number of blocks that could be allocated if none were held."""
        return self.num_blocks - 1

    def adopt(self, parked: "BlockPool") -> None:
        """Take over the content of a pool of the same size whose blocks no request holds.

        The new engine may have other files and no host pools, so its blocks count as neither stored nor copied.
        """
        self._contents, self._by_key = parked._contents, parked._by_key
        self._empty, self._cached = parked._empty, parked._cached
        for content in filter(None, self._contents):
            content.on_host = content.on_disk = False

    def allocate(self, count: int) -> list[int]:
        """Allocate blocks with one reference each. Raises ValueError if fewer than `count` are free."""
        if count > self.num_free:
            raise ValueError(f"{count} blocks requested, {self.num_free} free")
        blocks = [self._empty.popleft() if self._empty else self._evict() for _ in range(count)]
        for block in blocks:
            self._references[block] = 1
        return blocks

    def release(self, table: Sequence[int], *, cold: bool = False) -> None:
        """Drop one reference to each block of a chain. Blocks without references become free.

        If `cold`, their content is evicted first, otherwise last. Raises ValueError if a block is not held.
        """
        for block in reversed(table):
            if not 0 < block < self.num_blocks or self._references[block] == 0:
                raise ValueError(f"block {block} is not held")
            self._references[block] -= 1
            if self._references[block] == 0 and self._contents[block] is None:
                self._empty.appendleft(block)
            elif self._references[block] == 0:
                self._cached[block] = None
                self._cached.move_to_end(block, last=not cold)

    def publish(self, block: int, key: BlockKey, token_ids: Sequence[int]) -> None:
        """Make a held block findable. Call this once the step that filled the block has completed.

        If another block is already published under the same key, that block stays and this one is not published.
        """
        if self._references[block] == 0:
            raise ValueError(f"block {block} is not held")
        if len(token_ids) != BLOCK_SIZE:
            raise ValueError(f"a block of {len(token_ids)} tokens is not full")
        if self._contents[block] is None and key not in self._by_key:
            self._contents[block] = Content(key, tuple(token_ids))
            self._by_key[key] = block

    def unpublish(self, block: int) -> None:
        """Remove a block from the index, so that `find` no longer returns it."""
        content, self._contents[block] = self._contents[block], None
        if content is not None:
            del self._by_key[content.key]
        if block in self._cached:
            del self._cached[block]
            self._empty.appendleft(block)

    def find(self, key: BlockKey, token_ids: Sequence[int]) -> int:
        """Return the block with this content, or NULL_BLOCK. Adds no reference; `hold` does."""
        block = self._by_key.get(key, NULL_BLOCK)
        content = self._contents[block]
        return block if content is not None and content.token_ids == tuple(token_ids) else NULL_BLOCK

    def block_of(self, key: BlockKey) -> int:
        """Return the findable block with this key, or NULL_BLOCK."""
        return self._by_key.get(key, NULL_BLOCK)

    def hold(self, block: int) -> None:
        """Add a reference to a block that is held or findable."""
        if self._references[block] == 0:
            if self._contents[block] is None:
                raise ValueError(f"block {block} is neither held nor findable")
            del self._cached[block]
        self._references[block] += 1

    def touch(self, block: int) -> None:
        """Evict a free block with content after all others. The null block is ignored."""
        if block in self._cached:
            self._cached.move_to_end(block)

    def in_eviction_order(self) -> Iterator[int]:
        """Iterate over the free blocks with content, in the order in which they will be evicted."""
        return iter(self._cached)

    def content(self, block: int) -> tuple[BlockKey, tuple[int, ...]]:
        """Return the key and the token ids of a findable block."""
        content = self._contents[block]
        if content is None:
            raise ValueError(f"block {block} is not findable")
        return content.key, content.token_ids

    def mark_on_host(self, block: int) -> None:
        """Record that the host pool has the content of a findable block, or is receiving a copy of it."""
        if content := self._contents[block]:
            content.on_host = True

    def is_on_host(self, block: int) -> bool:
        content = self._contents[block]
        return content is not None and content.on_host

    def mark_on_disk(self, block: int, *, on_disk: bool = True) -> None:
        """Record whether the content of a findable block is in a file or queued to be written."""
        if content := self._contents[block]:
            content.on_disk = on_disk

    def is_on_disk(self, block: int) -> bool:
        content = self._contents[block]
        return content is not None and content.on_disk

    def is_held(self, block: int) -> bool:
        return self._references[block] > 0

    def is_shared(self, block: int) -> bool:
        """Whether the block has several references, so that none of its holders may write to it."""
        return self._references[block] > 1

    def is_findable(self, block: int) -> bool:
        """Whether the block is published, so that none of its holders may write to it."""
        return self._contents[block] is not None

    def check_consistency(self) -> None:
        """Raise RuntimeError unless every block is either free or held, and every key maps to the block that has it."""
        empty = set(self._empty)
        for block in range(self.num_blocks):
            held, free = self._references[block] > 0, block in empty or block in self._cached
            if block == NULL_BLOCK and (held or free or self._contents[block]):
                raise RuntimeError("the null block was allocated")
            if block != NULL_BLOCK and held == free:
                raise RuntimeError(f"block {block} is {'both held and free' if held else 'neither held nor free'}")
            content = self._contents[block]
            if content and self._by_key.get(content.key) != block:
                raise RuntimeError(f"block {block} is not the one its key maps to")
            if content if block in empty else not content and block in self._cached:
                raise RuntimeError(f"block {block} is in the wrong list of free blocks")
        if len(self._by_key) != sum(content is not None for content in self._contents):
            raise RuntimeError("a key maps to a block without that content")

    def _evict(self) -> int:
        """Drop the least recently used content, and return the block that held it."""
        block, _ = self._cached.popitem(last=False)
        del self._by_key[self.content(block)[0]]
        self._contents[block] = None
        return block
