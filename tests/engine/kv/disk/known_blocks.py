"""Blocks whose tokens and data are computed from their keys, so that tests can check their content."""

import hashlib
from collections.abc import Iterable
from pathlib import Path

from engine.config import BLOCK_SIZE
from engine.kv.blocks import BlockKey
from engine.kv.disk.quota import Quota
from engine.kv.disk.segment_file import SEGMENT_BLOCKS
from engine.kv.disk.store import DiskStore, FilledBlock

FINGERPRINT = bytes(range(32))
SIZES = (1000, 37)  # bytes per block of each group


def new_store(root: Path, limit: int | None = 1 << 30) -> DiskStore:
    """Return another store over the same folder, like that of another process."""
    return DiskStore(root / "model", FINGERPRINT, SIZES, Quota(root, limit))


def keys_of(name: object, count: int = SEGMENT_BLOCKS) -> list[BlockKey]:
    """Return the keys of a segment. The first one identifies it."""
    return [BlockKey(hashlib.sha256(f"{name} {number}".encode()).digest()) for number in range(count)]


def token_ids_of(key: BlockKey) -> tuple[int, ...]:
    return tuple(hashlib.shake_128(key).digest(BLOCK_SIZE))


def data_of(key: BlockKey, group: int, size: int) -> bytes:
    return hashlib.shake_128(key + bytes([group])).digest(size)


def filled(keys: Iterable[BlockKey], group: int = 0, size: int | None = None) -> list[FilledBlock]:
    size = SIZES[group] if size is None else size
    return [(key, token_ids_of(key), memoryview(data_of(key, group, size))) for key in keys]


def read_back(store: DiskStore, group: int, first_key: BlockKey) -> set[BlockKey]:
    """Read all blocks of a segment that are found, check their content, and return their keys. Raises DiskMiss."""
    blocks = list(store.find(group, first_key).values())
    read: list[bytes] = [b""] * len(blocks)

    def into(position: int, data: memoryview) -> None:
        read[position] = bytes(data)

    assert store.read(blocks, into) == SIZES[group] * len(blocks)
    for block, data in zip(blocks, read, strict=True):
        assert block.token_ids == token_ids_of(block.key)
        assert data == data_of(block.key, group, SIZES[group])
    return {block.key for block in blocks}
