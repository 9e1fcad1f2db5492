"""RequestBlocks: the block tables and block keys of one request, and the locations of its blocks in other tiers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from engine.config import BLOCK_SIZE
from engine.kv.blocks import BlockKey
from engine.kv.disk.segment_file import SEGMENT_BLOCKS, DiskBlock
from engine.request import Request


class ChainKey(NamedTuple):
    """The key of a full block, and that of the first block of its segment of files."""

    key: BlockKey
    first_key: BlockKey


class Published(NamedTuple):
    """The changes of which blocks of a request can be found, as indices of full blocks."""

    kept: Sequence[int] = ()  # became findable
    dropped: Sequence[int] = ()  # are no longer worth their memory


@dataclass(slots=True)
class SavedBlocks:
    """The blocks of a preempted request in the host pools, from which it can resume."""

    num_computed: int
    blocks: tuple[list[tuple[int, int]], ...]  # (block index, host pool block) pairs, one list per KV group
    is_there: bool = False  # whether the copy to the host pools has completed
    is_lost: bool = False  # whether the copy to the host pools has failed


@dataclass(slots=True, eq=False)
class RequestBlocks:
    """The block tables and block keys of one request, and the locations of its blocks in other tiers."""

    request: Request
    tables: tuple[list[int], ...]  # block ids in order, one list per KV group
    keys: list[BlockKey] = field(default_factory=list)  # keys of its first full blocks, computed on demand
    num_published: int = 0  # number of its first blocks that are computed and findable
    saved: SavedBlocks | None = None
    # group of states -> index of the last full block whose state is findable, but only until a later one is
    last_states: dict[int, int] = field(default_factory=dict)
    borders: tuple[int, ...] | None = None  # numbers of tokens after which states are kept; None: not computed yet
    junction: int = 0  # number of tokens whose keys and values were found, although no state was found for them
    # blocks found in files, keyed by (group, segment)
    files: dict[tuple[int, int], Mapping[BlockKey, DiskBlock]] = field(default_factory=dict)

    def content(self, index: int) -> tuple[BlockKey, Sequence[int]]:
        """Return the key and the token ids of the full block at an index."""
        return self.keys[index], self.request.token_ids(index * BLOCK_SIZE, (index + 1) * BLOCK_SIZE)

    def chain_key(self, index: int) -> ChainKey:
        return ChainKey(self.keys[index], self.keys[index // SEGMENT_BLOCKS * SEGMENT_BLOCKS])


def blocks_for(tokens: int) -> int:
    return -(-tokens // BLOCK_SIZE)


def whole_blocks(tokens: int) -> int:
    """Return the number of tokens in full blocks."""
    return tokens // BLOCK_SIZE * BLOCK_SIZE
